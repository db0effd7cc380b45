"""One experiment, from names or values to a result: `copfl.run(...)`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from copfl.core.algorithm import AnyAlgorithm
from copfl.core.random import MODEL, hashed
from copfl.data.partition import Partition
from copfl.engine import simulate
from copfl.engine.workers import Workers
from copfl.errors import UsageError
from copfl.experiment import folder as run_folder
from copfl.experiment import records
from copfl.experiment.build import Experiment, prepare
from copfl.experiment.config import Tables
from copfl.experiment.folder import RunFolder

OnRound = Callable[[simulate.Round, float], None]  # a round as it ends, and the seconds it took


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


def setting_of(e: Experiment) -> simulate.Setting:
    return simulate.Setting(e.algorithm, e.task, e.federation, e.engine, e.loop.seed, e.loop.batch)


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
