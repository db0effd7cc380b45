"""Checks of records that others submit: their settings, their numbers, and one of the runs again."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from copfl.comparison.jobs import Job, placed
from copfl.comparison.results import Record, record_of
from copfl.comparison.runner import all_done
from copfl.errors import CopflError, UsageError
from copfl.reproduction.records import SUFFIX, Store
from copfl.settings.complete import complete
from copfl.settings.toml import Tables
from copfl.stats import spread_of
from copfl.tables import Table, percent, with_spread

ROUNDING = 1e-4  # records have six digits
FAR = 0.05  # a run on another kind of machine differs by less


class Checked(NamedTuple):
    """A submitted record, and everything that speaks against it."""

    record: Record
    problems: list[str]
    here: Record | None  # the record of the same run in the results folder


def check(path: Path, store: Store) -> list[Checked]:
    """Every record of the file; a UsageError if it cannot be read."""
    if not path.name.endswith(SUFFIX) or not path.is_file():
        raise UsageError(
            f"{path} is no file of records; name the *{SUFFIX} file that `copfl reproduce` wrote"
        )
    reader = Store(path.parent)
    found = [record for _, record in reader.lines(path)]
    if reader.unusable or not found:
        said = "; ".join(reader.unusable) or f"{path} has no records"
        raise UsageError(f"{said}; write the file again with `copfl reproduce`")
    return [_checked(record, store) for record in found]


def _checked(record: Record, store: Store) -> Checked:
    problems = list(_implausible(record))
    here = None
    try:
        here = store.found.get(store.id_of(record))
        store.starts.check(record.title, record.run, record.validation, record.start)
    except CopflError as error:
        problems.append(str(error))
    if here is not None and (far := distance(record, here)) > FAR:
        problems.append(f"a client differs by {100 * far:.1f} points from the same run in the results folder")
    return Checked(record, problems, here)


def _implausible(record: Record) -> Iterator[str]:
    """What a record of a finished run cannot have."""
    run, name = record.tables["run"], record.metric.name
    clients, rounds, curve = record.clients[name], record.rounds, record.curves[name]
    if len(clients) != run["clients"]:
        yield f"it has {len(clients)} clients, its settings {run['clients']}"
    if rounds != sorted(set(rounds)) or not rounds or rounds[-1] > run["rounds"]:
        yield f"its evaluations are not of increasing rounds up to {run['rounds']}"
    elif rounds[-1] + run.get("eval_every", 1) <= run["rounds"]:
        yield f"it ends with round {rounds[-1]} of {run['rounds']}"
    if any(len(own) != len(rounds) for own in record.curves.values()):
        yield "a curve does not have a value for each evaluation"
    curves = [own for title, own in record.curves.items() if title != "loss"]
    if any(not 0 <= v <= 1 for own in (*record.clients.values(), *curves) for v in own if not math.isnan(v)):
        yield "an accuracy is not between 0 and 1"
    if not record.start or any(not value for value in record.start.values()):
        yield "it does not have the fingerprints of its partition, samples and initial weights"
    if (
        run.get("participation", 1.0) == 1.0
        and abs(float(np.mean(curve[-record.last :])) - record.mean()) > ROUNDING
    ):
        yield "the mean of its clients is not that of its curve"
    if any(value < 0 for value in record.cost.values()):
        yield "a cost is negative"


def distance(one: Record, other: Record) -> float:
    """The largest difference of a client's primary metric."""
    name = one.metric.name
    return float(np.nanmax(np.abs(np.array(one.clients[name]) - np.array(other.clients[name]))))


def repeated(record: Record, folder: Path, place: Tables, log: Callable[[str], None]) -> Record:
    """The record of the same run, trained here."""
    run = complete(record.tables).replaced(place)
    job = placed(Job(record.title, run, validation=record.validation, last=record.last), folder)
    all_done([job], 1, log)
    return record_of(job)


def table_of(checked: Sequence[Checked]) -> Table:
    """A row per algorithm, data set and setting, over its seeds: the row of docs/results.md."""
    groups: dict[str, list[Checked]] = {}
    for one in checked:
        groups.setdefault(one.record.title.rpartition(", seed")[0], []).append(one)
    rows = []
    for title, own in groups.items():
        mean, spread = spread_of([one.record.mean() for one in own])
        where = own[0].record.where
        known = sum(one.here is not None for one in own)
        worst = float(np.mean([one.record.worst for one in own]))
        values = [with_spread(100 * mean, 100 * spread), percent(worst)]
        place = f"{where.get('device', '-')}, torch {where.get('torch', '-')}"
        counts = [str(own[0].record.length), str(len(own))]
        rows.append([title, *counts, *values, place, f"{known} of {len(own)}"])
    head = ["run", "rounds", "seeds", "accuracy, %", "worst tenth, %", "where", "also here"]
    return Table("", head, rows, numeric=False)
