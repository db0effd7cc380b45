"""The rows of a comparison, and its tables for people.

`compare` and `sweep` return a `Comparison`; `writing` and the report show the same tables.
"""

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl import tables
from copfl.comparison.jobs.job import accuracies
from copfl.comparison.results.results import Record, Tuned
from copfl.comparison.rivals import SeedRivals, rival_tables
from copfl.comparison.rows.entries import Entry, described
from copfl.comparison.rows.spaces import Grid
from copfl.experiment.analysis import convergence as converging
from copfl.experiment.analysis.gains import share_of
from copfl.experiment.models import new_clients
from copfl.measures.metrics import MetricInfo
from copfl.settings.schema import optimizer_text
from copfl.stats import LAST, LEVEL, Difference, Spread, difference, how_decided, mean_of_known, spread_of
from copfl.tables import Table, capital, listed, number


@dataclass(frozen=True, eq=False)
class ComparisonRow:
    """One entry: a record per seed, and what tuning chose."""

    entry: Entry
    outcomes: list[Record]
    tuned: Tuned = field(default_factory=lambda: Tuned([]))
    differences: dict[str, Difference] = field(default_factory=dict)  # by accuracy; none for the reference

    @property
    def label(self) -> str:
        return self.entry.label

    @property
    def metric(self) -> MetricInfo:
        return self.outcomes[0].metric

    @property
    def optimizer(self) -> dict[str, Any]:
        """Its table, with every option."""
        return self.outcomes[0].tables.get("optimizer", {})

    @property
    def title(self) -> str:
        """The label, with optimizer and learning rate: "copfl (adam 0.001)"."""
        optimizer = optimizer_text(self.outcomes[0].tables)
        return f"{self.label} ({optimizer})" if optimizer else self.label

    def __repr__(self) -> str:
        value = self.metrics()[accuracies("all", self.metric.name)[0]]
        return f"{self.title}: {self.metric.title} {self.metric.text(*value)}{self.metric.unit}"

    def per_seed(self) -> dict[str, list[float]]:
        """Every metric of the table, a value per seed."""
        others = [other.name for other in self.outcomes[0].metrics[1:]]
        names = [*accuracies("all", self.metric.name), *others]
        values = {name: [run.mean(name) for run in self.outcomes] for name in names}
        values["worst"] = [run.worst for run in self.outcomes]
        values["best"] = [run.mean(statistic="best_round") for run in self.outcomes]
        costs = ("bytes_up", "bytes_down", "seconds")
        return values | {name: [run.cost[name] for run in self.outcomes] for name in costs}

    def metrics(self) -> dict[str, Spread]:
        """Every metric of the table, its mean and spread over the seeds."""
        return {name: spread_of(values) for name, values in self.per_seed().items()}


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """A row per entry; `print` shows the tables, and `copfl.comparison.results.writing` writes them to files.

    Args:
        title: What is compared.
        rows: One per entry, with a record per seed.
        seeds: The seeds of every row.
        last: The number of evaluations that a value is the mean of, where the caller asked for one.
        reference: The label of the row that the others are compared with.
        over: The grid of a sweep.
        notes: What the reader of the table must know.
        rivals: What each client has alone by scikit-learn; None where there are none.
    """

    title: str
    rows: list[ComparisonRow]
    seeds: list[int]
    last: int | None  # evaluations that the user asked for
    reference: str | None = None
    over: Grid = field(default_factory=dict)  # of a sweep
    notes: list[str] = field(default_factory=list)
    rivals: SeedRivals | None = None

    def __repr__(self) -> str:
        from copfl.comparison.results import views  # it shows comparisons

        return "\n".join(views.lines(self))

    def _repr_html_(self) -> str:
        return "".join(map(tables.as_html, all_tables(self)))

    def to_pandas(self, of: str = "rows") -> Any:
        """A data frame of pandas: a row per entry, or a row per entry, seed and client or evaluated round.

        A row per entry has its difference to the reference, with the interval that decides and the verdict.

        Args:
            of: "rows", "clients" or "rounds".
        """
        from copfl.comparison.results import views  # it shows comparisons

        return views.frame(self, of)

    def plot(self, path: str | Path | None = None) -> Any:
        """A figure of matplotlib: the curves of all rows.

        Args:
            path: Of a file that it is saved in, such as "curves.png"; None: in none.
        """
        from copfl.comparison.results import plots  # it draws comparisons

        figure = plots.picture(self)
        if path is not None:
            figure.savefig(path)
        return figure

    @property
    def metric(self) -> MetricInfo:
        """The primary metric, which the table is about."""
        return self.rows[0].metric

    @property
    def averaged(self) -> str:
        """Which evaluations a value is the mean of, such as "the last third of each client's evaluations"."""
        rule = f"last third of each site's evaluations, at most {LAST}"
        if self.last is not None:
            rule = f"last {self.last} evaluations of each site"
        by_validation = {run.run.run.select == "best" for row in self.rows for run in row.outcomes}
        if by_validation == {True}:
            return BEST
        if True in by_validation:
            return f"the {rule}; with run.select=best, {BEST}"
        rounds = {run.counted for row in self.rows for run in row.outcomes}
        everyone = all(
            run.tables.get("run", {}).get("participation", 1) == 1 for run in self.rows[0].outcomes
        )
        if len(rounds) > 1 or not everyone:
            return f"the {rule}"
        first, last = rounds.pop()
        return f"the {rule} (round{f's {first} to' if first < last else ''} {last})"

    def __str__(self) -> str:
        return as_text(self)


BEST = "each site's best round on its validation samples"
Column = tuple[str, Callable[[float, float], str]]  # its title, and a value with its spread as text


def columns(comparison: Comparison) -> dict[str, Column]:
    """The columns of the table: the primary metric of each model, the other metrics, and cost."""
    metric, others = comparison.metric, comparison.rows[0].outcomes[0].metrics[1:]
    titles = ("after", "before", "global")
    named = zip(accuracies("all", metric.name), titles, strict=True)
    result: dict[str, Column] = {name: (title, metric.text) for name, title in named}
    result |= {"worst": ("worst 10 %", metric.text), "best": ("best round", metric.text)}
    result |= {other.name: (other.label, other.text) for other in others}
    return result | {
        "bytes_up": ("up", lambda mean, spread: tables.size(mean)),
        "bytes_down": ("down", lambda mean, spread: tables.size(mean)),
        "seconds": ("s/round", lambda mean, spread: tables.seconds(mean, math.nan)),
    }


def all_tables(comparison: Comparison) -> list[Table]:
    """The metrics, the differences to the reference, the tuning, and the map of a sweep over two keys."""
    shown = [_metrics(comparison)]
    if comparison.reference is not None and len(comparison.rows) > 1:
        shown.append(_differences(comparison))
    if comparison.rivals is not None:
        shown += rival_tables(comparison.rivals, {row.title: row.outcomes for row in comparison.rows})
    shown.append(_convergence(comparison))
    if all(run.new is not None for row in comparison.rows for run in row.outcomes):
        shown.append(_new_clients(comparison))
    if any(row.tuned.trials for row in comparison.rows):
        shown.append(_tuning(comparison))
    if len(comparison.over) == 2:
        shown.append(_map(comparison))
    return shown


def gaining(comparison: Comparison) -> dict[str, list[float]]:
    """By row, the fraction of clients better than under `local`, per seed; {} without that row."""
    local = next((row for row in comparison.rows if row.entry.name == "local"), None)
    if local is None or comparison.over:  # the rows of a sweep may have other clients
        return {}
    metric = comparison.metric

    def shares(row: ComparisonRow) -> list[float]:
        pairs = zip(row.outcomes, local.outcomes, strict=True)
        values = [[np.array(run.clients[metric.name]) for run in pair] for pair in pairs]
        return [share_of(metric.gain(together, alone)) for together, alone in values]

    return {row.label: shares(row) for row in comparison.rows if row is not local}


def _metrics(comparison: Comparison) -> Table:
    rows, shares, shown, metric = [], gaining(comparison), columns(comparison), comparison.metric
    for row in comparison.rows:
        metrics = row.metrics()
        cells = [show(*metrics[name]) for name, (_, show) in shown.items()]
        if shares:
            cells.insert(4, f"{100 * np.mean(shares[row.label]):.0f}" if row.label in shares else "-")
        rows.append([row.title, *cells])
    spread = " ± standard deviation over seeds" if len(comparison.seeds) > 1 else ""
    note = (
        f"Mean{spread}, of {comparison.averaged}. after: right after local "
        "training; before: the same model before local training; global: the global model; worst 10 %: the "
        "mean over the worst tenth of the sites, after; best round: the "
        f"{'highest' if metric.higher_is_better else 'lowest'} mean over sites, a round chosen on test. "
        "up, down: bytes per site and round."
    )
    titles = [title for title, _ in shown.values()]
    if shares:
        titles.insert(4, "gain")
        note += " gain: the share of sites, in %, that are better than the same site under local."
    title = f"{comparison.title}: {metric.in_unit} on each site's own test samples"
    return Table(title, ["", *titles], rows, [note, f"Sites: {'; '.join(partitions(comparison))}."])


def partitions(comparison: Comparison) -> list[str]:
    """The partition that all rows have in common; of a sweep over it, each."""
    return list(dict.fromkeys(run.run.partition_text for row in comparison.rows for run in row.outcomes))


def _differences(comparison: Comparison) -> Table:
    rows, metric = [], comparison.metric
    for row in comparison.rows:
        gain = row.differences.get(metric.name)
        if gain is not None:
            bounds = [metric.interval(*bound) for bound in (gain.both, gain.seeds, gain.clients)]
            rows.append([row.title, metric.text(gain.mean, sign="+"), *bounds, metric.verdict(gain.verdict)])
    level = f"{100 * LEVEL:.0f} %"
    are_same = comparison.rows[0].outcomes[0].same_clients
    varies = (
        "over sites and seeds, as in every seed the sites are the same"
        if are_same
        else "over seeds, as every seed has sites of its own"
    )
    verdicts = how_decided(len(rows))
    note = (
        f"Paired: the same site of the same seed under both. over both: {varies}; the interval over sites takes "
        f"these seeds as given. {verdicts}"
    )
    head = ["", "difference", f"{level} over both", "over seeds", "over sites", "verdict"]
    what = f"personal {metric.title} after local training{metric.points}"
    title = f"Difference to {comparison.reference}, {what}"
    return Table(title, head, rows, [note])


class Convergence(NamedTuple):
    """How a row came to its value."""

    gained: float  # in the last third of the evaluations, positive where it is better
    rises: bool  # whether that is relevant
    rounds: int | None  # to the common value; None where the mean curve never has it
    bytes: float  # up and down of one client until then


def convergence(comparison: Comparison) -> tuple[float, dict[str, Convergence]]:
    """The best value that the mean curves of all rows reach, and how each of them came there, by label."""
    metric, curves = comparison.metric, dict[str, dict[int, float]]()
    for row in comparison.rows:
        by_round = [dict(zip(run.rounds, run.curves[metric.name], strict=True)) for run in row.outcomes]
        rounds = sorted(set.intersection(*(set(of_seed) for of_seed in by_round)))
        curves[row.label] = {r: float(np.mean([of_seed[r] for of_seed in by_round])) for r in rounds}
    common = converging.common_value([list(curve.values()) for curve in curves.values()], metric)
    result = {}
    for row in comparison.rows:
        curve, metrics = curves[row.label], row.metrics()
        rounds_needed = converging.rounds_to(common, list(curve), list(curve.values()), metric)
        traffic = metrics["bytes_up"].mean + metrics["bytes_down"].mean
        result[row.label] = Convergence(
            gained=converging.gained(list(curve.values()), metric),
            rises=converging.rises([list(curve.values())], metric) > 0,
            rounds=rounds_needed,
            bytes=math.nan if rounds_needed is None else rounds_needed * traffic,
        )
    return common, result


def still_rising(comparison: Comparison) -> list[str]:
    """A warning where the order of the rows may be another one after more rounds."""
    rows = {label: of_row.gained for label, of_row in convergence(comparison)[1].items() if of_row.rises}
    if not rows:
        return []
    text = capital(converging.rising_text(rows, comparison.metric))
    return [f"{text}. With more rounds the differences may be others."]


def past_their_best(comparison: Comparison) -> list[str]:
    """A warning where rows train for too many rounds, so that their values are not what they can be."""
    metric, fallen = comparison.metric, list[str]()
    for row in comparison.rows:
        evaluated = [run.rounds for run in row.outcomes]
        if any(rounds != evaluated[0] for rounds in evaluated):  # those that stop in time are at their best
            continue
        unknown = [math.nan] * len(evaluated[0])
        values, losses = (
            np.mean([run.curves.get(name, unknown) for run in row.outcomes], axis=0)
            for name in (metric.name, "test_loss")
        )
        if text := converging.past_its_best(values, losses, evaluated[0], metric):
            fallen.append(f"{row.label} ({text})")
    if not fallen:
        return []
    found = "without a number of rounds, each row finds its own"
    return [f"Past their best: {listed(fallen, converging.NAMED)}. Fewer rounds are better here; {found}."]


def _convergence(comparison: Comparison) -> Table:
    metric = comparison.metric
    common, by_label = convergence(comparison)
    rows = []
    for row in comparison.rows:
        of_row, metrics = by_label[row.label], row.metrics()
        reached = [
            number(of_row.rounds, ".0f"),
            tables.NONE if of_row.rounds is None else tables.size(of_row.bytes),
        ]
        gain = metric.text(of_row.gained, sign="+") + (", still rises" if of_row.rises else "")
        rows.append([row.title, metric.text(metrics[metric.name].mean), gain, *reached])
    level = f"{metric.text(common)}{metric.unit}"
    head = ["", "final", "last third", f"rounds to {level}", f"bytes to {level}"]
    note = (
        f"last third: what the mean curve gained in the last third of its evaluations{metric.points}, better "
        f"is positive. {level}: the best {metric.title} that every row reaches; the rounds until a row has "
        "it, and the bytes that one site sends and receives until then."
    )
    return Table("Convergence, after local training", head, rows, [note])


def new_client_differences(row: ComparisonRow) -> dict[str, tuple[Spread, Difference]]:
    """By number of samples: a new client's accuracy, and its paired difference to training alone."""
    fitted = [run.new for run in row.outcomes if run.new is not None]
    return {
        name: (
            spread_of([float(mean_of_known(new.accuracy[name])) for new in fitted]),
            difference([new.accuracy[name] for new in fitted], [new.alone[name] for new in fitted]),
        )
        for name in (fitted[0].accuracy if fitted else ())
    }


def _new_clients(comparison: Comparison) -> Table:
    rows, names, metric = [], list(new_clients.SAMPLES), comparison.metric
    for row in comparison.rows:
        cells = []
        for mean, gain in new_client_differences(row).values():
            to_alone = f"{metric.text(gain.mean, sign='+')} {metric.interval(*gain.seeds)}"
            cells += [metric.text(*mean), gain.verdict if gain.unknown else to_alone]
        rows.append([row.title, *cells])
    head = [title for name in names for title in (f"{name} sample{'s' * (name != '1')}", "to alone")]
    note = (
        "Sites that never trained, fitted after the last round by the algorithm's own local update, "
        f"{new_clients.UPDATES} times, with 1, 5 or all of their training samples. to alone: the paired "
        "difference to training alone, with the same samples, optimizer, learning rate and number of steps"
        f"{metric.points}, with the 95 % t interval over seeds."
    )
    title = f"New sites: {metric.in_unit} on their own test samples"
    return Table(title, ["", *head], rows, [note])


def _tuning(comparison: Comparison) -> Table:
    rows, metric = [], comparison.metric
    searched = any(row.tuned.space for row in comparison.rows)
    for row in comparison.rows:
        silent = "optimizer", "algorithm", row.entry.title
        tried = [f"{described(t.settings, *silent)}: {metric.text(t.accuracy)}" for t in row.tuned.complete]
        count = [str(len(row.tuned.trials))] if searched else []
        rows.append([row.label, *count, described(row.tuned.chosen, *silent) or "-", ", ".join(tried) or "-"])
    note = "No test sample was used; the chosen settings then trained on all training samples. "
    if searched:
        spaces = ", ".join(dict.fromkeys(row.tuned.space for row in comparison.rows if row.tuned.space))
        note += (
            f"tried: settings drawn from {spaces}. They trained for a ninth of the rounds, the best third "
            "of them for a third, and the best third of those for all rounds, which are shown."
        )
    else:
        note += "Other values can be named, or none (tune)."
    head = ["", *(["tried"] if searched else []), "chosen", f"validation {metric.in_unit}"]
    return Table("Tuning, on a part of the sites' training samples", head, rows, [note])


def _map(comparison: Comparison) -> Table:
    (down, down_values), (across, across_values) = comparison.over.items()
    metric = comparison.metric
    cells = iter(metric.text(*row.metrics()[metric.name]) for row in comparison.rows)
    rows = [[str(value), *(next(cells) for _ in across_values)] for value in down_values]
    unit = ", in %" if metric.fraction else ""
    title = f"Personal {metric.title} after local training{unit}: "
    title += f"{'.'.join(down)} down, {'.'.join(across)} across"
    return Table(title, [".".join(down), *map(str, across_values)], rows)


def as_text(comparison: Comparison, width: int = 100) -> str:
    """The tables and the notes, for a terminal.

    Args:
        comparison: What is shown.
        width: Of the lines.
    """
    paragraphs = [tables.as_text(table, width) for table in all_tables(comparison)]
    paragraphs += ["\n".join(textwrap.wrap(f"Note: {note}", width)) for note in comparison.notes]
    return "\n\n".join(paragraphs)


def as_markdown(comparison: Comparison) -> str:
    paragraphs = [tables.as_markdown(table) for table in all_tables(comparison)]
    return "\n\n".join([*paragraphs, *(f"Note: {note}" for note in comparison.notes)]) + "\n"
