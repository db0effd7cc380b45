"""The charts of a report, out of what the runs tell."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from copfl.report.chart import Chart, Dots, Heat, Line, Lines, Value
from copfl.report.pairs import paired
from copfl.report.run_data import Masks, Numbers, RunData

ACCURACIES = {
    "accuracy": ("after training", "after local training"),
    "accuracy_before": ("before training", "right after the broadcast, before local training"),
    "accuracy_global": ("broadcast alone", "with the broadcast alone, as a newcomer would have it"),
}
SCORES = {
    "weight": ("Weights", "each client's share in the round's mean: who counts, and when", "share"),
    "gradient_score": (
        "Gradient part",
        "how far a client's update points away from the server's step without it: high means it says something new",
        "gradient score",
    ),
    "prediction_score": (
        "Prediction part",
        "the loss on a client's data of the server's model without it: high means the others cannot stand in for it",
        "prediction score",
    ),
}
BAND = "The band goes from the lowest to the highest tenth of the clients."


class Section(NamedTuple):
    """Charts that answer one question."""

    name: str  # the anchor
    short: str
    title: str
    charts: list[Chart]


def sections(stories: Sequence[RunData]) -> list[Section]:
    """Everything there is to see, in the order in which one asks; what no run recorded is left out."""
    found = [
        Section("accuracy", "Accuracy", "How accurate is it, and for whom?", accuracy(stories)),
        Section("contribution", "Contributions", "Who counts, when and why?", contribution(stories)),
        Section("audit", "Audit", "Is the weight deserved?", audit(stories)),
        Section("personal", "Personal parts", "What is personal, and where?", personal(stories)),
        Section("holdings", "Data", "Who holds which data?", holdings(stories)),
        Section("cost", "Cost", "What does it cost?", cost(stories)),
    ]
    return [section for section in found if section.charts]


def accuracy(stories: Sequence[RunData]) -> list[Chart]:
    """Curves, a dot per client, and with several runs what each client gains."""
    charts: list[Chart] = []
    curves = [(s, name) for name in ACCURACIES for s in stories if s.has(name)]
    if len(stories) == 1 and curves:
        lines = [
            _spread(stories[0], name, ACCURACIES[name][0], i, name == "accuracy")
            for i, (_, name) in enumerate(curves)
        ]
        what = "; ".join(f"{ACCURACIES[name][0]}: {ACCURACIES[name][1]}" for _, name in curves[1:])
        about = f"The mean over clients, each tested on its own samples. {what.capitalize()}. {BAND}"
        charts.append(
            Lines("accuracy", "Accuracy by round", about, stories[0].rounds, "accuracy, %", lines, " %")
        )
    else:
        for name, (short, long) in ACCURACIES.items():
            shown = [(place, s) for place, s in enumerate(stories) if s.has(name)]
            short = "of the broadcast alone" if name == "accuracy_global" else short
            lines = [_spread(s, name, s.label, place, len(stories) < 5) for place, s in shown]
            about = f"The mean over clients {long}, each tested on its own samples. {BAND if len(stories) < 5 else ''}"
            x = _rounds(stories)
            if lines:
                charts.append(Lines(name, f"Accuracy {short} by round", about, x, "accuracy, %", lines, " %"))
    local = next((s for s in stories if s.algorithm == "local"), None)
    for place, s in enumerate(stories):
        if s.has("accuracy") and (s is not local or len(stories) == 1):
            charts.append(_dots(s, local if local is not s else None, _name("clients", stories, place)))
    if len(pairs := paired(stories)):
        places = {story.label: place for place, story in enumerate(stories)}
        gains = [Line(pair.label, _values(pair.gain), colour=places[pair.label]) for pair in pairs]
        about = f"What each client has more, or less, than the same client under {stories[0].label}, at its last look."
        rows = [f"client {n}" for n in range(stories[0].clients)]
        x_title = f"difference to {stories[0].label}, points"
        charts.append(
            Dots("differences", "Paired differences", about, rows, x_title, gains, " points", zero=True)
        )
    return charts


def contribution(stories: Sequence[RunData]) -> list[Chart]:
    """Weights over time, and the two scores they are made of."""
    charts: list[Chart] = []
    for place, s in enumerate(stories):
        rows, columns = [f"client {n}" for n in range(s.clients)], [str(r) for r in s.rounds]
        for name, (title, meaning, what) in SCORES.items():
            if not s.has(name) or (name == "weight" and _constant(s.metric(name))):
                continue
            values = [_values(row) for row in s.metric(name).T]
            about = f"{meaning[0].upper()}{meaning[1:]}. A row per client; a gap where it took no part."
            anchor, title = _name(name, stories, place), _titled(f"{title} by round", stories, s)
            charts.append(Heat(anchor, title, about, rows, columns, values, what, "round", digits=3))
    return charts


WORTH = {
    "left_out_others": "left out: the others",
    "left_out_broadcast": "left out: broadcast",
    "shapley_broadcast": "Shapley: broadcast",
    "shapley_personal": "Shapley: personal",
}


def audit(stories: Sequence[RunData]) -> list[Chart]:
    """Each client's place by weight and by worth, and the worth itself; of runs that `copfl audit` has looked at."""
    charts: list[Chart] = []
    for place, s in enumerate(stories):
        if s.audit is None:
            continue
        mean, rows = s.audit["mean"], [str(name) for name in s.audit["clients"]]
        values = {WORTH[name]: mean["values"][name] for name in WORTH if name in mean["values"]}
        ranked = [
            Line(name, _places(row), colour=number)
            for number, (name, row) in enumerate({"weight": mean["scores"]["weight"], **values}.items())
        ]
        about = (
            "1 is the client with the most weight, and the one that is worth most. Where the dots of a row lie far "
            "apart, its weight says little of its worth. Left out: what the others, or the broadcast, gain by having "
            "the client. Shapley: its fair part of what the rounds gained."
        )
        title = _titled("Rank by weight, and by worth", stories, s)
        charts.append(Dots(_name("audit-ranks", stories, place), title, about, rows, "rank", ranked))
        gains = [
            Line(name, [None if v is None else 100 * v for v in row], colour=number + 1)
            for number, (name, row) in enumerate(values.items())
        ]
        about = f"In points of accuracy. {' '.join(s.audit['remarks'])}"
        title, name = _titled("What each client is worth", stories, s), _name("audit-worth", stories, place)
        charts.append(Dots(name, title, about, rows, "gain, points", gains, " points", zero=True))
    return charts


def _places(values: Sequence[Value]) -> list[Value]:
    """Each value's place, the highest 1; equal ones share the mean of theirs."""
    known = [v for v in values if v is not None]
    return [
        None if v is None else sum(o > v for o in known) + (sum(o == v for o in known) + 1) / 2
        for v in values
    ]


def personal(stories: Sequence[RunData]) -> list[Chart]:
    """How the masks grew, what is still shared, and in which layers each client personalises."""
    charts: list[Chart] = []
    grown = []
    for place, s in enumerate(stories):
        if s.has("personal_fraction"):
            grown.append(_spread(s, "personal_fraction", _of("of all parameters", stories, s), place, True))
        if s.has("personal_fraction_of_moving"):
            label = _of("of those that move", stories, s)
            grown.append(
                _spread(s, "personal_fraction_of_moving", label, place + (len(stories) == 1), False, dash=1)
            )
    if grown:
        about = f"The share of a client's parameters that is its own, as the mean over clients. {BAND}"
        charts.append(
            Lines("masks", "How the masks grew", about, _rounds(stories), "personal, %", grown, " %")
        )
    shared = []
    meanings = {
        "shared": "a client's parameters",
        "averaged": "averaged this round",
        "shared_by_all": "shared by all",
    }
    for place, s in enumerate(stories):
        for number, (name, meaning) in enumerate(meanings.items()):
            values = s.federation(name)
            if any(v is not None for v in values):
                line = [None if v is None else 100 * v for v in values]
                alone = len(stories) == 1
                shared.append(
                    Line(_of(meaning, stories, s), line, colour=number if alone else place, dash=number)
                )
    if shared:
        about = (
            "Of a client's parameters, those it still shares, as the mean over clients; of the server's, those that "
            "this round averaged; and those that no client holds as personal."
        )
        charts.append(
            Lines("shared", "What is still shared", about, _rounds(stories), "parameters, %", shared, " %")
        )
    for place, s in enumerate(stories):
        charts += _by_layer(stories, place, s.masks) if s.masks is not None else []
    return charts


def _by_layer(stories: Sequence[RunData], place: int, masks: Masks) -> list[Chart]:
    """Which layers each client has made its own, and what of them everybody shares."""
    s = stories[place]
    rows = [f"{layer} ({size:,})" for layer, size in zip(masks.layers, masks.sizes, strict=True)]
    clients = [str(n) for n in range(s.clients)]
    where = Heat(
        _name("where", stories, place),
        _titled("Where each client personalises", stories, s),
        f"After round {masks.round}: the personal share of each layer's parameters, client by client; the first on "
        "top, with its number of parameters.",
        rows,
        clients,
        [_values(100 * row) for row in masks.share.T],
        "personal",
        "client",
        " %",
        row_title="layer",
    )
    ends = [
        Line("personal, mean over clients", _values(100 * masks.share.mean(0)), colour=0),
        Line("shared by all clients", _values(100 * masks.common), colour=1),
    ]
    about = f"After round {masks.round}. What the two leave over is personal for some clients and shared by others."
    title, name = _titled("What each layer still shares", stories, s), _name("layers", stories, place)
    return [where, Dots(name, title, about, rows, "parameters, %", ends, " %", row_title="layer")]


def holdings(stories: Sequence[RunData]) -> list[Chart]:
    """Train samples of each class; runs with the same partition share one chart."""
    charts: list[Chart] = []
    seen: set[str] = set()
    for place, s in enumerate(stories):
        if s.held is None or s.partition in seen:
            continue
        seen.add(s.partition)
        alike = [other.label for other in stories if other.partition == s.partition]
        whose = "" if len(alike) == len(stories) else f" of {', '.join(alike)}"
        rows = [f"client {n}" for n in range(s.clients)]
        values = [[float(v) if v else None for v in row] for row in s.held.tolist()]
        about = (
            f"How many training samples of each class a client holds; empty where it holds none. {_sizes(s)}"
        )
        classes = [str(name) for name in s.environment["classes"]]
        name = _name("data", stories, place) if whose else "held"
        title = f"Training samples by class{whose}"
        charts.append(
            Heat(name, title, about, rows, classes, values, "samples", "class", digits=0, zero=True)
        )
    return charts


def cost(stories: Sequence[RunData]) -> list[Chart]:
    """Bytes and seconds of each round."""
    charts: list[Chart] = []
    bytes_, seconds = [], []
    for place, s in enumerate(stories):
        for number, (name, way) in enumerate(
            (("bytes_up", "to the server"), ("bytes_down", "to the client"))
        ):
            if s.has(name):
                values = _values(_mean(s.metric(name)) / 1000)
                alone = len(stories) == 1
                bytes_.append(
                    Line(_of(way, stories, s), values, colour=number if alone else place, dash=number)
                )
        if s.seconds:
            seconds.append(Line(_of("seconds", stories, s), list(s.seconds), colour=place))
    if bytes_:
        about = "What one client sends and receives in a round, as the mean over clients; 1 kB is 1000 bytes."
        x = _rounds(stories)
        charts.append(Lines("bytes", "Bytes by round", about, x, "kB per client", bytes_, " kB"))
    if seconds:
        about = "The clock's time for each round, all clients together; the first one warms up."
        charts.append(
            Lines("seconds", "Seconds by round", about, _rounds(stories), "seconds", seconds, " s", 3)
        )
    return charts


def _dots(s: RunData, local: RunData | None, name: str) -> Dots:
    rows = [f"client {n}" for n in range(s.clients)]
    series = [
        Line(ACCURACIES[figure][0], _values(100 * s.last(figure)), colour=place)
        for place, figure in enumerate(ACCURACIES)
        if s.has(figure)
    ]
    tried = ", ".join(long for figure, (_, long) in reversed(ACCURACIES.items()) if s.has(figure))
    about = f"Each client at its last look: {tried}."
    if local is not None and local.clients == s.clients and local.has("accuracy"):
        series.append(Line("local training only", _values(100 * local.last("accuracy")), colour=3))
        about += " Beside it, what the same client gets by training alone."
    return Dots(name, f"Client by client: {s.label}", about, rows, "accuracy, %", series, " %")


def _spread(s: RunData, name: str, label: str, colour: int, band: bool, dash: int = 0) -> Line:
    """The mean over clients in percent, with its band, and who is lowest."""
    values = 100 * s.metric(name)
    low = high = np.full(len(values), np.nan)
    remarks = []
    for row in values:
        known = ~np.isnan(row)
        worst = int(np.nanargmin(row)) if known.any() else -1
        remarks.append(f"lowest: client {worst}, {row[worst]:.1f} %" if known.any() else "")
    if band:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a round without a look has no quantiles
            low, high = np.nanquantile(values, (0.1, 0.9), axis=1) if len(values) else (low, high)
    edges: tuple[list[Value], list[Value]] = (_values(low), _values(high)) if band else ([], [])
    return Line(label, _values(_mean(values)), edges[0], edges[1], remarks, colour, dash)


def _mean(values: Numbers) -> Numbers:
    """The mean over clients, nan in rounds in which none was looked at."""
    known = ~np.isnan(values)
    count = known.sum(1)
    total = np.where(known, values, 0).sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _values(array: Numbers) -> list[Value]:
    return [None if np.isnan(v) else float(v) for v in array]


def _constant(values: Numbers) -> bool:
    """Whether every client has the same weight in all its rounds: then there is nothing to see."""
    known = values[~np.isnan(values)]
    return not len(known) or float(known.max() - known.min()) < 1e-9


def _rounds(stories: Sequence[RunData]) -> list[int]:
    return max((s.rounds for s in stories), key=len)


def _of(what: str, stories: Sequence[RunData], s: RunData) -> str:
    return what if len(stories) == 1 else f"{s.label}: {what}"


def _titled(title: str, stories: Sequence[RunData], s: RunData) -> str:
    return title if len(stories) == 1 else f"{title}: {s.label}"


def _name(name: str, stories: Sequence[RunData], place: int) -> str:
    """An anchor, the same in every report of the same runs."""
    plain = re.sub(r"[^a-z0-9]+", "-", stories[place].algorithm.lower()).strip("-")
    return name if len(stories) == 1 else f"{name}-{place + 1}-{plain}"


def _sizes(s: RunData) -> str:
    def span(sizes: list[int]) -> str:
        return f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"

    return f"In all {span(s.sizes[0])} training and {span(s.sizes[1])} test samples a client."
