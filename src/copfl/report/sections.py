"""The charts of a report, section by section, from the data of its runs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from copfl.charts import Chart, Dots, Heat, Line, Lines, Value, values_of
from copfl.report.run_data import Masks, RunData
from copfl.stats import Interval, Numbers, mean_of_known, over_clients, ranked
from copfl.tables import Table, number

Runs = Sequence[RunData]

ACCURACIES = {
    "accuracy": ("after training", "after local training"),
    "accuracy_before": ("before training", "with the new global model, before local training"),
    "accuracy_global": ("global model", "with the global model alone, as a new client would have it"),
}
SCORES = {
    "weight": ("Weights", "the weight of each client in the round's mean", "weight"),
    "gradient_score": (
        "Gradient score",
        "1 minus the cosine of a client's update and the server's step without it; high: a new direction",
        "gradient score",
    ),
    "prediction_score": (
        "Prediction score",
        "the loss on a client's data of the global model without it; high: the others do not cover its data",
        "prediction score",
    ),
}
SHARED = {
    "shared": "a client's parameters",
    "averaged": "averaged this round",
    "shared_by_all": "shared by all",
}
CONTRIBUTIONS = {  # in audit.json, see copfl.audit
    "leave_one_out_others": "leave-one-out: others",
    "leave_one_out_global": "leave-one-out: global",
    "shapley_global": "Shapley: global",
    "shapley_personal": "Shapley: personal",
}
BAND = "The band reaches from the lowest to the highest tenth of the clients."
EQUAL = 1e-7  # points of accuracy; smaller differences are rounding
TABLE_ROWS = 60  # a table of more rounds contains some of them


class Section(NamedTuple):
    """Charts that answer one question."""

    name: str  # the anchor
    short: str
    title: str
    charts: list[Chart]


class Paired(NamedTuple):
    """A run compared with the first one, in points of accuracy."""

    label: str
    reference: str
    gain: Numbers  # [clients], nan where either run never evaluated the client
    clients: Interval  # 95 %, over the clients of these two runs

    @property
    def mean(self) -> float:
        return float(np.nanmean(self.gain))

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of clients that are better, equal, worse."""
        known = self.gain[~np.isnan(self.gain)]
        better, worse = int((known > EQUAL).sum()), int((known < -EQUAL).sum())
        return better, len(known) - better - worse, worse


def paired(runs: Runs) -> list[Paired]:
    """Each run compared with the first, where both have the same clients with the same samples."""
    first, *others = runs
    result = []
    for run in (run for run in others if run.partition == first.partition):
        gain = 100 * (run.last("accuracy") - first.last("accuracy"))
        if not np.isnan(gain).all():
            result.append(Paired(run.label, first.label, gain, over_clients([gain[~np.isnan(gain)]])))
    return result


def sections(runs: Runs) -> list[Section]:
    """All charts; metrics that no run recorded are left out."""
    found = [
        Section("accuracy", "Accuracy", "How accurate is each client's model?", _accuracy(runs)),
        Section("contribution", "Weights", "Which clients have weight, and why?", list(_scores(runs))),
        Section("audit", "Audit", "Do the weights match the clients' contributions?", list(_audit(runs))),
        Section("personal", "Personal parameters", "Which parameters are personal?", _personal(runs)),
        Section("data", "Data", "Which data does each client have?", list(_data(runs))),
        Section("cost", "Cost", "How many bytes and seconds does a round take?", _cost(runs)),
    ]
    return [section for section in found if section.charts]


def _accuracy(runs: Runs) -> list[Chart]:
    """Curves, a dot per client, and with several runs the gain of each client."""
    charts: list[Chart] = []
    first, rounds = runs[0], _rounds(runs)
    if len(runs) == 1 and first.has("accuracy"):
        names = [name for name in ACCURACIES if first.has(name)]
        lines = [_curve(first, name, ACCURACIES[name][0], place) for place, name in enumerate(names)]
        lines = [lines[0], *(line._replace(low=(), high=()) for line in lines[1:])]
        meanings = "; ".join(": ".join(ACCURACIES[name]) for name in names[1:])
        about = f"Mean over clients, each tested on its own samples. {meanings.capitalize()}. {BAND}"
        charts.append(Lines("accuracy", "Accuracy by round", about, rounds, "accuracy, %", lines, " %"))
    else:
        few = len(runs) < 5
        for name, (short, long) in ACCURACIES.items():
            shown = [(place, run) for place, run in enumerate(runs) if run.has(name)]
            lines = [_curve(run, name, run.label, place, band=few) for place, run in shown]
            short = "of the global model" if name == "accuracy_global" else short
            about = f"Mean over clients {long}, each tested on its own samples. {BAND if few else ''}"
            chart = Lines(name, f"Accuracy {short} by round", about, rounds, "accuracy, %", lines, " %")
            charts += [chart] if lines else []
    local = next((run for run in runs if run.algorithm == "local"), None)
    for place, run in enumerate(runs):
        if run.has("accuracy") and (run is not local or len(runs) == 1):
            charts.append(_clients(run, None if run is local else local, _name("clients", runs, place)))
    if pairs := paired(runs):
        places = {run.label: place for place, run in enumerate(runs)}
        gains = [Line(pair.label, values_of(pair.gain), colour=places[pair.label]) for pair in pairs]
        about = f"Accuracy minus that of the same client under {first.label}, at the last evaluation."
        x_title, rows = f"difference to {first.label}, points", _client_names(first)
        gain = Dots("differences", "Paired differences", about, rows, x_title, gains, " points", zero=True)
        charts.append(gain)
    return charts


def _clients(run: RunData, local: RunData | None, name: str) -> Dots:
    names = [metric for metric in ACCURACIES if run.has(metric)]
    series = [
        Line(ACCURACIES[metric][0], values_of(100 * run.last(metric)), colour=place)
        for place, metric in enumerate(names)
    ]
    meanings = ", ".join(ACCURACIES[metric][1] for metric in names[::-1])
    about = f"Each client at its last evaluation: {meanings}."
    if local is not None and local.clients == run.clients and local.has("accuracy"):
        series.append(Line("local training only", values_of(100 * local.last("accuracy")), colour=3))
        about += " Local training only: the same client in the run of the algorithm local."
    title = f"Accuracy per client: {run.label}"
    return Dots(name, title, about, _client_names(run), "accuracy, %", series, " %")


def _scores(runs: Runs) -> Iterator[Chart]:
    """Weights over time, and the two scores that determine them."""
    for place, run in enumerate(runs):
        for metric, (title, meaning, what) in SCORES.items():
            if not run.has(metric) or (metric == "weight" and _constant(run.metric(metric))):
                continue
            yield Heat(
                name=_name(metric, runs, place),
                title=_titled(f"{title} by round", runs, run),
                about=f"{meaning[0].upper()}{meaning[1:]}. Empty where a client did not take part.",
                rows=_client_names(run),
                columns=[str(number) for number in run.rounds],
                values=[values_of(row) for row in run.metric(metric).T],
                what=what,
                x_title="round",
                digits=3,
            )


def _audit(runs: Runs) -> Iterator[Chart]:
    """Each client's rank by weight and by contribution, and the contributions, of audited runs."""
    for place, run in enumerate(runs):
        if run.audit is None:
            continue
        mean, rows = run.audit["mean"], [str(name) for name in run.audit["clients"]]
        values = {label: mean["values"][key] for key, label in CONTRIBUTIONS.items() if key in mean["values"]}
        ranks = [
            Line(label, _ranks(row), colour=colour)
            for colour, (label, row) in enumerate({"weight": mean["scores"]["weight"], **values}.items())
        ]
        about = (
            "Rank 1 is the highest weight or contribution. Where the dots of a row are far apart, the weight "
            "does not reflect the contribution. Leave-one-out: the accuracy that the others, or the global "
            "model, gain from the client. Shapley: its Shapley value, summed over the rounds."
        )
        title = _titled("Rank by weight and by contribution", runs, run)
        yield Dots(_name("audit-ranks", runs, place), title, about, rows, "rank", ranks)
        gains = [
            Line(label, [None if value is None else 100 * value for value in row], colour=colour)
            for colour, (label, row) in enumerate(values.items(), 1)
        ]
        about = f"In points of accuracy. {' '.join(run.audit['remarks'])}"
        title, name = _titled("Contribution of each client", runs, run), _name("audit-values", runs, place)
        yield Dots(name, title, about, rows, "gain, points", gains, " points", zero=True)


def _ranks(values: Sequence[Value]) -> list[Value]:
    """The rank of each value, 1 for the highest."""
    return values_of(ranked(-np.array(values, np.float64)))


def _personal(runs: Runs) -> list[Chart]:
    """The growth of the masks, the parameters that are still shared, and the masks by layer."""
    charts: list[Chart] = []
    single, rounds = len(runs) == 1, _rounds(runs)
    masks, shared = [], []
    for place, run in enumerate(runs):
        if run.has("personal_fraction"):
            masks.append(_curve(run, "personal_fraction", _label("of all parameters", runs, run), place))
        if run.has("personal_fraction_of_moving"):
            label = _label("of those that change", runs, run)
            line = _curve(run, "personal_fraction_of_moving", label, place + single, band=False)
            masks.append(line._replace(dash=1))
        for dash, (name, meaning) in enumerate(SHARED.items()):
            values = [None if value is None else 100 * value for value in run.federation(name)]
            if any(value is not None for value in values):
                colour = dash if single else place
                shared.append(Line(_label(meaning, runs, run), values, colour=colour, dash=dash))
    if masks:
        about = f"The fraction of a client's parameters that is personal, mean over clients. {BAND}"
        charts.append(Lines("masks", "Growth of the masks", about, rounds, "personal, %", masks, " %"))
    if shared:
        about = (
            "Of a client's parameters, those that it shares, mean over clients; of the server's, those that "
            "this round averaged, and those that are personal to no client."
        )
        charts.append(Lines("shared", "Shared parameters", about, rounds, "parameters, %", shared, " %"))
    for place, run in enumerate(runs):
        charts += _by_layer(runs, place, run.masks) if run.masks is not None else []
    return charts


def _by_layer(runs: Runs, place: int, masks: Masks) -> list[Chart]:
    """The personal fraction of each layer per client, and the fraction that all clients share."""
    run = runs[place]
    rows = [f"{layer} ({size:,})" for layer, size in zip(masks.layers, masks.sizes, strict=True)]
    where = Heat(
        name=_name("where", runs, place),
        title=_titled("Personal parameters by layer", runs, run),
        about=f"After round {masks.round}: the personal fraction of each layer, per client; layers are in "
        "the order of the model, with their numbers of parameters.",
        rows=rows,
        columns=[str(client) for client in range(run.clients)],
        values=[values_of(100 * row) for row in masks.fraction.T],
        what="personal",
        x_title="client",
        unit=" %",
        row_title="layer",
    )
    series = [
        Line("personal, mean over clients", values_of(100 * masks.fraction.mean(0)), colour=0),
        Line("shared by all clients", values_of(100 * masks.shared_by_all), colour=1),
    ]
    about = f"After round {masks.round}. The rest is personal to some clients and shared by others."
    title, name = _titled("Shared parameters by layer", runs, run), _name("layers", runs, place)
    return [where, Dots(name, title, about, rows, "parameters, %", series, " %", row_title="layer")]


def _data(runs: Runs) -> Iterator[Chart]:
    """Training samples of each class; runs with the same partition have one chart."""
    seen: set[str] = set()
    for place, run in enumerate(runs):
        if run.label_counts is None or run.partition in seen:
            continue
        seen.add(run.partition)
        alike = [other.label for other in runs if other.partition == run.partition]
        common = len(alike) == len(runs)
        train, test = (
            f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
            for sizes in run.sizes
        )
        yield Heat(
            name="data" if common else _name("data", runs, place),
            title="Training samples by class" + ("" if common else f" of {', '.join(alike)}"),
            about="The number of training samples of each class per client; empty where there are none. A "
            f"client has {train} training and {test} test samples.",
            rows=_client_names(run),
            columns=[str(name) for name in run.environment["classes"]],
            values=[[float(count) if count else None for count in row] for row in run.label_counts.tolist()],
            what="samples",
            x_title="class",
            digits=0,
            zero=True,
        )


def _cost(runs: Runs) -> list[Chart]:
    """Bytes and seconds of each round."""
    charts: list[Chart] = []
    traffic, seconds = [], []
    ways = {"bytes_up": "to the server", "bytes_down": "to the client"}
    for place, run in enumerate(runs):
        for dash, (name, way) in enumerate(ways.items()):
            if run.has(name):
                values = values_of(mean_of_known(run.metric(name), axis=1) / 1000)
                colour = dash if len(runs) == 1 else place
                traffic.append(Line(_label(way, runs, run), values, colour=colour, dash=dash))
        if run.seconds:
            seconds.append(Line(_label("seconds", runs, run), list(run.seconds), colour=place))
    if traffic:
        about = "The traffic of one client in a round, mean over clients; 1 kB is 1000 bytes."
        charts.append(Lines("bytes", "Bytes by round", about, _rounds(runs), "kB per client", traffic, " kB"))
    if seconds:
        about = (
            "The wall-clock time of each round, all clients included; the first round contains the warm-up."
        )
        charts.append(Lines("seconds", "Seconds by round", about, _rounds(runs), "seconds", seconds, " s", 3))
    return charts


def _curve(run: RunData, metric: str, label: str, colour: int, band: bool = True) -> Line:
    """The mean over clients in percent, with its band, and the lowest client of each round."""
    values = 100 * run.metric(metric)
    remarks = []
    for row in values:
        lowest = -1 if np.isnan(row).all() else int(np.nanargmin(row))
        remarks.append("" if lowest < 0 else f"lowest: client {lowest}, {row[lowest]:.1f} %")
    line = Line(label, values_of(mean_of_known(values, axis=1)), remarks=remarks, colour=colour)
    if not band or not len(values):
        return line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a round without an evaluation has no quantiles
        low, high = np.nanquantile(values, (0.1, 0.9), axis=1)
    return line._replace(low=values_of(low), high=values_of(high))


def _constant(values: Numbers) -> bool:
    """Whether every client has the same weight in all rounds, which a chart need not show."""
    known = values[~np.isnan(values)]
    return not len(known) or float(known.max() - known.min()) < 1e-9


def _rounds(runs: Runs) -> list[int]:
    return max((run.rounds for run in runs), key=len)


def _client_names(run: RunData) -> list[str]:
    return [f"client {number}" for number in range(run.clients)]


def _label(text: str, runs: Runs, run: RunData) -> str:
    return text if len(runs) == 1 else f"{run.label}: {text}"


def _titled(title: str, runs: Runs, run: RunData) -> str:
    return title if len(runs) == 1 else f"{title}: {run.label}"


def _name(name: str, runs: Runs, place: int) -> str:
    """An anchor that is the same in every report of the same runs."""
    algorithm = re.sub(r"[^a-z0-9]+", "-", runs[place].algorithm.lower()).strip("-")
    return name if len(runs) == 1 else f"{name}-{place + 1}-{algorithm}"


def table_of(chart: Chart) -> Table:
    """The numbers of a chart; of many rounds, some."""

    def cell(values: Sequence[Value], place: int) -> str:
        known = values[place] if place < len(values) else None
        return number(known, f",.{chart.digits}f") + (chart.unit if known is not None else "")

    if isinstance(chart, Dots):
        head = [chart.row_title, *(series.name for series in chart.series)]
        columns = [[cell(series.y, place) for place in range(len(chart.rows))] for series in chart.series]
        return Table(chart.title, head, list(zip(chart.rows, *columns, strict=True)))
    count = len(chart.columns if isinstance(chart, Heat) else chart.x)
    places = sorted({int(place) for place in np.linspace(0, count - 1, min(count, TABLE_ROWS)).round()})
    left_out = f"{len(places)} of {count} {chart.x_title}s; rounds.jsonl contains all."
    notes = [left_out] if len(places) < count else []
    if isinstance(chart, Heat):
        head = [chart.row_title, *(f"{chart.x_title} {chart.columns[place]}" for place in places)]
        named = zip(chart.rows, chart.values, strict=True)
        return Table(chart.title, head, [[row, *(cell(vs, p) for p in places)] for row, vs in named], notes)
    curves: dict[str, Sequence[Value]] = {}
    for line in chart.lines:
        curves[line.name] = line.y
        if line.low:
            curves |= {f"{line.name}, lowest tenth": line.low, f"{line.name}, highest tenth": line.high}
    rows = [[f"{chart.x[place]:g}", *(cell(y, place) for y in curves.values())] for place in places]
    return Table(chart.title, [chart.x_title, *curves], rows, notes)
