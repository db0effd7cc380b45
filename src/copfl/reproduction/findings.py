"""What the records say: cells, paired differences, and a verdict for every claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from copfl.errors import unknown
from copfl.experiment.config import Tables
from copfl.reproduction.batch import chosen
from copfl.reproduction.experiments import Claim, Column, Item, Plan, Row, plans
from copfl.reproduction.store import Record, Store
from copfl.stats import Difference, Interval, Spread, difference, over_seeds, spread_of

HOLDS, FAILS, OPEN, UNKNOWN = "holds", "does not hold", "not distinguishable", "not measured"
FEWEST = 3  # seeds in common, below which nothing is said of a claim


class Trial(NamedTuple):
    """What tuning found."""

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
        """In %, by the looks of these rounds."""
        values = {
            seed: 100 * record.mean_within(rounds, self.row.value) for seed, record in self.runs.items()
        }
        return {
            seed: value for seed, value in values.items() if not math.isnan(value)
        }  # nan: it has no look there

    def figure(self) -> Spread | None:
        values = self.per_seed()
        return spread_of(list(values.values())) if values else None


@dataclass(frozen=True, eq=False)
class Findings:
    """All cells of an item."""

    item: Item
    seeds: list[int]
    protocols: list[str]
    cells: dict[tuple[str, str, str], Cell]  # by protocol, column, row

    def cell(self, protocol: str, column: str, row: str) -> Cell:
        return self.cells[protocol, column, row]

    def column(self, protocol: str, column: str) -> list[Cell]:
        return [self.cells[protocol, column, row.label] for row in self.item.rows_of(protocol)]


def found(item: Item, budget: str, protocols: Sequence[str], seeds: Sequence[int], store: Store) -> Findings:
    """What there is, cell by cell."""
    cells = {}
    for plan in plans(item, item.budget(budget), protocols):
        best = chosen(plan, store)
        tried = [(trial.settings, store.get(trial.run)) for trial in plan.trials()]
        trials = [Trial(settings, None if record is None else record.mean()) for settings, record in tried]
        records = {} if best is None else {run.seed: store.get(run) for run in plan.runs(best, seeds)}
        have = {seed: record for seed, record in records.items() if record is not None}
        cells[plan.protocol, plan.column.name, plan.row.label] = Cell(plan, best, trials, have)
    return Findings(item, list(seeds), list(protocols), cells)


# Differences


class Gain(NamedTuple):
    """A cell against another on the seeds that both have, in points."""

    other: str
    seeds: int
    difference: Difference


def gain(own: Cell, other: Cell) -> Gain | None:
    """The paired difference; None where no seed is common."""
    common = sorted(own.runs.keys() & other.runs.keys())
    if not common:
        return None
    ours, theirs = (
        [100 * cell.runs[seed].values(cell.row.value) for seed in common] for cell in (own, other)
    )
    return Gain(other.row.label, len(common), difference(ours, theirs))


def gains(own: Cell, column: Sequence[Cell], baselines_only: bool = True) -> list[Gain]:
    """The gain over each of the other rows that has a seed in common."""
    others = [c for c in column if c is not own and not (baselines_only and c.row.ours)]
    return [g for g in (gain(own, other) for other in others) if g is not None]


def best_baseline(own: Cell, column: Sequence[Cell], baselines_only: bool = True) -> Gain | None:
    """The gain over the other row with the highest mean on the seeds in common, of which it has the most."""
    found = gains(own, column, baselines_only)
    most = max((g.seeds for g in found), default=0)
    return min((g for g in found if g.seeds == most), key=lambda g: g.difference.mean, default=None)


def surest_baseline(own: Cell, column: Sequence[Cell], baselines_only: bool = True) -> Gain | None:
    """The gain over a row that is distinguishably above, where there is one: it need not have the highest mean."""
    above = [g for g in gains(own, column, baselines_only) if judged(g.difference.seeds, g.seeds) == FAILS]
    return min(above, key=lambda g: g.difference.mean, default=best_baseline(own, column, baselines_only))


# Claims


class Verdict(NamedTuple):
    """What may be said of a claim in one place."""

    where: str
    word: str
    why: str


def verdicts(claim: Claim, findings: Findings, protocol: str) -> list[Verdict]:
    """The verdict of a claim in each of its columns."""
    if claim.says not in JUDGES:
        raise unknown("kind of claim:", claim.says, JUDGES)
    return JUDGES[claim.says](claim.how, findings, protocol)


def overall(parts: Sequence[Verdict]) -> str:
    """Holds if it holds everywhere; does not hold if it fails anywhere."""
    words = [part.word for part in parts]
    for word in (FAILS, UNKNOWN, OPEN):
        if word in words:
            return word
    return HOLDS if words else UNKNOWN


def judged(interval: Interval, seeds: int) -> str:
    """Of a difference that the claim says is above zero."""
    if seeds < FEWEST:
        return UNKNOWN
    return HOLDS if interval.low > 0 else FAILS if interval.high < 0 else OPEN


def _columns(how: Mapping[str, Any], findings: Findings) -> list[Column]:
    wanted = how.get("columns")
    return [column for column in findings.item.columns if wanted is None or column.name in wanted]


def _words(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _told(gain: Gain) -> str:
    d = gain.difference
    return f"{d.mean:+.1f} {interval_text(d.seeds)} to {gain.other}, {gain.seeds} seeds"


def interval_text(interval: Interval) -> str:
    if math.isinf(interval.low):
        return "[one seed]"
    return f"[{interval.low:+.1f}, {interval.high:+.1f}]"


def _above(how: Mapping[str, Any], findings: Findings, protocol: str) -> list[Verdict]:
    """Every row named is above every other one named."""
    result = []
    for column in _columns(how, findings):
        for row in _words(how["row"]):
            for other in _words(how["other"]):
                found = gain(
                    findings.cell(protocol, column.name, row), findings.cell(protocol, column.name, other)
                )
                where = f"{column.title}: {row} over {other}"
                if found is None:
                    result.append(Verdict(where, UNKNOWN, "not yet run"))
                else:
                    word = judged(found.difference.seeds, found.seeds)
                    result.append(Verdict(where, word, _told(found)))
    return result


def _best(how: Mapping[str, Any], findings: Findings, protocol: str) -> list[Verdict]:
    """The row is above the best of all others, or of those `among`; with `by`, by so many points on average."""
    by = float(how.get("by", 0.0))

    def word(interval: Interval, seeds: int) -> str:
        enough = (interval.low + interval.high) / 2 >= by  # the middle of a t interval is the mean
        return judged(interval, seeds) if seeds < FEWEST or enough else FAILS if interval.high < by else OPEN

    return _against(best_baseline, how, findings, protocol, word)


def _not_below(how: Mapping[str, Any], findings: Findings, protocol: str) -> list[Verdict]:
    """The row is not distinguishably below any of the others."""

    def word(interval: Interval, seeds: int) -> str:
        return UNKNOWN if seeds < FEWEST else FAILS if interval.high < 0 else HOLDS

    return _against(surest_baseline, how, findings, protocol, word)


def _against(
    which: Callable[[Cell, Sequence[Cell], bool], Gain | None], how: Mapping[str, Any], findings: Findings,
    protocol: str, word: Callable[[Interval, int], str],
) -> list[Verdict]:  # fmt: skip
    result = []
    for column in _columns(how, findings):
        own = findings.cell(protocol, column.name, how["row"])
        labels = [row.label for row in findings.item.rows]
        among = _words(how.get("among", labels))
        for name in among:
            if name not in labels:
                raise unknown("row", name, labels)
        cells = [
            cell for cell in findings.column(protocol, column.name) if cell is own or cell.row.label in among
        ]
        others = [
            cell for cell in cells if cell is not own and not (findings.item.baselines and cell.row.ours)
        ]
        found = which(own, cells, findings.item.baselines)
        lacking = [cell.row.label for cell in others if len(cell.runs.keys() & own.runs.keys()) < FEWEST]
        if found is None:
            result.append(Verdict(column.title, UNKNOWN, "not yet run"))
            continue
        verdict = word(found.difference.seeds, found.seeds)
        why = _told(found)
        if lacking and verdict != FAILS:  # one that is better is enough to refute it, but not to prove it
            verdict, why = UNKNOWN, f"{why}; not yet run: {_few(lacking)}"
        result.append(Verdict(column.title, verdict, why))
    return result


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _steps(
    how: Mapping[str, Any], findings: Findings, protocol: str, sign: int, share: float
) -> list[Verdict]:
    """From column to column, rows change in this direction: more than this share of those that are rivals, or all.

    Columns of different lengths are compared in the rounds that count for the shorter: else the rounds would be judged.
    """
    titles = {column.name: column.title for column in findings.item.columns}
    result = []
    for first, second in how["steps"]:
        rows = [row for row in findings.item.rows_of(protocol) if share == 1 or not row.ours]
        words, told, lengths = [], [], set()
        for row in rows:
            cells = [findings.cell(protocol, name, row.label) for name in (first, second)]
            records = [record for cell in cells for record in cell.runs.values()]
            shorter = min(
                (record.counted for record in records), key=lambda counted: counted[1], default=(0, 0)
            )
            before, after = (cell.per_seed_within(shorter) for cell in cells)
            lengths |= {record.length for record in records}
            common = sorted(before.keys() & after.keys())
            if not common:
                words.append(UNKNOWN)
                continue
            change = sign * np.array([after[seed] - before[seed] for seed in common])
            words.append(judged(over_seeds(change), len(common)))
            told.append(f"{row.label} {sign * change.mean():+.1f}")
        if share == 1:
            word = next((w for w in (FAILS, UNKNOWN, OPEN) if w in words), HOLDS)
        else:
            yes, no = words.count(HOLDS), words.count(FAILS)
            half = share * len(words)
            word = HOLDS if yes > half else FAILS if no > half else UNKNOWN if UNKNOWN in words else OPEN
        both = f", both after {min(lengths)} rounds" if len(lengths) > 1 else ""
        result.append(
            Verdict(f"{titles[first]} → {titles[second]}{both}", word, ", ".join(told) or "not yet run")
        )
    return result


def _settled(how: Mapping[str, Any], findings: Findings, protocol: str) -> list[Verdict]:
    """At a round, the row is within some points of its value at the end."""

    def left(record: Record) -> float:
        place = max((i for i, r in enumerate(record.rounds) if r <= how["round"]), default=None)
        value = math.nan if place is None else record.curves["accuracy"][place]
        return 100 * (record.mean() - value)

    def word(interval: Interval, seeds: int) -> str:
        within = how["within"]
        return (
            UNKNOWN
            if seeds < FEWEST
            else HOLDS
            if interval.high < within
            else FAILS
            if interval.low > within
            else OPEN
        )

    return _of_runs(
        how, findings, protocol, left, word, f"{{}} points still to come at round {how['round']}", "+.1f"
    )


def _loss_near_zero(how: Mapping[str, Any], findings: Findings, protocol: str) -> list[Verdict]:
    """From a round on, the mean training loss is below a bound."""

    def loss(record: Record) -> float:
        return float(
            np.mean(
                [v for v, r in zip(record.curves["loss"], record.rounds, strict=True) if r >= how["round"]]
            )
        )

    def word(interval: Interval, seeds: int) -> str:
        bound = how["below"]
        return (
            UNKNOWN
            if seeds < FEWEST
            else HOLDS
            if interval.high < bound
            else FAILS
            if interval.low > bound
            else OPEN
        )

    return _of_runs(
        how, findings, protocol, loss, word, f"mean loss {{}} from round {how['round']} on", ".3f"
    )


def _of_runs(
    how: Mapping[str, Any], findings: Findings, protocol: str, value: Callable[[Record], float],
    word: Callable[[Interval, int], str], told: str, digits: str,
) -> list[Verdict]:  # fmt: skip
    result = []
    for column in _columns(how, findings):
        runs = findings.cell(protocol, column.name, how["row"]).runs
        if not runs:
            result.append(Verdict(column.title, UNKNOWN, "not yet run"))
            continue
        values = np.array([value(record) for record in runs.values()])
        why = f"{told.format(f'{values.mean():{digits}}')}, {len(values)} seeds"
        result.append(Verdict(column.title, word(over_seeds(values), len(values)), why))
    return result


def _lower_loss(how: Mapping[str, Any], findings: Findings, protocol: str) -> list[Verdict]:
    """Over all looks, the row's training loss is below the other's."""
    result = []
    for column in _columns(how, findings):
        own = findings.cell(protocol, column.name, how["row"])
        others = _words(how["other"])
        result += [
            _loss_gain(own, findings.cell(protocol, column.name, o), column, slice(None)) for o in others
        ]
    return result


def _lowest_loss(how: Mapping[str, Any], findings: Findings, protocol: str) -> list[Verdict]:
    """At the end (the last looks), the row's training loss is below every rival's."""
    result = []
    for column in _columns(how, findings):
        own = findings.cell(protocol, column.name, how["row"])
        baselines = [c for c in findings.column(protocol, column.name) if not c.row.ours]
        parts = [_loss_gain(own, c, column, slice(-own.plan.budget.last, None)) for c in baselines]
        word = overall(parts)
        against = [part.where.partition(": ")[2] for part in parts if part.word == FAILS]
        told = (
            f"not below {_few(against)}" if against else "; ".join(sorted({part.why for part in parts})[:1])
        )
        result.append(Verdict(column.title, word, told))
    return result


def _loss_gain(own: Cell, other: Cell, column: Column, looks: slice) -> Verdict:
    where = f"{column.title}: {other.row.label}"
    common = sorted(own.runs.keys() & other.runs.keys())
    if not common:
        return Verdict(where, UNKNOWN, "not yet run")
    means = [
        [float(np.mean(np.array(cell.runs[seed].curves["loss"])[looks])) for seed in common]
        for cell in (own, other)
    ]
    ours, theirs = np.array(means[0]), np.array(means[1])
    word = judged(over_seeds(theirs - ours), len(common))
    return Verdict(
        where, word, f"mean loss {ours.mean():.3f} against {theirs.mean():.3f}, {len(common)} seeds"
    )


JUDGES: dict[str, Callable[[Mapping[str, Any], Findings, str], list[Verdict]]] = {
    "above": _above,
    "best": _best,
    "not_below": _not_below,
    "most_decline": lambda how, findings, protocol: _steps(how, findings, protocol, -1, 0.5),
    "all_rise": lambda how, findings, protocol: _steps(how, findings, protocol, 1, 1.0),
    "settled": _settled,
    "lower_loss": _lower_loss,
    "lowest_loss": _lowest_loss,
    "loss_near_zero": _loss_near_zero,
}
