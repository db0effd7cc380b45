"""What a comparison found: a row per entry, an outcome per seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from copfl.comparison.entries import Entry, Grid
from copfl.comparison.results import ACCURACIES, Outcome
from copfl.comparison.tuning import Tuned
from copfl.stats import Difference, Spread, spread_of


@dataclass(frozen=True, eq=False)
class Row:
    """One entry: an outcome per seed, and what tuning chose."""

    entry: Entry
    outcomes: list[Outcome]
    tuned: Tuned = field(default_factory=lambda: Tuned([]))
    differences: dict[str, Difference] = field(
        default_factory=dict
    )  # by accuracy; none for the reference itself

    @property
    def label(self) -> str:
        return self.entry.label

    def per_seed(self) -> dict[str, list[float]]:
        """Every figure of the table, a value per seed."""
        values = {name: [run.mean(name) for run in self.outcomes] for name in ACCURACIES}
        others = ("worst", "best", "bytes_up", "bytes_down", "seconds")
        return values | {name: [float(getattr(run, name)) for run in self.outcomes] for name in others}

    def figures(self) -> dict[str, Spread]:
        """Every figure of the table, its mean and spread over the seeds."""
        return {name: spread_of(values) for name, values in self.per_seed().items()}


@dataclass(frozen=True, eq=False)
class Comparison:
    """What was found, a row per entry; `print` shows the table, and `copfl.comparison.tables` writes it down."""

    title: str
    rows: list[Row]
    seeds: list[int]
    last: int
    reference: str | None = None
    over: Grid = field(default_factory=dict)  # of a sweep
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        from copfl.comparison.tables import as_text

        return as_text(self)
