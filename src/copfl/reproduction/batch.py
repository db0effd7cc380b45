"""The runs that an item lacks, one after the other in this process, for as long as there is time.

On a GPU the seeds of one cell go in step, their clients trained as one batch. Several processes may be at one item,
each at runs that no other is at; on a GPU that pays if they share it (NVIDIA's MPS) and do not take turns. What is
there as a record is not run again, and a run that was stopped in the middle goes on from its checkpoint if its folder
is still there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from copfl import files
from copfl.comparison.jobs import PAUSE, LeanFolder, started_with
from copfl.data import datasets
from copfl.data.partition import SCHEMES, Partition, hold_out
from copfl.data.samples import Dataset
from copfl.engine import seed_batching
from copfl.engine.cuda_graph import out_of_memory
from copfl.engine.simulate import Round
from copfl.errors import CopflError, RunError
from copfl.experiment import folder as run_folder
from copfl.experiment.config import Tables
from copfl.experiment.progress import span
from copfl.experiment.run import Experiment, OnRound, execute, prepare, setting_of
from copfl.reproduction.experiments import Plan, Run, joined
from copfl.reproduction.store import Record, Store, id_of, kept, record_of

Say = Callable[[str], None]


class TimeIsUp(Exception):
    """The sitting has to end in the middle of a run."""


@dataclass
class Sitting:
    """How the runs are done, and what is known of the time they take."""

    store: Store
    folder: Path  # of the run folders
    place: Tables  # [run] and [data] of this machine: the device, where the data is
    end: float = math.inf  # by the monotonic clock
    say: Say = print
    lr_factor: dict[str, float] = field(default_factory=dict)  # seconds by kind of run, as last seen
    loaded: tuple[str, Dataset] | None = None  # the last data set: columns share it, and some take a minute
    loading: float = 0.0  # seconds that went into data sets

    @property
    def cuda(self) -> bool:
        return str(self.place.get("run", {}).get("device", "")).startswith("cuda")

    def dataset(self, table: dict[str, Any]) -> Dataset:
        key = json.dumps(table, sort_keys=True)
        if self.loaded is None or self.loaded[0] != key:
            self.loaded = None  # before the next one, or memory holds both
            options = {k: v for k, v in table.items() if k not in ("name", "dir")}
            clock = time.monotonic()
            made = datasets.load(table["name"], Path(table["dir"]) if "dir" in table else None, **options)
            self.loaded, seconds = (key, made), time.monotonic() - clock
            self.loading += seconds
            self.say(f"{table['name']}: loaded in {seconds:.0f} s")
        return self.loaded[1]


def missing(plan: Plan, seeds: Sequence[int], store: Store) -> list[Run]:
    """The runs of a cell that have no record; the tuning runs first, for the others depend on what they choose."""
    trials = [trial.run for trial in plan.trials()]
    left = [run for run in trials if store.get(run) is None]
    if left:
        return left
    return [run for run in plan.runs(chosen(plan, store) or {}, seeds) if store.get(run) is None]


def chosen(plan: Plan, store: Store) -> Tables | None:
    """The best of the tried settings by its accuracy on the validation parts, of equals the first; None: not known."""
    trials = plan.trials()
    if not trials:
        return plan.choices[0]
    found = [store.get(trial.run) for trial in trials]
    known = [(record.mean(), -i) for i, record in enumerate(found) if record is not None]
    return trials[-max(known)[1]].settings if len(known) == len(trials) else None


def count_left(plans: Sequence[Plan], seeds: Sequence[int], store: Store) -> int:
    """How many runs are missing, those that wait for a choice included."""
    left: set[str] = set()
    for plan in plans:
        runs = missing(plan, seeds, store)
        left |= {id_of(run) for run in runs}
        if any(run.tuning for run in runs):
            row = plan.row
            waiting = [plan.column.name, row.algorithm, row.preset, row.settings, row.recipes[plan.protocol]]
            left |= {json.dumps([waiting, seed], default=str) for seed in seeds}
    return len(left)


def carry_on(plans: Sequence[Plan], seeds: Sequence[int], sitting: Sitting) -> tuple[int, list[str]]:
    """How many runs are still missing when all are done or time is up, and what went wrong.

    Cells are finished one after the other, over all seeds, so that a table that is not whole is of use.
    """
    problems: list[str] = []
    failed: set[str] = set()
    waiting, tried = list(plans), -1
    try:
        while waiting and len(waiting) != tried:  # as long as others' cells come free
            tried, waiting = (
                len(waiting),
                [p for p in waiting if not _done(p, seeds, sitting, failed, problems)],
            )
        if waiting:
            sitting.say(f"{len(waiting)} cells are left to other processes, which are at them")
    except TimeIsUp:
        sitting.say("the time is up")
    return count_left(plans, seeds, sitting.store), problems


def _done(plan: Plan, seeds: Sequence[int], sitting: Sitting, failed: set[str], problems: list[str]) -> bool:
    """Whether what the cell lacked was run, or tried; not, if another process is at one of its runs."""
    try:
        for runs in _in_order(plan, seeds, sitting, failed):
            problems += _recorded(runs, sitting, failed)
    except files.Busy:
        return False
    return True


def _in_order(
    plan: Plan, seeds: Sequence[int], sitting: Sitting, failed: set[str]
) -> Iterator[Sequence[Run]]:
    """The runs of a cell that are done next, as many as go in step."""
    for _ in range(2):  # the tuning runs, then those with what they chose
        sitting.store.refresh()
        left = [run for run in missing(plan, seeds, sitting.store) if id_of(run) not in failed]
        if sitting.cuda and not any(run.tuning for run in left):
            yield from [left] if left else []
            continue
        for run in left:
            sitting.store.refresh()
            if sitting.store.get(run) is None:
                yield [run]


def _recorded(runs: Sequence[Run], sitting: Sitting, failed: set[str]) -> list[str]:
    """What went wrong with these runs, of which the others have their records then."""
    if time.monotonic() + expected(runs, sitting) > sitting.end:
        raise TimeIsUp
    clock, loading, rounds = time.monotonic(), sitting.loading, runs[0].tables["run"]["rounds"]
    try:
        for count, (run, record) in enumerate(carried_out(runs, sitting), 1):
            sitting.store.add(record)
            gone = time.monotonic() - clock - (sitting.loading - loading)
            sitting.say(f"{run.label}: {100 * record.mean():.1f} % in {span(gone / count)}")
            sitting.lr_factor[_kind(runs)] = gone / rounds
    except files.Busy:
        raise
    except (CopflError, torch.cuda.OutOfMemoryError) as error:  # what fails does not stop the others
        failed |= {id_of(run) for run in runs if sitting.store.get(run) is None}
        problem = f"{runs[0].label}: {error}"
        sitting.say(f"failed: {problem}")
        return [problem]
    finally:
        _give_back(sitting)
    return []


def _kind(runs: Sequence[Run]) -> str:
    t = runs[0].tables
    return f"{t['data']['name']} {t['run']['clients']} {t['algorithm']['name']} {len(runs)}"


def expected(runs: Sequence[Run], sitting: Sitting) -> float:
    """The seconds that these will take: as the last of their kind, or as the slowest of this sitting; at first 0."""
    rounds = runs[0].tables["run"]["rounds"]
    return float(rounds * sitting.lr_factor.get(_kind(runs), max(sitting.lr_factor.values(), default=0.0)))


def carried_out(runs: Sequence[Run], sitting: Sitting) -> Iterator[tuple[Run, Record]]:
    """Each run with its record, once its rounds are done; several go in step if they can.

    Folders are held until the record was taken, so that no other process does a run again.
    """
    if len(runs) > 1 and (made := _in_step(runs, sitting)) is not None:
        yield from made
        return
    for run in runs:
        with contextlib.ExitStack() as held:
            experiment, folder, watch = _prepared(run, sitting, held)
            sitting.store.refresh()
            if sitting.store.get(run) is None:  # or another process was quicker
                execute(experiment, folder, watch)
                yield run, record_of(folder.path, run)


def _in_step(runs: Sequence[Run], sitting: Sitting) -> Iterator[tuple[Run, Record]] | None:
    """The runs with their records, done together; None: they cannot be, or the GPU has no room for all at once."""
    with contextlib.ExitStack() as held:
        try:
            prepared = [_prepared(run, sitting, held) for run in runs]
            settings = [setting_of(experiment) for experiment, _, _ in prepared]
            if not seed_batching.can_batch(settings) or any(folder.begun for _, folder, _ in prepared):
                return None
            seed_batching.run_batched(settings, [partial(execute, *one) for one in prepared])
            return _records(runs, [folder for _, folder, _ in prepared], held.pop_all())
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
    sitting.say("the GPU has no room for all seeds at once: they go one after another")
    prepared, settings = [], []
    _give_back(sitting)
    return None


def _give_back(sitting: Sitting) -> None:
    """What a run left on a GPU, for the next one, or another process, wants the memory."""
    gc.collect()
    if sitting.cuda:
        torch.cuda.empty_cache()


def _records(
    runs: Sequence[Run], folders: Sequence[LeanFolder], held: contextlib.ExitStack
) -> Iterator[tuple[Run, Record]]:
    """Of runs that are done; one that went wrong does not spoil the others."""
    problem: RunError | None = None
    with held:
        for run, folder in zip(runs, folders, strict=True):
            try:
                record = record_of(folder.path, run)
            except RunError as error:
                problem = error
            else:
                yield run, record
    if problem is not None:
        raise problem


def _prepared(
    run: Run, sitting: Sitting, held: contextlib.ExitStack
) -> tuple[Experiment, LeanFolder, OnRound]:
    """What `execute` wants; the folder is ours until `held` is closed."""
    path = sitting.folder / folder_name(run)
    begun = run_folder.RunFolder(path).begun
    folder = held.enter_context(run_folder.claimed(path, new=not begun))
    experiment = _experiment(run, sitting, folder.partition() if begun else None)
    # A checkpoint of fifty ResNets is gigabytes; on a GPU a run is done before it would pay.
    pause = math.inf if experiment.cuda else PAUSE
    rounds, start = experiment.loop.rounds, started_with(experiment)
    note = experiment.federation.dataset.note
    sitting.store.check_start(
        "this run", kept(run.tables), run.validation, start, note
    )  # not only when it is done
    lean = LeanFolder(path, start=start, rounds=rounds, pause=pause)
    return experiment, lean, _watch(sitting.end, rounds)


def folder_name(run: Run) -> str:
    """Of the run's folder. Runs that differ in their looks alone have one record but two folders.

    Else, of a run that was stopped and went on, half of the looks would lack a model.
    """
    return f"{id_of(run)}-{run.tables['run']['eval_models']}"


def _watch(end: float, rounds: int) -> Callable[[Round, float], None]:
    def watch(round: Round, seconds: float) -> None:
        if time.monotonic() > end and round.number + 1 < rounds:
            raise TimeIsUp

    return watch


def _experiment(run: Run, sitting: Sitting, partition: Partition | None) -> Experiment:
    """The experiment of the run, on a data set that is loaded once for many runs."""
    tables = joined(run.tables, sitting.place)
    data = sitting.dataset(tables["data"])
    if partition is None and run.validation:
        table = tables["partition"]
        options = {key: value for key, value in table.items() if key != "name"}
        whole = SCHEMES[table["name"]](data, tables["run"]["clients"], run.seed, **options)
        partition = hold_out(whole, run.validation, data, run.seed)
    rest = {title: table for title, table in tables.items() if title != "data"}
    made = prepare([rest], data=data, partition=partition)
    return dataclasses.replace(made, tables={**made.tables, "data": tables["data"]})
