"""From names or values to the experiment they describe. Nothing is written: what cannot be run is found out here."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from copfl import models
from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import AnyAlgorithm, example_upload
from copfl.core.task import Data, Task, task_of
from copfl.data import datasets
from copfl.data.federation import Federation
from copfl.data.partition import SCHEMES, Partition
from copfl.data.samples import Dataset
from copfl.engine import autotune, mapping
from copfl.engine.cuda_graph import no_room
from copfl.engine.mapping import Mapping as Engine
from copfl.errors import RunError, UsageError
from copfl.experiment import config, user_code
from copfl.experiment.config import Tables
from copfl.experiment.identity import digest, essential
from copfl.experiment.settings import AROUND, PRECISIONS, Loop, resolve
from copfl.wrappers.addons import with_addons
from copfl.wrappers.attacks import Attacked, attacked
from copfl.wrappers.privacy import Private, check_sums


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything a run is made of, as values."""

    algorithm: AnyAlgorithm
    task: Task
    federation: Federation
    engine: Engine
    loop: Loop
    tables: Tables  # the same as names and numbers, for run.toml

    @property
    def clients(self) -> int:
        return self.federation.clients

    @property
    def cuda(self) -> list[torch.device]:
        """The devices, beside the CPU, whose random state a round may use."""
        return cuda_of(self.task)

    @property
    def title(self) -> str:
        """Such as "copfl on digits"."""
        name = self.tables["algorithm"].get("name", type(self.algorithm).__name__)
        return f"{name} on {self.federation.dataset.name}"

    def about(self) -> dict[str, Any]:
        """What environment.json says beside the versions."""
        layout, data = self.task.layout, self.federation.dataset
        return {
            "device": torch.cuda.get_device_name(self.task.device) if self.cuda else "cpu",
            "threads": torch.get_num_threads(),
            "parameters": self.task.d,
            "batched_model": self.task.batched
            is not None,  # else vmap alone, which a GPU does at half the speed or less
            "algorithm": repr(self.algorithm),
            **({"attackers": list(self.algorithm.attackers)} if isinstance(self.algorithm, Attacked) else {}),
            "data": self.federation.dataset.note,
            "partition": list(self.federation.partition.notes),
            # For a reader that has neither the data nor the model: what is trained, and who holds how much of what.
            "layers": dict(list(zip(layout.names, layout.sizes, strict=True))[: layout.trained]),
            "classes": list(data.classes),
            "label_counts": [
                " ".join(map(str, row)) for row in self.federation.partition.label_counts(data).tolist()
            ],
        }

    @property
    def contents(self) -> Tables:
        """What the data and the partition contain, whatever they are called."""
        data = self.federation.dataset
        return {
            "data": {
                "classes": len(data.classes),
                "mean": data.mean,
                "std": data.std,
                "augment": data.augment,
            },
            "partition": {"sha256": self.federation.partition.fingerprint},
        }

    def fingerprints(self) -> dict[str, str]:
        """Hashes that a checkpoint must share with the run that continues from it."""
        settings = essential({**self.tables, **self.contents})
        del settings["run"]["rounds"]
        samples = hashlib.sha256()
        for split in (self.federation.train, self.federation.test):
            for tensor in (split.x, split.y):
                samples.update(tensor.cpu().numpy().tobytes())
        return {"settings": digest(settings), "samples": samples.hexdigest()[:16]}


def prepare(
    layers: Sequence[Tables],
    *,
    algorithm: AnyAlgorithm | None = None,
    data: Any = None,
    model: Any = None,
    partition: Partition | None = None,
) -> Experiment:
    """The experiment that the tables describe, see `resolve`; a value given here stands in for its table."""
    data = None if data is None else user_code.as_dataset(data)
    fixed = {"algorithm": algorithm, "data": data, "model": model, "partition": partition}
    given = resolve(layers, {kind: value for kind, value in fixed.items() if value is not None})
    loop = Loop(**given["run"])
    torch.set_num_threads(loop.threads)
    device = device_of(loop.device)
    if loop.workers > 1 and device.type != "cpu":
        raise UsageError(
            f"workers={loop.workers} is for the CPU; a GPU trains all clients of a round in one process"
        )
    if loop.workers > 1 and loop.threads > 1:
        raise UsageError(f"workers={loop.workers} have one thread each; leave out threads={loop.threads}")
    precision = ("tf32" if device.type == "cuda" else "fp32") if loop.precision == "auto" else loop.precision
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dataset: Dataset = _dataset(given["data"]) if data is None else data
    if partition is None:
        partition = _partition(given["partition"], dataset, loop)
    federation = Federation(dataset, partition, device)
    task = task_of(
        _model(given["model"], model, federation, loop.seed), len(dataset.classes), mean=dataset.mean, std=dataset.std,
        head=given["model"].get("head"), buffers=loop.buffers, device=device, dtype=PRECISIONS[loop.precision],
    )  # fmt: skip
    if algorithm is None:
        options = _options(given["algorithm"])
        algorithm = config.algorithm_of(ALGORITHMS, given["algorithm"]["name"], options, given["optimizer"])
    if wanted := getattr(algorithm, "public", 0):
        task = dataclasses.replace(task, public=federation.unassigned(wanted))
    algorithm = _around(algorithm, given, task, federation, loop)
    engine = _engine(loop, task, federation, algorithm)
    if engine.name != "sequential":
        samples = federation.train.rows([0]).x[0, : federation.train.sizes[0]]
        task = task.with_batching(torch.bfloat16 if precision == "bf16" else None, samples)
    if precision == "bf16" and task.batched is None:
        raise UsageError(
            "precision bf16 is for engines that train many clients at once, and for models made of known layers"
        )
    loop = dataclasses.replace(
        loop, device=str(device), engine=engine.name, chunk=engine.chunk, precision=precision
    )
    loop = dataclasses.replace(loop, mkldnn="on" if autotune.mkldnn_enabled() else "off")
    if loop.workers == 0:
        loop = dataclasses.replace(loop, workers=_workers(loop, task, federation, algorithm, engine))
    return Experiment(algorithm, task, federation, engine, loop, {**given, "run": vars(loop)})


def _around(
    algorithm: AnyAlgorithm, given: Tables, task: Task, federation: Federation, loop: Loop
) -> AnyAlgorithm:
    """The algorithm with what stands around it: the guard at the server, noise at the clients, and those who lie."""
    if not any(kind in given for kind in AROUND):
        return algorithm
    shape, augment = federation.shape, federation.dataset.augment
    if "addons" in given:
        algorithm = with_addons(algorithm, **given["addons"])
    if "robust" in given:
        algorithm = config.with_robust_rule(given["robust"]["name"], algorithm, _options(given["robust"]))
    if "privacy" in given:
        check_sums(algorithm, task, example_upload(algorithm, task, shape, augment, 2))
        count = max(1, math.ceil(loop.participation * federation.clients - 1e-9))
        algorithm = Private(algorithm, federation.clients, count, **given["privacy"], seed=loop.seed)
    if "attack" in given:
        name, options = given["attack"]["name"], _options(given["attack"])
        algorithm = attacked(algorithm, name, federation.clients, **options, seed=loop.seed)
    tried = example_upload(
        algorithm, task, shape, augment, federation.clients
    )  # what does not fit is found before the run
    server = algorithm.server_init(task, federation.clients)
    with torch.no_grad():
        total = algorithm.summand(task, server, torch.tensor(0, device=task.device), tried)
        algorithm.server_update(task, server, total)
    return algorithm


def _options(table: Mapping[str, Any], *others: str) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k not in ("name", *others)}


def _dataset(table: Mapping[str, Any]) -> Dataset:
    name, folder = table["name"], Path(table["dir"]) if "dir" in table else None
    if user_code.is_reference(name):
        what = user_code.attribute("data", name, table.get("code"))
        return user_code.dataset_of(what, folder, _options(table, "dir", "code"), name)
    return datasets.load(name, folder, **_options(table, "dir"))


def _partition(table: Mapping[str, Any], dataset: Dataset, loop: Loop) -> Partition:
    if table["name"] not in SCHEMES:
        return Partition.load(table["name"])
    return SCHEMES[table["name"]](dataset, loop.clients, loop.seed, **_options(table))


def _model(table: Mapping[str, Any], value: Any, federation: Federation, seed: int) -> nn.Module:
    shape, classes = federation.shape, len(federation.dataset.classes)
    if value is not None:
        return user_code.model_of(value, shape, classes, seed, {})
    if user_code.is_reference(table["name"]):
        what = user_code.attribute("model", table["name"], table.get("code"))
        return user_code.model_of(what, shape, classes, seed, _options(table, "head", "code"), table["name"])
    return models.build(table["name"], shape, classes, seed, **_options(table, "head"))


def device_of(name: str) -> torch.device:
    """The device by its name, if this machine has it; of "auto", the GPU where there is one."""
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


def _engine(loop: Loop, task: Task, federation: Federation, algorithm: AnyAlgorithm) -> Engine:
    """The engine by name; "auto" is a recorded program on a GPU, and on a CPU what a short measurement finds quickest.

    The model is tried on two samples, so that one that does not fit the data or the engine is found before the run.
    """
    autotune.set_mkldnn(loop.mkldnn != "off")
    if task.device.type == "cpu":
        autotune.keep_freed_memory()
    participants = max(1, math.ceil(loop.participation * federation.clients - 1e-9))
    chunk = loop.chunk or _chunk(task, participants)
    alone, many = mapping.sequential(), mapping.vmap(chunk)
    cuda = task.device.type == "cuda"
    usual = mapping.cuda_graph(chunk) if cuda else many if task.d < 1_000_000 else alone
    engines = {"sequential": alone, "vmap": many, "cuda_graph": mapping.cuda_graph(chunk), "auto": usual}
    engine = engines[loop.engine]
    data = federation.train.rows([0])
    problem = _problem(task, engine, data)
    if problem and engine.name != "sequential" and not _problem(task, alone, data):
        if loop.engine == "auto":
            return alone
        raise UsageError(
            f"the model cannot be trained for many clients at once ({problem}); use --engine sequential"
        )
    if problem:
        shape = list(federation.shape)
        raise UsageError(
            f"the model does not fit samples of shape {shape}: {problem}; name another with --model"
        )
    if loop.engine != "auto" or cuda:
        return engine
    enabled = autotune.mkldnn_enabled()
    switches = (True, False) if loop.mkldnn == "auto" and enabled else (enabled,)
    others = [e for e in (alone, many) if e is not engine and not _problem(task, e, data)]
    ways = [autotune.Choice(e, switch) for e in (engine, *others) for switch in switches]
    chosen = autotune.choose(
        algorithm, task, federation, ways, batch=loop.batch, turns=participants * loop.rounds
    )
    autotune.set_mkldnn(chosen.mkldnn)
    return chosen.engine


def _workers(loop: Loop, task: Task, federation: Federation, algorithm: AnyAlgorithm, engine: Engine) -> int:
    """How many processes pay for themselves in this run."""
    if task.device.type != "cpu" or loop.threads > 1:
        return 1
    participants = max(1, math.ceil(loop.participation * federation.clients - 1e-9))
    states = federation.clients if loop.store == "memory" else 0
    way = autotune.Choice(engine, autotune.mkldnn_enabled())
    return autotune.processes(
        algorithm,
        task,
        federation,
        way,
        batch=loop.batch,
        participants=participants,
        rounds=loop.rounds,
        states=states,
    )


def _chunk(task: Task, participants: int) -> int:
    """How many clients go side by side: on a GPU, what its free memory holds of some fifty vectors a client.

    In parts as equal as can be where there are several: one of another size is recorded once more.
    """
    if task.device.type != "cuda":
        return autotune.chunk_of(task, participants)
    free, _ = torch.cuda.mem_get_info(task.device)
    most = max(1, min(512, int(free / (50 * 4 * task.layout.size + 64e6))))
    return most if participants <= most else math.ceil(participants / math.ceil(participants / most))


def _problem(task: Task, engine: Engine, data: Data) -> str:
    """What goes wrong in one step of one client, empty if nothing does."""

    def step(given: tuple[Tensor, Data]) -> tuple[Tensor, Tensor]:
        w, data = given
        x, y = task.numbers(data.x[:2]), data.y[:2]
        return task.forward(w, x)[0], task.gradient(w[: task.d], w[task.d :], x, y)[0]

    try:
        with torch.no_grad(), torch.random.fork_rng(cuda_of(task)):
            logits, _ = engine.over(step, (task.initial[None], data))
    except (
        RuntimeError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:  # what torch and models say
        if no_room(error):
            raise RunError(
                "the GPU has no room to try the model on two samples; others fill it (nvidia-smi shows who), or the "
                "model is too large for it: use --device cpu or a smaller one"
            ) from error
        return f"{type(error).__name__}: {error}".strip().partition("\n")[0].rstrip(".")
    if logits.shape[2:] != (task.classes,):
        return f"a sample's answer has shape {list(logits.shape[2:])} instead of [{task.classes}], a number per class"
    return ""


def cuda_of(task: Task) -> list[torch.device]:
    return [task.device] if task.device.type == "cuda" else []
