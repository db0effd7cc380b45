"""The settings of the round loop, and the device, engine and processes that run it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from copfl.core.algorithm import AnyAlgorithm
from copfl.core.batches import participants
from copfl.core.evaluation import EVAL_MODELS
from copfl.core.task import Data, Task
from copfl.data.federation import Federation
from copfl.engine import autotune, mapping
from copfl.engine.cuda_graph import out_of_memory
from copfl.engine.mapping import Mapping as Engine
from copfl.errors import RunError, UsageError, one_of

# In tf32 and bf16 only the matrix products are short; "auto" is tf32 on a GPU and fp32 elsewhere.
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp64")
ENGINES = ("auto", "sequential", "vmap", "cuda_graph")
STORES = ("memory", "disk")
SWITCH = ("auto", "on", "off")
LIMITS = {  # the least and the most of each number
    "clients": (1, 10**7),
    "rounds": (1, 10**9),
    "batch": (1, 10**9),
    "eval_every": (1, 10**9),
    "checkpoint_every": (1, 10**9),
    "threads": (1, 1024),
    "workers": (0, 1024),
    "chunk": (0, 10**9),
}


@dataclass(frozen=True)
class Loop:
    """The table [run]: the settings of the round loop."""

    clients: int = 10
    rounds: int = 100
    seed: int = 0
    batch: int = 32
    participation: float = 1.0
    eval_every: int = 1  # rounds between evaluations
    eval_models: str = "all"  # "personal": without the global model; "final": only after local training
    checkpoint_every: int = 10
    buffers: str = "local"
    device: str = "cpu"
    engine: str = "auto"
    chunk: int = 0  # clients in one batch; 0: the engine's choice
    precision: str = "auto"
    threads: int = 1
    workers: int = 1  # processes that train clients, on a CPU; 0: the fastest number by a short measurement
    store: str = "memory"  # where client states are between rounds: "memory", or "disk" for many clients
    mkldnn: str = "auto"  # kernels of a CPU: "on", "off", or the faster by a short measurement
    save_models: bool = True  # whether every client's personal model is written when the run ends

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            if not low <= (value := getattr(self, name)) <= high:
                automatic = "; 0 is automatic" if low == 0 else ""
                raise UsageError(f"{name}={value} must be at least {low} and at most {high:,}{automatic}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed} must be at least 0 and below 2^63")
        if not 0 < self.participation <= 1:
            raise UsageError(f"participation={self.participation} must be above 0 and at most 1")
        one_of(ENGINES, engine=self.engine)
        one_of(EVAL_MODELS, eval_models=self.eval_models)
        one_of(STORES, store=self.store)
        one_of(SWITCH, mkldnn=self.mkldnn)
        one_of(PRECISIONS, precision=self.precision)

    @property
    def participants(self) -> int:
        """The number of clients in each round."""
        return participants(self.clients, self.participation)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32

    def precision_on(self, device: torch.device) -> str:
        """The precision, with "auto" decided, set up in torch."""
        usual = "tf32" if device.type == "cuda" else "fp32"
        precision = usual if self.precision == "auto" else self.precision
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        return precision


def device_of(name: str) -> torch.device:
    """The device by its name, if this machine has it; "auto" is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f'device "{name}" is unknown; use cpu, cuda, cuda:N or auto') from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f'device "{name}" is not supported; use cpu, cuda, cuda:N or auto')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f'device "{name}" needs a CUDA GPU and a CUDA build of PyTorch; use --device cpu')
    return device


def choose_engine(loop: Loop, task: Task, federation: Federation, algorithm: AnyAlgorithm) -> Engine:
    """The engine by name; "auto" is a CUDA graph on a GPU, and on a CPU the fastest by a short measurement.

    The model is tried on two samples: one that does not fit the data or the engine fails before the run.
    """
    autotune.set_mkldnn(loop.mkldnn != "off")
    cuda = task.device.type == "cuda"
    if not cuda:
        autotune.keep_freed_memory()
    chunk = loop.chunk or _chunk(task, loop.participants)
    sequential, vmap, cuda_graph = mapping.sequential(), mapping.vmap(chunk), mapping.cuda_graph(chunk)
    usual = cuda_graph if cuda else vmap if task.d < 1_000_000 else sequential
    engine = {"sequential": sequential, "vmap": vmap, "cuda_graph": cuda_graph, "auto": usual}[loop.engine]
    data = federation.train.rows([0])
    problem = _problem(task, engine, data)
    if problem and engine.name != "sequential" and not _problem(task, sequential, data):
        if loop.engine == "auto":
            return sequential
        raise UsageError(
            f"the model cannot be trained in batches of clients ({problem}); use --engine sequential"
        )
    if problem:
        shape = list(federation.shape)
        raise UsageError(
            f"the model does not fit samples of shape {shape}: {problem}; choose another --model"
        )
    if loop.engine != "auto" or cuda:
        return engine
    enabled = autotune.mkldnn_enabled()
    switches = (True, False) if loop.mkldnn == "auto" and enabled else (enabled,)
    others = [e for e in (sequential, vmap) if e is not engine and not _problem(task, e, data)]
    choices = [autotune.Choice(e, switch) for e in (engine, *others) for switch in switches]
    updates = loop.participants * loop.rounds
    chosen = autotune.choose(algorithm, task, federation, choices, batch=loop.batch, local_updates=updates)
    autotune.set_mkldnn(chosen.mkldnn)
    return chosen.engine


def choose_workers(
    loop: Loop, task: Task, federation: Federation, algorithm: AnyAlgorithm, engine: Engine
) -> int:
    """The number of processes that makes this run fastest."""
    if task.device.type != "cpu" or loop.threads > 1:
        return 1
    return autotune.processes(
        algorithm,
        task,
        federation,
        autotune.Choice(engine, autotune.mkldnn_enabled()),
        batch=loop.batch,
        participants=loop.participants,
        rounds=loop.rounds,
        states=federation.clients if loop.store == "memory" else 0,
    )


def _chunk(task: Task, count: int) -> int:
    """The number of clients in one batch; on a GPU, its free memory divided by fifty vectors per client.

    Several batches are of equal size if possible: another size needs another CUDA graph.
    """
    if task.device.type != "cuda":
        return autotune.chunk_of(task, count)
    free, _ = torch.cuda.mem_get_info(task.device)
    most = max(1, min(512, int(free / (50 * 4 * task.layout.size + 64e6))))
    return most if count <= most else math.ceil(count / math.ceil(count / most))


def _problem(task: Task, engine: Engine, data: Data) -> str:
    """The error of one training step of one client, empty if there is none."""

    def step(given: tuple[Tensor, Data]) -> tuple[Tensor, Tensor]:
        w, data = given
        x, y = task.numbers(data.x[:2]), data.y[:2]
        return task.forward(w, x)[0], task.gradient(w[: task.d], w[task.d :], x, y)[0]

    try:
        with torch.no_grad(), torch.random.fork_rng(cuda_of(task)):
            logits, _ = engine.over(step, (task.initial[None], data))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        if out_of_memory(error):
            raise RunError(
                "the GPU has too little free memory for the model and two samples; other processes use it "
                "(nvidia-smi lists them) or the model is too large: use --device cpu or a smaller model"
            ) from error
        return f"{type(error).__name__}: {error}".strip().partition("\n")[0].rstrip(".")
    if logits.shape[2:] != (task.classes,):
        return f"the output for a sample has shape {list(logits.shape[2:])} instead of [{task.classes}]"
    return ""


def cuda_of(task: Task) -> list[torch.device]:
    """The devices beside the CPU whose random state training may use."""
    return [task.device] if task.device.type == "cuda" else []
