"""Cells of an experiment out of its records, paired differences, and a verdict for every claim."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from copfl.comparison.results.results import Record, Tuned, TuningTrial
from copfl.errors import one_of, unknown
from copfl.settings.toml import Tables
from copfl.stats import LEVEL, Numbers, Spread, holm, over_seeds, spread_of, t_test
from copfl.tables import interval
from studies.paper.experiments import Claim, Column, Experiment, Plan, Row, plans
from studies.paper.records import Store

HOLDS, FAILS, OPEN, UNKNOWN = "holds", "does not hold", "not distinguishable", "not measured"
NOT_YET = "not yet run"
FEWEST = 3  # seeds in common, below which a claim is not judged
PerSeed = dict[int, float]


@dataclass(frozen=True, eq=False)
class Cell:
    """A row in a column under a protocol."""

    plan: Plan
    chosen: Tables | None  # None: tuning is not finished
    trials: list[TuningTrial]  # nan: not yet run
    runs: dict[int, Record]  # by seed

    @property
    def row(self) -> Row:
        return self.plan.row

    @cached_property
    def per_seed(self) -> PerSeed:
        """In %, by the evaluations that count; without seeds that have none."""
        name, statistic = self.row.value, self.plan.column.statistic
        return _percent({seed: record.mean(name, statistic) for seed, record in self.runs.items()})

    def within(self, rounds: tuple[int, int]) -> PerSeed:
        """In %, by the evaluations from the first of these rounds to the last."""
        name = self.row.value
        return _percent({seed: mean_within(record, rounds, name) for seed, record in self.runs.items()})

    def metric(self) -> Spread | None:
        """The mean and spread over seeds, in %."""
        return spread_of(list(self.per_seed.values())) if self.per_seed else None


def mean_within(record: Record, rounds: tuple[int, int], name: str) -> float:
    """The mean of the evaluations from the first of these rounds to the last; nan where there is none.

    Args:
        record: Of a run.
        rounds: The first and the last of them, from 1.
        name: Of the metric and the model.
    """
    name = name or record.metric.name
    if rounds == record.counted:
        return record.mean(name)
    low, high = rounds
    values = [v for r, v in zip(record.rounds, record.curves[name], strict=True) if low <= r <= high]
    return float(np.mean(values)) if values else math.nan


def _percent(fractions: PerSeed) -> PerSeed:
    """In %, without those that are not known."""
    return {seed: 100 * value for seed, value in fractions.items() if not math.isnan(value)}


@dataclass(frozen=True, eq=False)
class Findings:
    """All cells of an experiment."""

    experiment: Experiment
    protocols: list[str]
    cells: dict[tuple[str, str, str], Cell]  # by protocol, column, row

    def column(self, protocol: str, column: str) -> list[Cell]:
        return [self.cells[protocol, column, row.label] for row in self.experiment.rows_of(protocol)]

    def papers(self, cell: Cell) -> float | None:
        """The paper's number of the cell, in %; None if it is not known."""
        column, row = cell.plan.column, cell.row
        return self.experiment.numbers.get(column.paper_column or column.name, {}).get(
            row.paper_row or row.label
        )


def from_records(
    experiment: Experiment, budget: str, protocols: Sequence[str], seeds: Sequence[int], store: Store
) -> Findings:
    """The cells of an experiment, as far as there are records.

    Args:
        experiment: Its rows and columns.
        budget: The name of one of its budgets.
        protocols: Those that are shown.
        seeds: The seeds of a cell; none: as many as its column or the budget says.
        store: The records.
    """
    cells = {}
    for plan in plans(experiment, experiment.budget(budget), protocols, seeds):
        trials, best = tuned(plan, store)
        jobs = [] if best is None else plan.jobs(best)
        runs = {job.seed: record for job in jobs if (record := store.get(job)) is not None}
        cells[plan.protocol, plan.column.name, plan.row.label] = Cell(plan, best, trials, runs)
    return Findings(experiment, list(protocols), cells)


def tuned(plan: Plan, store: Store) -> tuple[list[TuningTrial], Tables | None]:
    """The settings tried, and the best of them by the value that the row shows; None: some are missing."""
    trials = []
    for settings, job in plan.trials():
        record = store.get(job)
        trials.append(TuningTrial(settings, math.nan if record is None else record.mean(plan.row.value)))
    if any(math.isnan(trial.accuracy) for trial in trials):
        return trials, None
    return trials, Tuned(trials).chosen if trials else plan.choices[0]


# Differences


@dataclass(frozen=True, eq=False)
class Gain:
    """A cell minus another."""

    other: str
    changes: Numbers  # for each seed that both have; above 0 is better
    measured: str = ""  # both means in words; of accuracy, the difference says it

    @cached_property
    def mean(self) -> float:
        return float(self.changes.mean())

    @property
    def why(self) -> str:
        seeds = len(self.changes)
        return f"{self.measured or f'{self} to {self.other}'}, {seeds} seeds" if seeds else NOT_YET

    def __str__(self) -> str:
        return self._difference

    @cached_property
    def _difference(self) -> str:
        bounds = interval(*over_seeds(self.changes)) if len(self.changes) > 1 else "[one seed]"
        return f"{self.mean:+.1f} {bounds}"


def paired(ours: PerSeed, theirs: PerSeed) -> Numbers:
    """Ours minus theirs on the seeds that both have."""
    return np.array([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


@cache  # the tables of a page, and each way to judge its claims, ask for the same ones
def gain(cell: Cell, other: Cell) -> Gain:
    """In points of accuracy. The rows of a seed have the same clients, so their means are paired too."""
    return Gain(other.row.label, paired(cell.per_seed, other.per_seed))


Comparison = Callable[[Cell, Cell], Gain]
Measure = Callable[[Record, str], float]  # of a run, by the name of the accuracy that its row shows


@cache
def lowered(cell: Cell, other: Cell, measure: Measure, text: str) -> Gain:
    """By how much a number of the cell's runs is below that of the other's; below is better.

    Args:
        cell: Of the row that a claim is about.
        other: Of the row that it is compared with.
        measure: The number of a run.
        text: The two means in words, as a format string.
    """
    common = sorted(cell.runs.keys() & other.runs.keys())
    ours, theirs = (
        np.array([measure(side.runs[seed], side.row.value) for seed in common]) for side in (cell, other)
    )
    measured = text.format(ours.mean(), theirs.mean()) if common else ""
    return Gain(other.row.label, theirs - ours, measured)


def mean_loss(record: Record, shown: str) -> float:
    """The training loss that the method reports, over all evaluations."""
    return float(np.mean(record.curves["loss"]))


def last_loss(record: Record, shown: str) -> float:
    """The same over the last evaluations."""
    return float(np.mean(record.curves["loss"][-record.last :]))


def rounds_needed(record: Record, shown: str) -> float:
    """The first evaluated round with an accuracy within one point of that at the end."""
    end = record.mean(shown)
    curve = zip(record.rounds, record.curves[shown], strict=True)
    return float(next((round for round, value in curve if value >= end - 0.01), record.length))


def unrest(record: Record, shown: str) -> float:
    """The mean change of accuracy, in points, between two evaluations of the second half of the rounds."""
    curve = zip(record.rounds, record.curves[shown], strict=True)
    values = [value for round, value in curve if round >= record.length / 2]
    return float(100 * np.abs(np.diff(values)).mean())


def best_of(gains: Sequence[Gain]) -> Gain | None:
    """The gain over the row with the highest mean, among those with the most seeds in common."""
    most = max((len(g.changes) for g in gains), default=0)
    return min((g for g in gains if len(g.changes) == most), key=lambda g: g.mean) if most else None


def complete(cell: Cell) -> bool:
    """Whether the cell has all its seeds, and enough to be judged by."""
    return len(cell.per_seed) == len(cell.plan.seeds) >= FEWEST


def leaders(cells: Sequence[Cell]) -> list[Cell]:
    """The cell with the highest mean, then those not distinguishable from it, with Holm's correction.

    Only cells with all seeds count; none, if there are fewer than two.
    """
    ranked = sorted(filter(complete, cells), key=lambda cell: -float(np.mean(list(cell.per_seed.values()))))
    if len(ranked) < 2:
        return []
    best, *others = ranked
    p_values = holm([t_test(gain(best, other).changes) for other in others])
    return [best, *(other for other, p in zip(others, p_values, strict=True) if p >= 1 - LEVEL)]


def differences(findings: Findings, protocol: str) -> dict[tuple[str, str, str], tuple[Gain, bool]]:
    """By row, other row and column, and whether significant by Holm; only of cells with all seeds."""
    gains = {}
    for row, other in findings.experiment.differences:
        for column in findings.experiment.columns:
            cells = [findings.cells[protocol, column.name, label] for label in (row, other)]
            if all(map(complete, cells)):
                gains[row, other, column.name] = gain(*cells)
    p_values = holm([t_test(points.changes) for points in gains.values()])
    return {key: (gains[key], p < 1 - LEVEL) for key, p in zip(gains, p_values, strict=True)}


# Claims


class Verdict(NamedTuple):
    """Whether a claim holds in one column, and the numbers."""

    where: str
    word: str
    why: str


Judge = Callable[[Numbers, float], str]  # whether differences per seed are above a value


class Case(NamedTuple):
    """What a claim is judged by."""

    options: Mapping[str, Any]
    findings: Findings
    protocol: str
    judge: Judge


def judged(values: Numbers, above: float = 0.0) -> str:
    """The verdict on a claim that the mean is above a value, by its interval over seeds."""
    if len(values) < FEWEST or not np.isfinite(values).all():
        return UNKNOWN
    bounds = over_seeds(values)
    return HOLDS if bounds.low > above else FAILS if bounds.high < above else OPEN


def verdicts(claim: Claim, findings: Findings, protocol: str, judge: Judge = judged) -> list[Verdict]:
    """Whether the claim holds under the protocol, column by column.

    Args:
        claim: The statement, and the cells that it compares.
        findings: The cells of its experiment.
        protocol: The protocol of the cells.
        judge: How differences are judged; `Corrected` counts all comparisons of the experiment.
    """
    if claim.kind not in JUDGES:
        raise unknown("kind of claim:", claim.kind, JUDGES)
    return list(JUDGES[claim.kind](Case(claim.options, findings, protocol, judge)))


class Corrected:
    """`judged` with Holm's correction for all comparisons of the experiment's claims under a protocol."""

    def __init__(self, findings: Findings, protocol: str) -> None:
        seen: dict[tuple[bytes, float], float] = {}

        def note(values: Numbers, above: float = 0.0) -> str:
            if len(values) >= FEWEST:
                seen[values.tobytes(), above] = t_test(values, above)
            return OPEN

        for claim in findings.experiment.claims:
            verdicts(claim, findings, protocol, note)
        self.p = dict(zip(seen, holm(list(seen.values())), strict=True))

    def __call__(self, values: Numbers, above: float = 0.0) -> str:
        word = judged(values, above)
        return word if word == UNKNOWN or self.p[values.tobytes(), above] < 1 - LEVEL else OPEN


corrected = cache(Corrected)  # every claim of a page needs the same ones


def overall(words: Sequence[str]) -> str:
    """Holds if it holds everywhere; does not hold if it fails anywhere."""
    return next((word for word in (FAILS, UNKNOWN, OPEN) if word in words), HOLDS if words else UNKNOWN)


def _compared(case: Case) -> Iterator[tuple[Column, Cell, list[Cell]]]:
    """In each of the claim's columns, each cell of `row` with those of `other`, or else of all baselines."""
    experiment, options = case.findings.experiment, case.options
    labels = (options.get(key, []) for key in ("row", "other"))
    rows, others = ([label] if isinstance(label, str) else label for label in labels)
    for name in (*rows, *others):
        one_of([row.label for row in experiment.rows], row=name)
    for column in experiment.columns:
        if column.name not in options.get("columns", [column.name]):
            continue
        cells = {cell.row.label: cell for cell in case.findings.column(case.protocol, column.name)}
        baselines = [label for label, c in cells.items() if not (experiment.baselines and c.row.ours)]
        for row in rows:
            wanted = others or baselines
            yield column, cells[row], [c for label, c in cells.items() if label in wanted and label != row]


def _above(case: Case, measure: Comparison = gain) -> Iterator[Verdict]:
    """Every row of `row` is above every row of `other`."""
    for column, cell, others in _compared(case):
        for points in (measure(cell, other) for other in others):
            where = f"{column.title}: {cell.row.label} over {points.other}"
            yield Verdict(where, case.judge(points.changes, 0.0), points.why)


def _best(case: Case, ties: bool = False, measure: Comparison = gain) -> Iterator[Verdict]:
    """The row is above every one of the others; with `margin`, by so many points on average.

    With `ties`, it is only not distinguishably below any of them. With another `measure` than accuracy, better.
    """
    margin, by_accuracy = case.options.get("margin", 0.0), measure is gain
    below, above = ("below", "above") if by_accuracy else ("worse than", "better than")
    for column, cell, others in _compared(case):
        gains = [measure(cell, other) for other in others]
        by_word: dict[str, list[Gain]] = {word: [] for word in (FAILS, UNKNOWN, OPEN, HOLDS)}
        for points in gains:
            enough = len(points.changes) > 0 and points.mean >= margin
            by_word[case.judge(points.changes, 0.0 if enough else margin)].append(points)
        word = overall([word for word, judged_so in by_word.items() if judged_so])
        numbers = {g.other: f"{g.other} ({g if by_accuracy else g.why})" for g in gains if len(g.changes)}
        parts = [
            f"{text} {', '.join(numbers.get(g.other, g.other) for g in by_word[kind])}"
            for kind, text in ((FAILS, below), (OPEN, "not distinguishable from"), (UNKNOWN, NOT_YET + ":"))
            if by_word[kind]
        ]
        least = best_of(gains)
        parts += [f"{above} {numbers[least.other]} and all others"] if word == HOLDS and least else []
        yield Verdict(column.title, HOLDS if ties and word == OPEN else word, "; ".join(parts))


def _steps(case: Case, sign: int, fraction: float) -> Iterator[Verdict]:
    """From column to column, more than this fraction of the baselines change in this direction; 1: all rows.

    Columns of different lengths are compared in the rounds that count for the shorter one.
    """
    findings, protocol = case.findings, case.protocol
    titles = {column.name: column.title for column in findings.experiment.columns}
    for first, second in case.options["steps"]:
        words, changes, lengths = [], [], set()
        for row in findings.experiment.rows_of(protocol):
            if fraction < 1 and row.ours:
                continue
            cells = [findings.cells[protocol, name, row.label] for name in (second, first)]
            records = [record for cell in cells for record in cell.runs.values()]
            counted = min((r.counted for r in records), key=lambda rounds: rounds[1], default=(0, 0))
            lengths |= {record.length for record in records}
            change = paired(*(cell.within(counted) for cell in cells))
            words.append(case.judge(sign * change, 0.0))
            changes += [f"{row.label} {change.mean():+.1f}"] if len(change) else []
        word = overall(words)
        if fraction < 1:
            yes, no, half = words.count(HOLDS), words.count(FAILS), fraction * len(words)
            word = HOLDS if yes > half else FAILS if no > half else UNKNOWN if UNKNOWN in words else OPEN
        both = f", both after {min(lengths)} rounds" if len(lengths) > 1 else ""
        yield Verdict(f"{titles[first]} → {titles[second]}{both}", word, ", ".join(changes) or NOT_YET)


def _settled(case: Case) -> Iterator[Verdict]:
    """From the evaluations after a round to the last ones, accuracy gains less than `within` points.

    Runs that are not twice as long cannot tell: the first would be among the last.
    """
    round, within = case.options["round"], case.options["within"]
    for column, cell, _ in _compared(case):
        runs = [record for record in cell.runs.values() if record.length >= 2 * round]
        if not runs:
            short = f"runs of {next(iter(cell.runs.values())).length} rounds" if cell.runs else NOT_YET
            yield Verdict(column.title, UNKNOWN, short)
            continue
        gains = []
        for record in runs:
            after = [v for r, v in zip(record.rounds, record.curves["accuracy"], strict=True) if r >= round]
            gains.append(100 * (record.mean() - float(np.mean(after[: record.last]))))
        values = np.array(gains)
        why = f"{values.mean():+.1f} {interval(*over_seeds(values))} points after the evaluations that follow"
        yield Verdict(column.title, case.judge(-values, -within), f"{why} round {round}, {len(runs)} seeds")


def _loss_near_zero(case: Case) -> Iterator[Verdict]:
    """The mean training loss from a round on is below a bound."""
    round = case.options["round"]
    for column, cell, _ in _compared(case):
        curves = [zip(record.rounds, record.curves["loss"], strict=True) for record in cell.runs.values()]
        values = np.array([np.mean([loss for r, loss in curve if r >= round]) for curve in curves])
        why = (
            f"mean loss {values.mean():.3f} from round {round} on, {len(values)} seeds" if curves else NOT_YET
        )
        yield Verdict(column.title, case.judge(-values, -case.options["below"]), why)


def _by(measure: Measure, text: str) -> Comparison:
    return partial(lowered, measure=measure, text=text)


JUDGES: dict[str, Callable[[Case], Iterator[Verdict]]] = {
    "above": _above,
    "best": _best,
    "not_below": partial(_best, ties=True),
    "most_decline": partial(_steps, sign=-1, fraction=0.5),
    "all_rise": partial(_steps, sign=1, fraction=1.0),
    "settled": _settled,
    "fewest_rounds": partial(_best, measure=_by(rounds_needed, "{:.0f} rounds against {:.0f}")),
    "steadiest": partial(_best, measure=_by(unrest, "{:.2f} points against {:.2f}")),
    "lower_loss": partial(_above, measure=_by(mean_loss, "mean loss {:.3f} against {:.3f}")),
    "lowest_last_loss": partial(_best, measure=_by(last_loss, "{:.3f} against {:.3f}")),
    "loss_near_zero": _loss_near_zero,
}
