"""Cells of an experiment out of its records, paired differences, and a verdict for every claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from copfl.comparison.results import Trial, Tuned
from copfl.errors import one_of, unknown
from copfl.experiment.config import Tables
from copfl.reproduction.experiments import Claim, Column, Experiment, Plan, Row, plans
from copfl.reproduction.records import Record, Store
from copfl.stats import Numbers, Spread, over_seeds, spread_of
from copfl.tables import interval

HOLDS, FAILS, OPEN, UNKNOWN = "holds", "does not hold", "not distinguishable", "not measured"
NOT_YET = "not yet run"
FEWEST = 3  # seeds in common, below which a claim is not judged
Options = Mapping[str, Any]  # of a claim
PerSeed = dict[int, float]


@dataclass(frozen=True, eq=False)
class Cell:
    """A row in a column under a protocol."""

    plan: Plan
    chosen: Tables | None  # None: tuning is not finished
    trials: list[Trial]  # nan: not yet run
    runs: dict[int, Record]  # by seed

    @property
    def row(self) -> Row:
        return self.plan.row

    def per_seed(self) -> PerSeed:
        """In %."""
        statistic = self.plan.column.statistic
        values = {seed: record.mean(self.row.value, statistic) for seed, record in self.runs.items()}
        return {seed: 100 * value for seed, value in values.items() if not math.isnan(value)}

    def per_seed_within(self, rounds: tuple[int, int]) -> PerSeed:
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
    protocols: list[str]
    cells: dict[tuple[str, str, str], Cell]  # by protocol, column, row

    def column(self, protocol: str, column: str) -> list[Cell]:
        return [self.cells[protocol, column, row.label] for row in self.experiment.rows_of(protocol)]


def found(
    experiment: Experiment, budget: str, protocols: Sequence[str], seeds: Sequence[int], store: Store
) -> Findings:
    """The cells, as far as there are records."""
    cells = {}
    for plan in plans(experiment, experiment.budget(budget), protocols, seeds):
        trials, best = tuned(plan, store)
        jobs = [] if best is None else plan.jobs(best)
        runs = {job.seed: record for job in jobs if (record := store.get(job)) is not None}
        cells[plan.protocol, plan.column.name, plan.row.label] = Cell(plan, best, trials, runs)
    return Findings(experiment, list(protocols), cells)


def tuned(plan: Plan, store: Store) -> tuple[list[Trial], Tables | None]:
    """The settings that were tried, and the best of them by the value that the row shows; None: not all are."""
    trials = []
    for settings, job in plan.trials():
        record = store.get(job)
        trials.append(Trial(settings, math.nan if record is None else record.mean(plan.row.value)))
    if any(math.isnan(trial.accuracy) for trial in trials):
        return trials, None
    return trials, Tuned(trials).chosen if trials else plan.choices[0]


# Differences


class Gain(NamedTuple):
    """A cell minus another."""

    other: str
    changes: Numbers  # for each seed that both have; above 0 is better
    why: str

    @property
    def mean(self) -> float:
        return float(self.changes.mean())

    def __str__(self) -> str:
        bounds = interval(*over_seeds(self.changes)) if len(self.changes) > 1 else "[one seed]"
        return f"{self.mean:+.1f} {bounds}"


def paired(own: PerSeed, other: PerSeed) -> Numbers:
    """The differences on the seeds that both have."""
    return np.array([own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())])


def gain(own: Cell, other: Cell) -> Gain:
    """In accuracy, in points. The rows of a seed have the same clients, so the mean over them is paired too."""
    found = Gain(other.row.label, paired(own.per_seed(), other.per_seed()), NOT_YET)
    seeds = len(found.changes)
    return found._replace(why=f"{found} to {found.other}, {seeds} seeds") if seeds else found


def loss_gain(own: Cell, other: Cell, last: int = 0) -> Gain:
    """In training loss over the last evaluations; 0: over all of them."""
    common = sorted(own.runs.keys() & other.runs.keys())
    ours, theirs = (
        np.array([np.mean(cell.runs[seed].curves["loss"][-last:]) for seed in common])
        for cell in (own, other)
    )
    numbers = common and f"mean loss {ours.mean():.3f} against {theirs.mean():.3f}, {len(common)} seeds"
    return Gain(other.row.label, theirs - ours, numbers or NOT_YET)


def best_of(gains: Sequence[Gain]) -> Gain | None:
    """The gain over the row with the highest mean, among those with the most seeds in common."""
    most = max((len(g.changes) for g in gains), default=0)
    return min((g for g in gains if len(g.changes) == most), key=lambda g: g.mean) if most else None


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


def judged(values: Numbers, above: float = 0.0) -> str:
    """The verdict on a claim that the mean is above a value, by its interval over seeds."""
    if len(values) < FEWEST:
        return UNKNOWN
    bounds = over_seeds(values)
    return HOLDS if bounds.low > above else FAILS if bounds.high < above else OPEN


def _compared(
    options: Options, findings: Findings, protocol: str
) -> Iterator[tuple[Column, Cell, list[Cell]]]:
    """In each of the claim's columns, each cell of `row` with those of `other`, or else of all baselines."""
    experiment = findings.experiment
    rows, others = (_list(options.get(key, [])) for key in ("row", "other"))
    for name in (*rows, *others):
        one_of([row.label for row in experiment.rows], row=name)
    for column in experiment.columns:
        if column.name not in options.get("columns", [column.name]):
            continue
        cells = {cell.row.label: cell for cell in findings.column(protocol, column.name)}
        baselines = [label for label, c in cells.items() if not (experiment.baselines and c.row.ours)]
        for own in rows:
            wanted = others or baselines
            yield column, cells[own], [c for label, c in cells.items() if label in wanted and label != own]


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _above(
    options: Options, findings: Findings, protocol: str, measure: Callable[[Cell, Cell], Gain] = gain
) -> Iterator[Verdict]:
    """Every row of `row` is above every row of `other`."""
    for column, own, others in _compared(options, findings, protocol):
        for found in (measure(own, other) for other in others):
            where = f"{column.title}: {own.row.label} over {found.other}"
            yield Verdict(where, judged(found.changes), found.why)


def _best(options: Options, findings: Findings, protocol: str, ties: bool = False) -> Iterator[Verdict]:
    """The row is above the best of the others; with `margin`, by so many points on average.

    With `ties`, it is only not distinguishably below any of them: the highest need not be the surest.
    """
    for column, own, others in _compared(options, findings, protocol):
        gains = [gain(own, other) for other in others]
        above = [g for g in gains if judged(g.changes) == FAILS]
        found = best_of(above if ties and above else gains)
        if found is None:
            yield Verdict(column.title, UNKNOWN, NOT_YET)
            continue
        margin = options.get("margin", 0.0)
        word, why = judged(found.changes, 0.0 if found.mean >= margin else margin), found.why
        word = HOLDS if ties and word == OPEN else word
        lacking = [g.other for g in gains if len(g.changes) < FEWEST]
        if lacking and word != FAILS:  # one better row refutes the claim; to prove it needs all of them
            word, why = UNKNOWN, f"{why}; {NOT_YET}: {_few(lacking)}"
        yield Verdict(column.title, word, why)


def _steps(
    options: Options, findings: Findings, protocol: str, sign: int, fraction: float
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
            cells = [findings.cells[protocol, name, row.label] for name in (second, first)]
            records = [record for cell in cells for record in cell.runs.values()]
            counted = min((r.counted for r in records), key=lambda rounds: rounds[1], default=(0, 0))
            lengths |= {record.length for record in records}
            change = paired(*(cell.per_seed_within(counted) for cell in cells))
            words.append(judged(sign * change))
            changes += [f"{row.label} {change.mean():+.1f}"] if len(change) else []
        word = overall(words)
        if fraction < 1:
            yes, no, half = words.count(HOLDS), words.count(FAILS), fraction * len(words)
            word = HOLDS if yes > half else FAILS if no > half else UNKNOWN if UNKNOWN in words else OPEN
        both = f", both after {min(lengths)} rounds" if len(lengths) > 1 else ""
        yield Verdict(f"{titles[first]} → {titles[second]}{both}", word, ", ".join(changes) or NOT_YET)


def _below(
    options: Options,
    findings: Findings,
    protocol: str,
    value: Callable[[Record, int], float],
    bound: str,
    text: str,
) -> Iterator[Verdict]:
    """A value of every run at a round is below a bound."""
    for column, own, _ in _compared(options, findings, protocol):
        values = np.array([value(record, options["round"]) for record in own.runs.values()])
        why = f"{text.format(values.mean(), options['round'])}, {len(values)} seeds" if own.runs else NOT_YET
        yield Verdict(column.title, judged(-values, -options[bound]), why)


def _remaining(record: Record, round: int) -> float:
    """The points that the accuracy still gains after a round."""
    before = [v for r, v in zip(record.rounds, record.curves["accuracy"], strict=True) if r <= round]
    return 100 * (record.mean() - before[-1]) if before else math.nan


def _late_loss(record: Record, round: int) -> float:
    """The mean training loss from a round on."""
    curve = zip(record.rounds, record.curves["loss"], strict=True)
    return float(np.mean([loss for r, loss in curve if r >= round]))


def _lowest_loss(options: Options, findings: Findings, protocol: str) -> Iterator[Verdict]:
    """In the last evaluations, the row's training loss is below every baseline's."""
    for column, own, others in _compared(options, findings, protocol):
        gains = [loss_gain(own, other, own.plan.budget.last) for other in others]
        words = [judged(found.changes) for found in gains]
        lower = [found.other for found, word in zip(gains, words, strict=True) if word == FAILS]
        why = f"not below {_few(lower)}" if lower else min((found.why for found in gains), default="")
        yield Verdict(column.title, overall(words), why)


JUDGES: dict[str, Callable[[Options, Findings, str], Iterator[Verdict]]] = {
    "above": _above,
    "best": _best,
    "not_below": partial(_best, ties=True),
    "most_decline": partial(_steps, sign=-1, fraction=0.5),
    "all_rise": partial(_steps, sign=1, fraction=1.0),
    "settled": partial(
        _below, value=_remaining, bound="within", text="{:+.1f} points still to come at round {}"
    ),
    "lower_loss": partial(_above, measure=loss_gain),
    "lowest_loss": _lowest_loss,
    "loss_near_zero": partial(
        _below, value=_late_loss, bound="below", text="mean loss {:.3f} from round {} on"
    ),
}
