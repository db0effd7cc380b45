"""What the rows of a comparison try on validation samples, and what is chosen: from a grid, or by a search.

`compare` calls it, between the settings of the rows and their runs on all training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from copfl.comparison import search
from copfl.comparison.halving import GRID, SEARCH, halving, whole_runs
from copfl.comparison.jobs.job import Job
from copfl.comparison.results.results import Tuned, TuningTrial, read_record
from copfl.comparison.rows.entries import Base, described
from copfl.comparison.rows.entry_settings import RowSettings, job_of
from copfl.comparison.rows.rounds import RowRounds
from copfl.comparison.rows.spaces import Range, Space, cells, space_text
from copfl.comparison.search import Attempt, Measure, SharedSearch
from copfl.errors import UsageError, at_least
from copfl.measures.metrics import MetricInfo
from copfl.settings.checking import parameters_of
from copfl.settings.complete import complete
from copfl.settings.components import factory_of
from copfl.settings.facts import Facts
from copfl.settings.identity import digest, essential
from copfl.settings.schema import KINDS
from copfl.settings.suggestions import usual_rates
from copfl.settings.toml import Tables

TRIALS = 20  # of a search, in each row
RATES = (3, 1, 10)  # tried by default, as multiples of the optimizer's learning rate on the data set


@dataclass(frozen=True)
class ComparisonPlan:
    """What the runs of a comparison have in common."""

    out: Path
    seeds: list[int]
    tune_seeds: list[int]
    validation: float  # fraction of the training samples that the tuning tests on
    last: int | None
    rounds: RowRounds

    def tuning_runs(self, row: RowSettings, settings: Tables, fraction: float = 1.0) -> list[Job]:
        """The runs that measure settings of a row, one per tuning seed.

        Args:
            row: The row.
            settings: What it tries.
            fraction: Of the rounds, that they train for.
        """
        label = f"{row.label} {described(settings, 'optimizer', 'algorithm', row.entry.title)}"
        layers = row.with_settings(settings)
        if fraction < 1:
            rounds = max(1, round(fraction * complete(*layers).run.rounds))
            label, layers = f"{label}, {rounds} rounds", [*layers, {"run": {"rounds": rounds}}]
        how: dict[str, Any] = {"validation": self.validation, "last": self.last, "rounds": self.rounds}
        return [job_of(self.out / "tuning", label, layers, seed, **how) for seed in self.tune_seeds]

    def tried(self, rows: Sequence[RowSettings], spaces: Sequence[Space]) -> dict[str, list[Tables]]:
        """The layers of everything that rows try, by a title; of ranges nothing is known before.

        Args:
            rows: The rows.
            spaces: What each of them tries.
        """
        return {
            f"{row.label} {described(cell, 'optimizer', 'algorithm', row.entry.title)}".strip(): row.with_settings(
                cell
            )
            for row, space in zip(rows, spaces, strict=True)
            if not any(isinstance(values, Range) for values in space.values())
            for cell in cells(space)
        }


def trials_of(space: Space, trials: int | None) -> int:
    """How many settings each row tries in a range; 0: there is none to search in, and `trials` must be None.

    Args:
        space: What is tried.
        trials: What was asked for.
    """
    if not any(isinstance(values, Range) for values in space.values()):
        if trials is not None:
            example = "lr=log:1e-4..1e-1"
            raise UsageError(f"trials are those of a search; name a range to tune in, such as {example}")
        return 0
    count = TRIALS if trials is None else trials
    at_least(1, trials=count)
    search.optuna_module()
    return count


def space_of_row(row: RowSettings, base: Base, named: Space | None) -> Space:
    """What a row tries.

    Args:
        row: The row.
        base: The settings of every row.
        named: What the comparison names for all rows; None: the default, three learning rates.
    """
    if named is not None:
        return {  # without the keys of other algorithms, and without those that the entry sets
            (title, key): values
            for (title, key), values in named.items()
            if row.concerns(title) and key not in row.entry.settings.get(title, {})
        }
    titles = ("optimizer", row.optimizer)
    is_rate_set = any(
        "lr" in tables.get(title, {}) for tables in (base, row.entry.settings) for title in titles
    )
    if not row.optimizer or is_rate_set:
        return {}
    own = parameters_of(factory_of("optimizer", row.optimizer))["lr"].default
    facts = Facts({kind: dict(base.get(kind, {})) for kind in KINDS}, {})
    usual = usual_rates(facts, by_rule=False).get(row.optimizer, own)
    return {("optimizer", "lr"): [float(f"{factor * usual:.3g}") for factor in RATES]}


def rounds_of(
    plan: ComparisonPlan, rows: Sequence[RowSettings], spaces: Sequence[Space], trials: int
) -> float:
    """The rounds of all runs together, with the tuning.

    Args:
        plan: What the runs have in common.
        rows: The rows.
        spaces: What each of them tries.
        trials: As of `tuned`.
    """
    total = 0.0
    for row, space in zip(rows, spaces, strict=True):
        tried = (whole_runs(trials) if trials else len(list(cells(space)))) if space else 0
        rounds = complete(*row.layers).run.rounds
        total += rounds * (tried * len(plan.tune_seeds) + len(plan.seeds))
    return total


def tuned(
    plan: ComparisonPlan,
    rows: Sequence[RowSettings],
    spaces: Sequence[Space],
    trials: int,
    metric: MetricInfo,
    run: Callable[[list[Job]], None],
) -> list[Tuned]:
    """What each row tried and chose; nothing where its space is empty.

    Args:
        plan: What the runs have in common.
        rows: The rows.
        spaces: What each of them tries.
        trials: Of a search, the number of each row; 0: every cell of a grid is tried.
        metric: The one that decides.
        run: Trains jobs that are not finished.
    """

    def measure(attempts: Sequence[Attempt], fraction: float) -> list[float]:
        """The primary metric of each on its validation samples, the mean over clients and seeds."""
        runs = [plan.tuning_runs(rows[attempt.row], attempt.settings, fraction) for attempt in attempts]
        run([job for of_attempt in runs for job in of_attempt])
        return [float(np.mean([read_record(job).mean() for job in of_attempt])) for of_attempt in runs]

    if trials:
        names = [_study_name(plan, *row) for row in zip(rows, spaces, strict=True)]
        shared = SharedSearch(trials, plan.out / "tuning", plan.tune_seeds[0], metric, measure)
        attempts = search.drawn(shared, spaces, names)
    else:
        attempts = [
            [Attempt(row, cell) for cell in cells(space)] if space else [] for row, space in enumerate(spaces)
        ]
    return tried(attempts, spaces, measure, metric, is_search=bool(trials))


def tried(
    attempts: Sequence[Sequence[Attempt]],
    spaces: Sequence[Space],
    measure: Measure,
    metric: MetricInfo,
    *,
    is_search: bool,
) -> list[Tuned]:
    """The values of what each row tries, by halving: of a search on three rungs, of a grid on one.

    Args:
        attempts: What each row tries.
        spaces: What that was drawn from.
        measure: The values of attempts after a fraction of the rounds.
        metric: Which value is better.
        is_search: Whether Optuna drew the attempts.
    """
    values = halving(attempts, measure, metric, SEARCH if is_search else GRID)
    return [
        Tuned(
            [TuningTrial(attempt.settings, *value) for attempt, *value in of_row],
            metric,
            space_text(space) if is_search else "",
        )
        for of_row, space in zip(values, spaces, strict=True)
    ]


def _study_name(plan: ComparisonPlan, row: RowSettings, space: Space) -> str:
    """With all that the trials of a row depend on, so that the same search goes on."""
    settings = essential(complete(*row.layers))
    return f"{row.label} {digest([settings, str(space), plan.tune_seeds, plan.validation, plan.last])}"
