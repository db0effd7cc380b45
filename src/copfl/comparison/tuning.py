"""The best settings on validation samples, which are cut from the clients' training samples.

Every entry tries the same grid on the same seeds. The best settings then train on all training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from copfl.comparison import entries
from copfl.comparison.entries import Entry, Grid
from copfl.comparison.jobs import LAST, Job, placed
from copfl.comparison.results import Trial, Tuned, outcome_of
from copfl.experiment.components import resolve
from copfl.experiment.config import Tables

VALIDATION = 0.2  # of each client's training samples


def job_of(
    folder: Path,
    label: str,
    layers: Sequence[Tables],
    seed: int,
    *,
    validation: float = 0.0,
    last: int = LAST,
) -> Job:
    """The run of these layers of settings and this seed."""
    tables = resolve([*layers, {"run": {"seed": seed}}], {})
    return placed(Job(label, tables, validation=validation, last=last), folder)


def grid_for(entry: Entry, base: Mapping[str, Mapping[str, Any]], grid: Grid) -> Grid:
    """The part of the grid that concerns the entry: all but the keys of other algorithms."""
    return {place: values for place, values in grid.items() if entries.concerns(entry, base, place[0])}


def tuned(
    rows: Sequence[Entry],
    base: Mapping[str, Mapping[str, Any]],
    grid: Grid,
    new_job: Callable[[str, Sequence[Tables]], Sequence[Job]],
    all_done: Callable[[Sequence[Job]], None],
) -> list[Tuned]:
    """The trials of every entry; `new_job` makes the jobs of a label and its layers, one per tuning seed."""
    plans: list[list[tuple[Tables, Sequence[Job]]]] = []
    for entry in rows:
        own = grid_for(entry, base, grid)
        plans.append([])
        for cell in entries.cells(own) if own else []:
            label = f"{entry.label} {entries.described(cell, 'optimizer', entry.name)}"
            plans[-1].append((cell, new_job(label, [*entries.layers(entry, base), cell])))
    all_done([job for plan in plans for _, jobs in plan for job in jobs])
    return [Tuned([Trial(cell, _accuracy(jobs)) for cell, jobs in plan]) for plan in plans]


def _accuracy(jobs: Sequence[Job]) -> float:
    """The mean personal accuracy over the seeds."""
    return float(np.mean([outcome_of(job).mean("accuracy") for job in jobs]))


def at_an_end(chosen: Tables, grid: Grid) -> list[str]:
    """Chosen values at an end of those tried, such as "lr=0.1"; there may be better ones beyond."""
    found = []
    for (table, key), values in grid.items():
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        value = chosen.get(table, {}).get(key)
        if len(numbers) > 1 and value in (min(numbers), max(numbers)):
            found.append(f"{key}={value:g}")
    return found
