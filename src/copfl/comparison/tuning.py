"""The settings that do best on a validation part cut from the clients' training samples. Test samples are never seen.

Every entry tries the same grid on the same seeds. A tuning run is an ordinary run whose partition has the validation
part as its test part; the winner then trains on all training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.comparison import entries
from copfl.comparison.entries import Entry, Grid
from copfl.comparison.jobs import Job, job_of
from copfl.comparison.results import outcome_of
from copfl.data.partition import Partition, hold_out
from copfl.experiment.config import Tables
from copfl.experiment.run import prepare

VALIDATION = 0.2  # of each client's training samples


class Trial(NamedTuple):
    """One cell of the grid for one entry."""

    settings: Tables
    accuracy: float  # on the validation parts, mean over clients and tuning seeds


class Tuned(NamedTuple):
    """What an entry tried, and what it goes on with: the best trial, of equals the first."""

    trials: list[Trial]  # none, where nothing in the grid concerns it

    @property
    def chosen(self) -> Tables:
        return max(self.trials, key=lambda trial: trial.accuracy).settings if self.trials else {}


def grid_for(entry: Entry, base: Mapping[str, Mapping[str, Any]], grid: Grid) -> Grid:
    """The part of the grid that concerns the entry: all but the keys of other algorithms."""
    return {place: values for place, values in grid.items() if entries.concerns(entry, base, place[0])}


def validation_of(layers: Sequence[Tables], seed: int, fraction: float) -> Partition:
    """A seed's partition with a part of each client's training samples to be tested on instead of its test samples."""
    experiment = prepare([*layers, {"run": {"seed": seed}}])
    return hold_out(experiment.federation.partition, fraction, experiment.federation.dataset, seed)


def saved(folder: Path, partition: Partition, seed: int) -> Path:
    """Where the partition is kept."""
    path = folder / f"validation-seed{seed}-{partition.fingerprint[:10]}.json"
    if not path.exists():
        partition.save(path)
    return path


def tuned(
    rows: Sequence[Entry],
    base: Mapping[str, Mapping[str, Any]],
    grid: Grid,
    seeds: Sequence[int],
    fraction: float,
    folder: Path,
    last: int,
    all_done: Callable[[Sequence[Job]], None],
) -> list[Tuned]:
    """What every entry tried and chose."""
    files = [
        saved(folder, validation_of(entries.layers(rows[0], base), seed, fraction), seed) for seed in seeds
    ]
    plans: list[list[tuple[Tables, list[Job]]]] = []
    for entry in rows:
        plans.append([])
        own = grid_for(entry, base, grid)
        for cell in entries.cells(own) if own else []:
            label = f"{entry.label} {entries.described(cell, 'optimizer', entry.name)}"
            layers = [*entries.layers(entry, base), cell]
            jobs = [
                job_of(folder, label, [*layers, {"partition": {"name": str(file)}}], seed)
                for file, seed in zip(files, seeds, strict=True)
            ]
            plans[-1].append((cell, jobs))
    all_done([job for plan in plans for _, jobs in plan for job in jobs])
    return [Tuned([Trial(cell, _accuracy(jobs, last)) for cell, jobs in plan]) for plan in plans]


def _accuracy(jobs: Sequence[Job], last: int) -> float:
    """The mean personal accuracy over the seeds."""
    return float(np.mean([outcome_of(job, last).mean("accuracy") for job in jobs]))


def at_an_end(chosen: Tables, grid: Grid) -> list[str]:
    """What was chosen at an end of the values tried, beyond which there may be a better one; such as "lr=0.1"."""
    found = []
    for (table, key), values in grid.items():
        numbers = [
            value for value in values if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        value = chosen.get(table, {}).get(key)
        if len(numbers) > 1 and value in (min(numbers), max(numbers)):
            found.append(f"{key}={value:g}")
    return found
