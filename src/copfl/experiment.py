"""One experiment, from names or values to a result: `copfl.run(...)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from copfl import configure, models, run_folder
from copfl.algorithms import ALGORITHMS
from copfl.algorithms.algorithm import AnyAlgorithm
from copfl.data import datasets
from copfl.data.federation import Federation
from copfl.data.partition import SCHEMES, Partition
from copfl.data.samples import Dataset
from copfl.engine import mapping, simulate
from copfl.engine.mapping import Mapping as Engine
from copfl.errors import UsageError
from copfl.report import records
from copfl.run_folder import RunFolder
from copfl.settings import PRECISIONS, Loop, Tables, resolve
from copfl.task import Task, task_of

OnRound = Callable[[simulate.Round, float], None]  # a round as it ends, and the seconds it took


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

    def about(self) -> dict[str, Any]:
        """What environment.json says beside the versions."""
        cuda = self.task.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.task.device) if cuda else "cpu",
            "threads": torch.get_num_threads(),
            "parameters": self.task.d,
            "algorithm": repr(self.algorithm),
            "data": self.federation.dataset.note,
        }


@dataclass(eq=False)
class Result:
    """What a run found. Arrays are [rounds, clients], nan where a client did not take part or was not looked at."""

    experiment: Experiment
    records: list[dict[str, Any]]
    state: simulate.State
    folder: Path | None = None
    seconds: list[float] = field(default_factory=list)

    def figure(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Any figure of the record by name, such as "loss", "weight" or "gradient_score"."""
        return records.table(self.records, name, self.experiment.clients)

    @property
    def accuracy(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Personal accuracy after local training, on each client's own test samples."""
        return self.figure("accuracy")

    @property
    def accuracy_before(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Personal accuracy right after the broadcast, before local training."""
        return self.figure("accuracy_before")

    @property
    def accuracy_global(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Accuracy of the broadcast model alone, as a newcomer would have it."""
        return self.figure("accuracy_global")

    @property
    def weight(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Each client's share in the round's mean."""
        return self.figure("weight")


def run(
    algorithm: str | AnyAlgorithm = "copfl",
    dataset: str | Dataset = "digits",
    *,
    model: str | nn.Module | None = None,
    partition: str | Partition = "classes",
    clients: int = 10,
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Result:
    """Trains a federation and returns what it found; with `out`, leaves a run folder there.

    >>> import copfl
    >>> result = copfl.run("copfl", "digits", rounds=2)
    >>> result.accuracy.shape
    (2, 10)

    `settings` are those of the loop (rounds, seed, batch, participation, ...; see Loop), and tables for the rest:
    `optimizer={"name": "adam", "lr": 1e-3}`, `copfl={"rate": 0.1}`, `partition_options={"per_client": 3}`,
    `model_options={"norm": "batch"}`, `data_options={"severity": 5}`.
    """
    tables: Tables = {"run": {"clients": clients}}
    values: dict[str, Any] = {}
    for name, value in (("algorithm", algorithm), ("data", dataset), ("model", model), ("partition", partition)):
        if isinstance(value, str):
            tables[name] = {"name": value}
        elif value is not None:
            values[name] = value
    if data_dir is not None:
        tables.setdefault("data", {})["dir"] = str(data_dir)
    for name, value in settings.items():
        if name in ("partition_options", "model_options", "data_options"):
            tables.setdefault(name.removesuffix("_options"), {}).update(value)
        elif isinstance(value, Mapping):
            tables.setdefault(name, {}).update(value)
        else:
            tables["run"][name] = value
    experiment = prepare(tables, **values)
    if out is None:
        return execute(experiment, None, on_round)
    with run_folder.claimed(Path(out), new=True) as folder:
        return execute(experiment, folder, on_round)


def prepare(
    tables: Mapping[str, Mapping[str, Any]],
    *,
    algorithm: AnyAlgorithm | None = None,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    partition: Partition | None = None,
) -> Experiment:
    """The experiment that the tables describe; a value given here stands in for its table."""
    given = resolve(tables, fixed={"algorithm": algorithm, "data": data, "model": model, "partition": partition})
    loop = Loop(**{k: v for k, v in given["run"].items() if k != "clients"})
    torch.set_num_threads(loop.threads)
    device = _device(loop.device)
    if data is None:
        options = {k: v for k, v in given["data"].items() if k not in ("name", "dir")}
        folder = given["data"].get("dir")
        data = datasets.load(given["data"]["name"], None if folder is None else Path(folder), **options)
    if partition is None:
        options = {k: v for k, v in given["partition"].items() if k != "name"}
        partition = SCHEMES[given["partition"]["name"]](data, given["run"]["clients"], loop.seed, **options)
    federation = Federation(data, partition, device)
    head = given["model"].get("head")
    if model is None:
        options = {k: v for k, v in given["model"].items() if k not in ("name", "head")}
        model = models.build(given["model"]["name"], federation.shape, len(data.classes), loop.seed, **options)
    task = task_of(
        model, len(data.classes), mean=data.mean, std=data.std, head=head, buffers=loop.buffers,
        device=device, dtype=PRECISIONS[loop.precision],
    )  # fmt: skip
    if algorithm is None:
        own = {k: v for k, v in given["algorithm"].items() if k != "name"}
        algorithm = configure.algorithm_of(ALGORITHMS, given["algorithm"]["name"], own, given["optimizer"])
    engine = _engine(loop, task)
    given["run"]["engine"], given["run"]["chunk"] = engine.name, engine.chunk
    return Experiment(algorithm, task, federation, engine, loop, given)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f'device "{name}" is unknown; use cpu, cuda, or cuda:N') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f'device "{name}" needs a CUDA GPU and a CUDA build of PyTorch; use --device cpu')
    return device


def _engine(loop: Loop, task: Task) -> Engine:
    """The engine by name; "auto" takes many clients at once where one alone would leave the machine idle."""
    name = loop.engine
    if name == "auto":
        name = "all_at_once" if task.device.type == "cuda" or task.d < 1_000_000 else "one_by_one"
    return mapping.one_by_one() if name == "one_by_one" else mapping.all_at_once(loop.chunk or 64)


def execute(experiment: Experiment, folder: RunFolder | None, on_round: OnRound | None = None) -> Result:
    """Runs the rounds that are left, writing each to the folder as it ends."""
    e, loop = experiment, experiment.loop
    state = simulate.begin(e.algorithm, e.task, e.clients)
    lines: list[dict[str, Any]] = []
    if folder is not None and folder.begun:
        lines = folder.restore(state)
    elif folder is not None:
        folder.begin(e.tables, e.federation.partition, e.about())
    result = Result(e, lines, state, None if folder is None else folder.path)
    clock = time.perf_counter()
    for round in simulate.simulate(
        e.algorithm, e.task, e.federation, e.engine, state, rounds=loop.rounds, seed=loop.seed, batch=loop.batch,
        participation=loop.participation, look_every=loop.look_every,
    ):  # fmt: skip
        seconds, clock = time.perf_counter() - clock, time.perf_counter()
        lines.append(records.as_record(round))
        result.seconds.append(seconds)
        if folder is not None:
            folder.append(lines[-1], seconds)
            if state.round % loop.checkpoint_every == 0 or state.round == loop.rounds:
                folder.checkpoint(state)
        if on_round is not None:
            on_round(round, seconds)
    if folder is not None:
        folder.save_models(e.algorithm, e.task, state, e.clients)
    return result


def resume(path: Path, on_round: OnRound | None = None, rounds: int | None = None) -> Result:
    """Goes on where the run in this folder stopped, to the same bytes as if it never had."""
    with run_folder.claimed(path, new=False) as folder:
        tables = folder.tables()
        if rounds is not None:
            tables["run"]["rounds"] = rounds
            folder.write_tables(tables)
        return execute(prepare(tables, partition=Partition.load(path / "partition.json")), folder, on_round)


def fresh_path(parent: Path, e: Experiment) -> Path:
    """A new name under the parent: the day, the time, and what it is."""
    stem = time.strftime("%Y%m%d-%H%M%S") + f"-{e.tables['algorithm'].get('name', 'own')}-{e.federation.dataset.name}"
    name, count = stem, 1
    while (parent / name).exists():
        count += 1
        name = f"{stem}-{count}"
    return parent / name
