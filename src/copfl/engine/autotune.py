"""The choice of the engine, the clients per batch and the processes, by a short measurement.

The choice changes speed and rounding, nothing else. It is written to run.toml, so that a resumed or repeated
run makes the same one.
"""

import ctypes
import math
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, next_plan, traits
from copfl.core.task import Data, Task
from copfl.data.clients.federation import FederatedData
from copfl.engine import mapping
from copfl.engine.cuda_graph import WARMUP, out_of_memory
from copfl.engine.machine import processors
from copfl.engine.mapping import Chunk, Group, Mapping, run_chunk
from copfl.errors import RunError, UsageError, how_to_set, option
from copfl.kernels.draws import Keyed

MEASURED_FROM = 60.0  # seconds: a shorter run is not measured
GAIN = 1.25  # the factor by which another choice must be faster, so that noise does not decide
MAX_CLIENTS = {"cpu": 64, "cuda": 512}  # in one batch
MEMORY = 4e9  # bytes that a batch may take on a CPU
VECTORS, ACTIVATIONS = 50, 64e6  # that a client may take: vectors of all numbers, and bytes beside them
GPU_VECTORS = 25  # the same on a GPU, where a batch that does not fit is halved; FedPer with Adam takes 12
CONTEXT = 1e9  # bytes of a GPU that a process takes beside its tensors
LONG = 0.5  # seconds: a longer measurement is not repeated
FEW_CLIENTS, FEW_SAMPLES = 2, 4  # of the first trial; if it is long, it is the only one
PARALLEL_FROM = 30.0  # seconds: a shorter run would spend on starting processes what they save
SHARED = Path("/dev/shm")  # where Linux has the memory that processes share


class Workload(NamedTuple):
    """The local updates of a run."""

    algorithm: AnyAlgorithm
    task: Task
    federation: FederatedData
    batch: int
    participants: int  # in each round
    rounds: int
    processes: int = 1  # that may train its clients

    @property
    def local_updates(self) -> int:
        return self.participants * self.rounds

    def parallel(self, engine: Mapping) -> int:
        """The number of processes that can train at the same time with this engine."""
        return min(self.processes, math.ceil(self.participants / engine.chunk))


def choose_engine(load: Workload, *, engine: str, chunk: int) -> Mapping:
    """The engine by name; "auto" is a CUDA graph on a GPU, and on a CPU the fastest by a short measurement.

    The model is tried on two samples: one that does not fit the data or the engine fails before the run.

    Args:
        load: What is trained.
        engine: Its name, or "auto".
        chunk: Clients in a batch; 0: as many as fit into memory.
    """
    task, federation = load.task, load.federation
    cuda = task.device.type == "cuda"
    if not cuda:
        keep_freed_memory()
    chunk = chunk or clients_per_batch(task, load.participants)
    sequential, vmap, cuda_graph = mapping.sequential(), mapping.vmap(chunk), mapping.cuda_graph(chunk)
    usual = cuda_graph if cuda else vmap if task.d < 1_000_000 else sequential
    named = {"sequential": sequential, "vmap": vmap, "cuda_graph": cuda_graph, "auto": usual}[engine]
    data = federation.train.rows([0])
    problem = _problem(task, named, data)
    if problem and named.name != "sequential" and not _problem(task, sequential, data):
        if engine == "auto":
            return sequential
        raise UsageError(
            f"the model cannot be trained in batches of clients ({problem}); use "
            f"{how_to_set('run.engine', 'sequential', '--engine')}"
        )
    check_fit(task, federation, problem)
    if engine != "auto" or cuda:
        return named
    others = [e for e in (sequential, vmap) if e is not named and not _problem(task, e, data)]
    return choose(load, [named, *others])


def check_fit(task: Task, federation: FederatedData, problem: str | None = None) -> None:
    """Raises a UsageError if the model cannot be trained on the samples; `problem`: what is known already.

    Args:
        task: With the model.
        federation: The samples.
        problem: What is known already to be wrong; "" for nothing, None where nothing was tried.
    """
    problem = _problem(task, mapping.sequential(), federation.train.rows([0])) if problem is None else problem
    if problem:
        kinds = {x.dtype for x in tree.leaves(federation.train.x)}
        are_floats = all(kind.is_floating_point or kind == torch.uint8 for kind in kinds)
        remedy = "" if are_floats else "pass x.astype('float32'), as whole numbers are taken for tokens, or "
        fault = f"the model does not fit samples of shape {list(federation.shape)}: {problem}"
        raise UsageError(f"{fault}; {remedy}choose another {option('model')}")


def _problem(task: Task, engine: Mapping, data: Data) -> str:
    """The error of one training step of one client, empty if there is none."""

    problem, shapes = "", list[list[int]]()

    def step(inputs: tuple[Tensor, Data]) -> Tensor:
        w, data = inputs
        x, y = tree.each(lambda t: t[:2], (task.numbers(data.x), data.y))
        keyed = Keyed(x, torch.zeros((), dtype=torch.int64, device=task.device))
        shapes.append(list(task.forward(w, x)[0].shape[1:]))
        return task.gradient(w[: task.d], w[task.d :], keyed, y)[0]

    try:
        with torch.no_grad():
            engine.over(step, (task.initial[None], data))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, mapping.NotBatchable) as raised:
        error = raised.__cause__ if isinstance(raised, mapping.NotBatchable) and raised.__cause__ else raised
        if out_of_memory(error):
            raise RunError(
                "the GPU has too little free memory for the model and two samples: other processes use it "
                "(nvidia-smi lists them) or the model is too large; use "
                f"{how_to_set('run.device', 'cpu', '--device')} or a smaller model"
            ) from error
        problem = f"{type(error).__name__}: {error}".strip().partition("\n")[0].rstrip(".")
    if shapes and task.criterion.kind != "next_token" and shapes[0] != [task.classes]:
        return f"the output for a sample has shape {shapes[0]} instead of [{task.classes}]"
    return problem


def clients_per_batch(task: Task, participants: int) -> int:
    """The clients in one batch, so that it fits into memory and the batches of a round are of equal size.

    On a GPU another size would need another CUDA graph. On a CPU the batches also use all processors.

    Args:
        task: With the model.
        participants: Clients of a round.
    """
    vector = 4 * task.layout.size
    if task.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(task.device)
        most = max(1, min(MAX_CLIENTS["cuda"], int(free / (GPU_VECTORS * vector + ACTIVATIONS))))
        return most if participants <= most else math.ceil(participants / math.ceil(participants / most))
    batches = math.ceil(participants / max(1, min(MAX_CLIENTS["cpu"], int(MEMORY / (VECTORS * vector)))))
    workers = min(processors(), 8)
    if participants >= 8 * workers:  # with fewer, a batch would be too small to be fast
        batches = math.ceil(batches / workers) * workers
    return math.ceil(participants / batches)


def runs_at_a_time(task: Task, federation: FederatedData, participants: int) -> int:
    """The runs of this size that the machine trains at a time, each in a process of its own.

    One per processor; on a GPU as far as its memory suffices. A small model alone leaves most of a GPU idle.

    Args:
        task: With the model.
        federation: The samples, which each process has.
        participants: Clients of a round.
    """
    if task.device.type != "cuda":
        return processors()
    free, _ = torch.cuda.mem_get_info(task.device)
    samples = sum(t.nbytes for split in federation.splits for t in tree.leaves((split.x, split.y)))
    clients = min(participants, MAX_CLIENTS["cuda"])
    run = CONTEXT + samples + clients * (VECTORS * 4 * task.layout.size + ACTIVATIONS)
    return max(1, min(processors(), int(free / run)))


def choose(load: Workload, engines: Sequence[Mapping]) -> Mapping:
    """The first engine, unless the run is long and another is clearly faster, on all processes together.

    Args:
        load: What is trained.
        engines: Those that it can be trained with, the usual one first.
    """
    best, *others = engines
    if not others:
        return best
    fastest = seconds(load, best, enough=MEASURED_FROM * GAIN / load.local_updates) / GAIN
    if fastest * load.local_updates < MEASURED_FROM:
        return best
    fastest /= load.parallel(best)
    for other in others:
        parallel = load.parallel(other)
        measured = seconds(load, other, limit=fastest * parallel) / parallel
        if measured < fastest:
            best, fastest = other, measured
    return best


def total_seconds(load: Workload, engine: Mapping) -> float:
    """The processor seconds of all local updates on a CPU; of a short run an upper bound.

    Args:
        load: What is trained.
        engine: How.
    """
    return seconds(load, engine, enough=PARALLEL_FROM / load.local_updates) * load.local_updates


def gpu_seconds(load: Workload, engine: Mapping) -> float:
    """The seconds of all local updates on a GPU, once they are recorded.

    Args:
        load: What is trained.
        engine: How.
    """
    chunk, factor = _trial(load, min(engine.chunk, load.federation.clients), load.batch)
    for number in range(WARMUP + 2):  # the last one is a replay
        torch.cuda.synchronize()
        start = time.perf_counter()
        run_chunk(load.algorithm, load.task, engine, chunk, ())
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start if number else math.inf
    engine.release()
    return elapsed * factor * load.local_updates


def processes(load: Workload, engine: Mapping, states: int, total: float) -> int:
    """The number of worker processes: one for each processor if the run is long, else one; on a GPU one.

    `states` is the number of clients' records in memory, which processes must then share; `total` are the
    processor seconds of all local updates. Results do not depend on the number of processes.

    Args:
        load: What is trained.
        engine: How.
        states: Clients' records in memory, which processes must then share.
        total: The processor seconds of all local updates.
    """
    algorithm, task = load.algorithm, load.task
    most = min(processors(), math.ceil(load.participants / engine.chunk))
    if most < 2 or task.device.type != "cpu":
        return 1
    record = sum(t.nbytes for t in tree.leaves(algorithm.client_init(task)))
    if not _can_share(states * record + 8 * most * task.initial.nbytes) or not _can_pickle((algorithm, task)):
        return 1
    return most if total > PARALLEL_FROM else 1


def _can_share(size: int) -> bool:
    """Whether processes can share this many bytes; a container may have little space for that."""
    if not SHARED.is_dir():
        return True
    space = os.statvfs(SHARED)
    return space.f_bavail * space.f_frsize > 1.5 * size


def _can_pickle(value: object) -> bool:
    """Whether the value can be sent to another process; a model that was defined in a console cannot."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def seconds(load: Workload, engine: Mapping, limit: float = math.inf, enough: float = 0.0) -> float:
    """The processor seconds of a client's local update: the better of two measurements.

    The first decides if it is far beyond the limit, or below `enough`. One step per epoch is timed and
    multiplied by the number of steps: a slow engine would otherwise take a minute. Few samples of two clients
    come first. Of a large model they take long enough to decide, and all samples would take minutes.

    Args:
        load: What is trained.
        engine: How.
        limit: Of a better engine: a first measurement far beyond it decides.
        enough: A first measurement below it decides.
    """
    algorithm = load.algorithm
    task = load.task.with_batching() if engine.name != "sequential" else load.task
    clients = min(engine.chunk, load.federation.clients)

    def measured(chunk: Chunk) -> float:
        # The processor's time, which the load of other programs does not change.
        start = time.process_time()
        run_chunk(algorithm, task, engine, chunk, ())
        return time.process_time() - start

    few, factor = _trial(load, min(clients, FEW_CLIENTS), FEW_SAMPLES)
    first = measured(few)
    if LONG < first < 4 * LONG:  # the first call of a program may prepare something
        first = min(first, measured(few))
    if first > LONG or first * factor < enough:
        return first * factor
    whole, factor = _trial(load, clients, load.batch)
    best = math.inf
    for _ in range(2):
        elapsed = measured(whole)
        best = min(best, elapsed * factor)
        if best < enough or best > 3 * limit or elapsed > LONG:
            break
    return best


def _trial(load: Workload, clients: int, samples: int) -> tuple[Chunk, float]:
    """Local updates of a step per epoch, of `samples` samples; the factor to one client's local update.

    With fewer samples than a batch, the clients have no others: some updates also make a pass over all.
    """
    algorithm, task, federation, ids = load.algorithm, load.task, load.federation, np.arange(clients)
    sizes, data = federation.train.sizes[ids], federation.train.rows(ids)
    steps = traits(algorithm).local_steps or math.ceil(sizes.max() / load.batch)
    factor = steps / clients
    if samples < load.batch:
        factor *= min(load.batch, sizes.max()) / min(samples, sizes.max())
        sizes = np.minimum(sizes, samples)
        x, y = tree.each(lambda t: t[:, :samples], (data.x, data.y))
        data = Data(x, y, data.size.clamp(max=samples))
    records = tree.repeat(algorithm.client_init(task), len(ids))
    augment = federation.dataset.augment
    batches = next_plan(
        algorithm, task, records, 0, ids, sizes, seed=0, batch=min(load.batch, samples), augment=augment
    )
    chunk = Chunk(
        server=algorithm.server_init(task, federation.clients),
        ids=torch.from_numpy(ids).to(task.device),
        clients=records,
        groups=(Group(None, data, federation.test.rows(ids), tuple(epoch[:1] for epoch in batches)),),
    )
    return chunk, factor


def keep_freed_memory() -> None:
    """Has the C library, where it is glibc, keep freed memory for the next tensor.

    Large blocks otherwise go back to the system at once, and with a large model on a CPU fresh pages take as
    long as the computation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):
            mallopt(option, value)
