"""One experiment, from settings or values to a result: `copfl.run(...)`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from copfl.core.algorithm import AnyAlgorithm
from copfl.core.random import MODEL, hashed
from copfl.core.task import Task, task_of
from copfl.data.federation import Federation
from copfl.data.partition import Partition
from copfl.engine import autotune, simulate
from copfl.engine.mapping import Mapping as Engine
from copfl.engine.workers import Workers
from copfl.errors import UsageError
from copfl.experiment import components, records, user_code
from copfl.experiment import folder as run_folder
from copfl.experiment.config import Tables
from copfl.experiment.folder import RunFolder
from copfl.experiment.identity import digest, essential
from copfl.experiment.loop import Loop, choose_engine, choose_workers, cuda_of, device_of
from copfl.wrappers.attacks import Attacked

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

    @property
    def cuda(self) -> list[torch.device]:
        """The devices beside the CPU whose random state a round may use."""
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
            "device": torch.cuda.get_device_name(self.task.device)
            if self.task.device.type == "cuda"
            else "cpu",
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
    """The experiment that the tables describe, see `resolve`; a value given here replaces its table.

    Nothing is written, so that what cannot run fails before there is a folder.
    """
    data = None if data is None else user_code.as_dataset(data)
    fixed = {"algorithm": algorithm, "data": data, "model": model, "partition": partition}
    tables, loop, algorithm = components.resolved(layers, {k: v for k, v in fixed.items() if v is not None})
    torch.set_num_threads(loop.threads)
    device = device_of(loop.device)
    if loop.workers > 1 and device.type != "cpu":
        raise UsageError(
            f"workers={loop.workers} needs --device cpu; a GPU trains all clients in one process"
        )
    if loop.workers > 1 and loop.threads > 1:
        raise UsageError(f"workers={loop.workers} have one thread each; leave out threads={loop.threads}")
    precision = loop.precision_on(device)
    dataset = components.build_data(tables["data"]) if data is None else data
    if partition is None:
        partition = components.build_partition(tables["partition"], dataset, loop)
    federation = Federation(dataset, partition, device)
    shape, classes = federation.shape, len(dataset.classes)
    module = (
        components.build_model(tables["model"], shape, classes, loop.seed)
        if model is None
        else user_code.model_of(model, shape, classes, loop.seed, {})
    )
    task = task_of(
        module,
        classes,
        mean=dataset.mean,
        std=dataset.std,
        head=tables["model"].get("head"),
        buffers=loop.buffers,
        device=device,
        dtype=loop.dtype,
    )
    if public := getattr(algorithm, "public", 0):
        task = dataclasses.replace(task, public=federation.unassigned(public))
    algorithm = components.build_wrappers(algorithm, tables, task, federation, loop)
    engine = choose_engine(loop, task, federation, algorithm)
    if engine.name != "sequential":
        samples = federation.train.rows([0]).x[0, : federation.train.sizes[0]]
        task = task.with_batching(torch.bfloat16 if precision == "bf16" else None, samples)
    if precision == "bf16" and task.batched is None:
        raise UsageError("precision bf16 needs an engine that batches clients, and a model of known layers")
    loop = dataclasses.replace(
        loop,
        device=str(device),
        engine=engine.name,
        chunk=engine.chunk,
        precision=precision,
        mkldnn="on" if autotune.mkldnn_enabled() else "off",
        workers=loop.workers or choose_workers(loop, task, federation, algorithm, engine),
    )
    return Experiment(algorithm, task, federation, engine, loop, {**tables, "run": vars(loop)})


@dataclass(eq=False)
class Result:
    """What a run found. Arrays are [rounds, clients], nan where a client did not take part or was not looked at."""

    experiment: Experiment
    records: list[dict[str, Any]]
    state: simulate.State
    folder: Path | None = None
    seconds: list[float] = field(default_factory=list)

    def metric(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Any figure of the record by name, such as "loss", "weight" or "gradient_score"."""
        return records.table(self.records, name, self.experiment.clients)

    @property
    def accuracy(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Personal accuracy after local training, on each client's own test samples."""
        return self.metric("accuracy")

    @property
    def accuracy_before(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Personal accuracy right after the broadcast, before local training."""
        return self.metric("accuracy_before")

    @property
    def accuracy_global(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Accuracy of the broadcast model alone, as a newcomer would have it."""
        return self.metric("accuracy_global")

    @property
    def weight(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Each client's share in the round's mean."""
        return self.metric("weight")


def run(
    algorithm: str | AnyAlgorithm = "copfl",
    dataset: Any = "digits",
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    partition: str | Path | Partition = "classes",
    clients: int | None = None,
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

    A name may be that of something of your own, "module:attribute", and so may a value: an algorithm, an nn.Module or a
    function of (shape, classes) that makes one, a Partition, and as data a copfl or torch Dataset, a pair (train, test)
    of torch Datasets, or arrays (x, y).

    `settings` are those of the loop (rounds, seed, batch, participation, ...; see Loop), and tables for the rest:
    `optimizer={"name": "adam", "lr": 1e-3}`, `copfl={"rate": 0.1}`, `partition_options={"per_client": 3}`,
    `model_options={"norm": "batch"}`, `data_options={"severity": 5}`.
    """
    tables: Tables = {"run": {} if clients is None else {"clients": clients}}
    values: dict[str, Any] = {}
    for name, value in (
        ("algorithm", algorithm),
        ("data", dataset),
        ("model", model),
        ("partition", partition),
    ):
        if isinstance(value, str | Path):
            tables[name] = {"name": str(value)}
        elif value is not None:
            values[name] = value
    if data_dir is not None:
        tables.setdefault("data", {})["dir"] = str(data_dir)
    for name, value in settings.items():
        if isinstance(value, Mapping):
            tables.setdefault(name.removesuffix("_options"), {}).update(value)
        else:
            tables["run"][name] = value
    experiment = prepare([tables], **values)
    if out is None:
        return execute(experiment, None, on_round)
    with run_folder.claimed(Path(out), new=True) as folder:
        return execute(experiment, folder, on_round)


def resume(
    path: str | Path, *, rounds: int | None = None, on_round: OnRound | None = None, **values: Any
) -> Result:
    """Goes on where the run in this folder stopped, to the same bytes as if it never had.

    What was passed to `run` as a value (`algorithm`, `data`, `model`) must be passed again.
    """
    with run_folder.claimed(Path(path), new=False) as folder:
        return execute(reopen(folder, rounds, **values), folder, on_round)


def reopen(folder: RunFolder, rounds: int | None = None, **values: Any) -> Experiment:
    """The experiment of a run folder; with `rounds`, it goes on to so many in all."""
    layers = [folder.tables(), {} if rounds is None else {"run": {"rounds": rounds}}]
    experiment = prepare(layers, partition=folder.partition(), **values)
    if rounds is not None:
        folder.check_rounds(rounds)
    return experiment


def execute(
    experiment: Experiment,
    folder: RunFolder | None,
    on_round: OnRound | None = None,
    executor: simulate.Executor | None = None,
) -> Result:
    """Runs the rounds that are left, writing each to the folder as it ends. A `crew` trains the clients elsewhere."""
    e, loop = experiment, experiment.loop
    if loop.store == "disk" and folder is None:
        raise UsageError("store=disk keeps the clients' states in the run folder; name one with out=...")
    disk = folder.states if folder is not None and loop.store == "disk" else None
    state = simulate.begin(e.algorithm, e.task, e.clients, disk)
    result = Result(e, [], state, None if folder is None else folder.path)
    fingerprints = {} if folder is None else e.fingerprints()
    if folder is not None and folder.begun:
        result.records, result.seconds = folder.restore(state, fingerprints, e.contents)
        folder.write_tables(e.tables)  # more rounds, or another device, may have been asked for
    elif folder is not None:
        folder.begin(e.tables, e.federation.partition, e.about())
    clock = time.perf_counter()
    with contextlib.closing(_rounds(e, state, executor)) as rounds:
        for round in rounds:
            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            result.records.append(records.as_record(round))
            result.seconds.append(seconds)
            if folder is not None:
                folder.append(result.records[-1], seconds)
                if state.round % loop.checkpoint_every == 0 or state.round == loop.rounds:
                    folder.checkpoint(state, fingerprints)
            if on_round is not None:
                on_round(round, seconds)
    if folder is not None and loop.save_models:
        folder.save_models(e.algorithm, e.task, state, e.clients)
    return result


def setting_of(e: Experiment) -> simulate.Simulation:
    return simulate.Simulation(e.algorithm, e.task, e.federation, e.engine, e.loop.seed, e.loop.batch)


def _rounds(
    e: Experiment, state: simulate.State, executor: simulate.Executor | None
) -> Generator[simulate.Round, None, None]:
    """The rounds that are left. What a model draws itself, as dropout does, follows from the seed and the round."""
    loop = e.loop
    elsewhere = executor is not None
    many = loop.workers > 1 and state.round < loop.rounds and not elsewhere
    with (
        Workers(setting_of(e), state, loop.workers) if many else contextlib.nullcontext(executor) as executor
    ):
        rounds = simulate.simulate(
            e.algorithm, e.task, e.federation, e.engine, state, rounds=loop.rounds, seed=loop.seed, batch=loop.batch,
            participation=loop.participation, eval_every=loop.eval_every, eval_models=loop.eval_models,
            executor=executor,
        )  # fmt: skip
        if elsewhere:  # who trains the clients seeds what their models draw
            yield from rounds
        while state.round < loop.rounds:
            with torch.random.fork_rng(e.cuda):
                torch.manual_seed(int(hashed(loop.seed, MODEL, state.round)))
                round = next(rounds)
            yield round
