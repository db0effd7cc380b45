"""Cells of an experiment out of its records, paired differences, and a verdict for every claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from copfl.errors import unknown
from copfl.experiment.config import Tables
from copfl.reproduction.experiments import Claim, Column, Experiment, Plan, Row, plans
from copfl.reproduction.records import Record, Store
from copfl.stats import Interval, Spread, over_seeds, spread_of
from copfl.tables import interval

HOLDS, FAILS, OPEN, UNKNOWN = "holds", "does not hold", "not distinguishable", "not measured"
NOT_YET = "not yet run"
FEWEST = 3  # seeds in common, below which a claim is not judged
Options = Mapping[str, Any]  # of a claim


class Trial(NamedTuple):
    """A setting that tuning tried."""

    settings: Tables
    accuracy: float | None  # None: not yet run


@dataclass(frozen=True, eq=False)
class Cell:
    """A row in a column under a protocol."""

    plan: Plan
    chosen: Tables | None  # None: tuning is not finished
    trials: list[Trial]
    runs: dict[int, Record]  # by seed

    @property
    def row(self) -> Row:
        return self.plan.row

    def per_seed(self) -> dict[int, float]:
        """In %."""
        return {seed: 100 * record.mean(self.row.value) for seed, record in self.runs.items()}

    def per_seed_within(self, rounds: tuple[int, int]) -> dict[int, float]:
        """In %, by the evaluations of these rounds; without seeds that have none."""
        values = {seed: record.mean_within(rounds, self.row.value) for seed, record in self.runs.items()}
        return {seed: 100 * value for seed, value in values.items() if not math.isnan(value)}

    def metric(self) -> Spread | None:
        """The mean and spread over seeds, in %."""
        values = self.per_seed()
        return spread_of(list(values.values())) if values else None


@dataclass(frozen=True, eq=False)
class Findings:
    """All cells of an experiment."""

    experiment: Experiment
    seeds: list[int]
    protocols: list[str]
    cells: dict[tuple[str, str, str], Cell]  # by protocol, column, row

    def cell(self, protocol: str, column: str, row: str) -> Cell:
        return self.cells[protocol, column, row]

    def column(self, protocol: str, column: str) -> list[Cell]:
        return [self.cells[protocol, column, row.label] for row in self.experiment.rows_of(protocol)]


def found(
    experiment: Experiment, budget: str, protocols: Sequence[str], seeds: Sequence[int], store: Store
) -> Findings:
    """The cells, as far as there are records."""
    cells = {}
    for plan in plans(experiment, experiment.budget(budget), protocols):
        best = chosen(plan, store)
        tried = [(trial.settings, store.get(trial.job)) for trial in plan.trials()]
        trials = [Trial(settings, None if record is None else record.mean()) for settings, record in tried]
        records = {} if best is None else {job.seed: store.get(job) for job in plan.jobs(best, seeds)}
        have = {seed: record for seed, record in records.items() if record is not None}
        cells[plan.protocol, plan.column.name, plan.row.label] = Cell(plan, best, trials, have)
    return Findings(experiment, list(seeds), list(protocols), cells)


def chosen(plan: Plan, store: Store) -> Tables | None:
    """The settings with the highest validation accuracy, of equals the first; None: not all are tried."""
    trials = plan.trials()
    if not trials:
        return plan.choices[0]
    found = [store.get(trial.job) for trial in trials]
    known = [(record.mean(), -i) for i, record in enumerate(found) if record is not None]
    return trials[-max(known)[1]].settings if len(known) == len(trials) else None


# Differences


class Gain(NamedTuple):
    """A cell minus another on the seeds that both have, in points."""

    other: str
    seeds: int
    mean: float
    bounds: Interval  # over seeds

    def __str__(self) -> str:
        return f"{self.mean:+.1f} {interval_text(self.bounds)} to {self.other}, {self.seeds} seeds"


def interval_text(bounds: Interval) -> str:
    return "[one seed]" if math.isinf(bounds.low) else interval(*bounds)


def gain(own: Cell, other: Cell) -> Gain | None:
    """The paired difference; None where no seed is common."""
    common = sorted(own.runs.keys() & other.runs.keys())
    if not common:
        return None
    means = []
    for seed in common:
        ours, theirs = (100 * cell.runs[seed].values(cell.row.value) for cell in (own, other))
        change = ours - theirs
        means.append(change[~np.isnan(change)].mean())
    return Gain(other.row.label, len(common), float(np.mean(means)), over_seeds(np.array(means)))


def gains(own: Cell, column: Sequence[Cell], baselines_only: bool = True) -> list[Gain]:
    """The gain over each of the other rows that has a seed in common."""
    others = [c for c in column if c is not own and not (baselines_only and c.row.ours)]
    return [g for g in (gain(own, other) for other in others) if g is not None]


def best_baseline(own: Cell, column: Sequence[Cell], baselines_only: bool = True) -> Gain | None:
    """The gain over the row with the highest mean, among those with the most seeds in common."""
    found = gains(own, column, baselines_only)
    most = max((g.seeds for g in found), default=0)
    return min((g for g in found if g.seeds == most), key=lambda g: g.mean, default=None)


def surest_baseline(own: Cell, column: Sequence[Cell], baselines_only: bool = True) -> Gain | None:
    """The gain over a row that is distinguishably above, if any: it need not have the highest mean."""
    above = [g for g in gains(own, column, baselines_only) if judged(g.bounds, g.seeds) == FAILS]
    return min(above, key=lambda g: g.mean, default=best_baseline(own, column, baselines_only))


# Claims


class Verdict(NamedTuple):
    """Whether a claim holds in one column, and the numbers."""

    where: str
    word: str
    why: str


def verdicts(claim: Claim, findings: Findings, protocol: str) -> list[Verdict]:
    """The verdict of a claim in each of its columns."""
    if claim.kind not in JUDGES:
        raise unknown("kind of claim:", claim.kind, JUDGES)
    return list(JUDGES[claim.kind](claim.options, findings, protocol))


def overall(words: Sequence[str]) -> str:
    """Holds if it holds everywhere; does not hold if it fails anywhere."""
    return next((word for word in (FAILS, UNKNOWN, OPEN) if word in words), HOLDS if words else UNKNOWN)


def judged(bounds: Interval, seeds: int, above: float = 0.0) -> str:
    """The verdict on a claim that a mean is above a value, by its interval over seeds."""
    if seeds < FEWEST:
        return UNKNOWN
    return HOLDS if bounds.low > above else FAILS if bounds.high < above else OPEN


def _columns(options: Options, findings: Findings) -> list[Column]:
    wanted = options.get("columns")
    return [column for column in findings.experiment.columns if wanted is None or column.name in wanted]


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _above(options: Options, findings: Findings, protocol: str) -> Iterator[Verdict]:
    """Every row of `row` is above every row of `other`."""
    for column in _columns(options, findings):
        for row in _list(options["row"]):
            for other in _list(options["other"]):
                own, against = (findings.cell(protocol, column.name, name) for name in (row, other))
                found = gain(own, against)
                word = UNKNOWN if found is None else judged(found.bounds, found.seeds)
                yield Verdict(f"{column.title}: {row} over {other}", word, str(found or NOT_YET))


def _best(options: Options, findings: Findings, protocol: str) -> Iterator[Verdict]:
    """The row is above the best of the others, or of `other`; with `margin`, by so many points on average."""
    margin = float(options.get("margin", 0.0))

    def word(bounds: Interval, seeds: int) -> str:
        enough = (bounds.low + bounds.high) / 2 >= margin  # the middle of a t interval is the mean
        return judged(bounds, seeds, 0.0 if enough else margin)

    return _against(best_baseline, word, options, findings, protocol)


def _not_below(options: Options, findings: Findings, protocol: str) -> Iterator[Verdict]:
    """The row is not distinguishably below any of the others."""

    def word(bounds: Interval, seeds: int) -> str:
        return UNKNOWN if seeds < FEWEST else FAILS if bounds.high < 0 else HOLDS

    return _against(surest_baseline, word, options, findings, protocol)


def _against(
    which: Callable[[Cell, Sequence[Cell], bool], Gain | None],
    word: Callable[[Interval, int], str],
    options: Options,
    findings: Findings,
    protocol: str,
) -> Iterator[Verdict]:
    labels = [row.label for row in findings.experiment.rows]
    others = _list(options.get("other", labels))
    for name in others:
        if name not in labels:
            raise unknown("row", name, labels)
    baselines = findings.experiment.baselines
    for column in _columns(options, findings):
        own = findings.cell(protocol, column.name, options["row"])
        cells = [c for c in findings.column(protocol, column.name) if c is not own and c.row.label in others]
        found = which(own, cells, baselines)
        if found is None:
            yield Verdict(column.title, UNKNOWN, NOT_YET)
            continue
        verdict, why = word(found.bounds, found.seeds), str(found)
        compared = [cell for cell in cells if not (baselines and cell.row.ours)]
        lacking = [cell.row.label for cell in compared if len(cell.runs.keys() & own.runs.keys()) < FEWEST]
        if lacking and verdict != FAILS:  # one better row refutes the claim; to prove it needs all of them
            verdict, why = UNKNOWN, f"{why}; {NOT_YET}: {_few(lacking)}"
        yield Verdict(column.title, verdict, why)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _steps(
    sign: int, fraction: float, options: Options, findings: Findings, protocol: str
) -> Iterator[Verdict]:
    """From column to column, more than this fraction of the baselines change in this direction; 1: all rows.

    Columns of different lengths are compared in the rounds that count for the shorter one.
    """
    titles = {column.name: column.title for column in findings.experiment.columns}
    for first, second in options["steps"]:
        words, changes, lengths = [], [], set()
        for row in findings.experiment.rows_of(protocol):
            if fraction < 1 and row.ours:
                continue
            cells = [findings.cell(protocol, name, row.label) for name in (first, second)]
            records = [record for cell in cells for record in cell.runs.values()]
            shorter = min(
                (record.counted for record in records), key=lambda rounds: rounds[1], default=(0, 0)
            )
            before, after = (cell.per_seed_within(shorter) for cell in cells)
            lengths |= {record.length for record in records}
            common = sorted(before.keys() & after.keys())
            if not common:
                words.append(UNKNOWN)
                continue
            change = sign * np.array([after[seed] - before[seed] for seed in common])
            words.append(judged(over_seeds(change), len(common)))
            changes.append(f"{row.label} {sign * change.mean():+.1f}")
        if fraction == 1:
            word = overall(words)
        else:
            yes, no, half = words.count(HOLDS), words.count(FAILS), fraction * len(words)
            word = HOLDS if yes > half else FAILS if no > half else UNKNOWN if UNKNOWN in words else OPEN
        both = f", both after {min(lengths)} rounds" if len(lengths) > 1 else ""
        yield Verdict(f"{titles[first]} → {titles[second]}{both}", word, ", ".join(changes) or NOT_YET)


def _settled(options: Options, findings: Findings, protocol: str) -> Iterator[Verdict]:
    """At a round, the row is within some points of its value at the end."""

    def remaining(record: Record) -> float:
        place = max((i for i, r in enumerate(record.rounds) if r <= options["round"]), default=None)
        value = math.nan if place is None else record.curves["accuracy"][place]
        return 100 * (record.mean() - value)

    text = f"{{:+.1f}} points still to come at round {options['round']}"
    return _below(remaining, options["within"], text, options, findings, protocol)


def _loss_near_zero(options: Options, findings: Findings, protocol: str) -> Iterator[Verdict]:
    """From a round on, the mean training loss is below a bound."""

    def loss(record: Record) -> float:
        curve = zip(record.curves["loss"], record.rounds, strict=True)
        return float(np.mean([value for value, round in curve if round >= options["round"]]))

    text = f"mean loss {{:.3f}} from round {options['round']} on"
    return _below(loss, options["below"], text, options, findings, protocol)


def _below(
    value: Callable[[Record], float],
    bound: float,
    text: str,
    options: Options,
    findings: Findings,
    protocol: str,
) -> Iterator[Verdict]:
    for column in _columns(options, findings):
        runs = findings.cell(protocol, column.name, options["row"]).runs
        if not runs:
            yield Verdict(column.title, UNKNOWN, NOT_YET)
            continue
        values = np.array([value(record) for record in runs.values()])
        word = judged(over_seeds(-values), len(values), -bound)
        yield Verdict(column.title, word, f"{text.format(values.mean())}, {len(values)} seeds")


def _lower_loss(options: Options, findings: Findings, protocol: str) -> Iterator[Verdict]:
    """Over all evaluations, the row's training loss is below the other's."""
    for column in _columns(options, findings):
        own = findings.cell(protocol, column.name, options["row"])
        for other in _list(options["other"]):
            yield _loss_gain(own, findings.cell(protocol, column.name, other), column, slice(None))


def _lowest_loss(options: Options, findings: Findings, protocol: str) -> Iterator[Verdict]:
    """In the last evaluations, the row's training loss is below every baseline's."""
    for column in _columns(options, findings):
        own = findings.cell(protocol, column.name, options["row"])
        baselines = [c for c in findings.column(protocol, column.name) if not c.row.ours]
        parts = [_loss_gain(own, c, column, slice(-own.plan.budget.last, None)) for c in baselines]
        against = [part.where.partition(": ")[2] for part in parts if part.word == FAILS]
        why = f"not below {_few(against)}" if against else min((part.why for part in parts), default="")
        yield Verdict(column.title, overall([part.word for part in parts]), why)


def _loss_gain(own: Cell, other: Cell, column: Column, evaluations: slice) -> Verdict:
    where = f"{column.title}: {other.row.label}"
    common = sorted(own.runs.keys() & other.runs.keys())
    if not common:
        return Verdict(where, UNKNOWN, NOT_YET)
    ours, theirs = (
        np.array([np.mean(cell.runs[seed].curves["loss"][evaluations]) for seed in common])
        for cell in (own, other)
    )
    word = judged(over_seeds(theirs - ours), len(common))
    return Verdict(
        where, word, f"mean loss {ours.mean():.3f} against {theirs.mean():.3f}, {len(common)} seeds"
    )


JUDGES: dict[str, Callable[[Options, Findings, str], Iterator[Verdict]]] = {
    "above": _above,
    "best": _best,
    "not_below": _not_below,
    "most_decline": partial(_steps, -1, 0.5),
    "all_rise": partial(_steps, 1, 1.0),
    "settled": _settled,
    "lower_loss": _lower_loss,
    "lowest_loss": _lowest_loss,
    "loss_near_zero": _loss_near_zero,
}
