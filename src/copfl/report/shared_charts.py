"""The charts and tables of all runs of a report together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from copfl.charts import Chart, Dots, Heat, Line, Lines, percent, values_of
from copfl.core.metrics import ACCURACY
from copfl.report.run_data import MODELS, RunData, Runs, paired
from copfl.stats import mean_of_known
from copfl.tables import Table, capital

BAND = "{} from the lowest to the highest tenth of the clients."


def accuracy(runs: Runs) -> list[Chart]:
    """The primary metric of all models of one run, or a chart of several runs for each model."""
    metric = runs[0].primary
    word = capital(metric.title)
    if len(runs) == 1:
        names = [of for of in MODELS if runs[0].has(metric.name + of)]
        meanings = "; ".join(": ".join(MODELS[of]) for of in names[1:])
        about = f"Mean over clients, each tested on its own samples. {meanings.capitalize()}."
        chart = Lines("accuracy", f"{word} by round", about, [], metric.label, [], metric.unit)
        return _curves(runs, chart, {metric.name + of: MODELS[of][0] for of in names})
    charts = []
    for of, (short, long) in MODELS.items():
        title = f"{word} {'of the ' * (of == '_global')}{short} by round"
        about = f"Mean over clients {long}, each tested on its own samples."
        chart = Lines(f"accuracy{of}", title, about, [], metric.label, [], metric.unit)
        charts += _curves(runs, chart, {metric.name + of: ""})
    return charts


def differences(runs: Runs) -> Iterator[Chart]:
    metric, rows = runs[0].primary, runs[0].client_names
    names = [run.label for run in runs]
    series = []
    for pair in paired(runs):
        run = runs[names.index(pair.label)]
        difference = metric.factor * (run.last(metric.name) - runs[0].last(metric.name))
        series.append(Line(pair.label, values_of(difference), colour=names.index(pair.label)))
    if series:
        unit = "points" if metric.fraction else ""
        about = (
            f"{capital(metric.title)} minus that of the same client under {runs[0].label}, last evaluation."
        )
        x_title = ", ".join(filter(None, (f"difference to {runs[0].label}", unit)))
        unit = f" {unit}" if unit else ""
        yield Dots("differences", "Paired differences", about, rows, x_title, series, unit, zero=True)


def masks(runs: Runs) -> list[Chart]:
    about = "The fraction of a client's parameters that is personal, mean over clients."
    chart = Lines("masks", "Growth of the masks", about, [], "personal, %", [], " %")
    metrics = {
        "personal_fraction": "of all parameters",
        "personal_fraction_of_moving": "of those that change",
    }
    return _curves(runs, chart, metrics)


def shared(runs: Runs) -> list[Chart]:
    about = (
        "Of a client's parameters, those that it shares, mean over clients; of the server's, those that "
        "this round averaged, and those that are personal to no client."
    )
    chart = Lines("shared", "Shared parameters", about, [], "parameters, %", [], " %")
    metrics = {
        "shared": "a client's parameters",
        "averaged": "averaged this round",
        "shared_by_all": "shared by all",
    }
    return _curves(runs, chart, metrics)


def cost(runs: Runs) -> list[Chart]:
    about = "The traffic of one client in a round, mean over clients; 1 kB is 1000 bytes."
    traffic = Lines("bytes", "Bytes by round", about, [], "kB per client", [], " kB")
    about = "The wall-clock time of each round, all clients included; the first round contains the warm-up."
    seconds = Lines("seconds", "Seconds by round", about, [], "seconds", [], " s", 3)
    ways = {"bytes_up": "to the server", "bytes_down": "to the client"}
    return [*_curves(runs, traffic, ways), *_curves(runs, seconds, {"seconds": "seconds"})]


def _curves(runs: Runs, chart: Lines, metrics: Mapping[str, str]) -> list[Chart]:
    """The chart with a line per run and metric, given with their labels; none where nothing was recorded.

    The lines of one run have a colour each; of several, each run has a colour and each metric a dash.
    """
    lines = []
    for place, run in enumerate(runs):
        for dash, (metric, label) in enumerate(metrics.items()):
            line = _line(run, metric, band=not dash and len(runs) < 5)
            if any(value is not None for value in line.y):
                several = f"{run.label}: {label}" if label else run.label
                name, colour = (label, dash) if len(runs) == 1 else (several, place)
                lines.append(line._replace(name=name, colour=colour, dash=dash))
    banded = sum(bool(line.low) for line in lines)  # draw.js draws several bands as bars
    band = BAND.format("The bars reach" if banded > 1 else "The band reaches")
    about = f"{chart.about} {band}" if banded else chart.about
    rounds = max((run.rounds for run in runs), key=len)
    return [chart._replace(about=about, x=rounds, lines=lines)] if lines else []


def _line(run: RunData, metric: str, band: bool) -> Line:
    """A metric by round; of the clients the mean, fractions in percent, with a band and the worst client."""
    if metric == "seconds":
        return Line(metric, run.seconds)
    if not run.has(metric):
        return Line(metric, percent(run.federation(metric)))
    if metric.startswith("bytes"):
        return Line(metric, values_of(mean_of_known(run.metric(metric), axis=1) / 1000))
    info = run.primary if metric.startswith(run.primary.name) else ACCURACY
    end, find = ("lowest", np.nanargmin) if info.higher_is_better else ("highest", np.nanargmax)
    remarks = []
    for row in run.metric(metric):
        worst = -1 if np.isnan(row).all() else int(find(row))
        shown = "" if worst < 0 else f"{end}: client {worst}, {info.text(row[worst])}{info.unit}"
        remarks.append(shown)
    values = info.factor * run.metric(metric)
    line = Line(metric, values_of(mean_of_known(values, axis=1)), remarks=remarks)
    if not band:
        return line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a round without an evaluation has no quantiles
        low, high = np.nanquantile(values, (0.1, 0.9), axis=1)
    return line._replace(low=values_of(low), high=values_of(high))


def data(runs: Runs) -> Iterator[Chart]:
    """Training samples of each class; runs with the same partition have one chart."""
    for place, run in enumerate(runs, 1):
        alike = [other.label for other in runs if other.partition == run.partition]
        if run.label_counts is None or run.label != alike[0]:
            continue
        common = len(alike) == len(runs)
        train, test = (
            f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
            for sizes in run.sizes
        )
        yield Heat(
            name="data" if common else f"data-{place}",
            title="Training samples by class" + ("" if common else f": {', '.join(alike)}"),
            about="The number of training samples of each class per client; a stroke where there are none. A "
            f"client has {train} training and {test} test samples.",
            rows=run.client_names,
            columns=[str(name) for name in run.environment["classes"]],
            values=[[float(count) if count else None for count in row] for row in run.label_counts.tolist()],
            what="samples",
            x_title="class",
            digits=0,
            zero=True,
        )


def per_class(runs: Runs) -> list[Table]:
    """Of each class: the clients that have it, its samples, and the accuracy of the personal models on it."""
    tables = []
    for run in runs:
        alike = [other for other in runs if other.partition == run.partition]
        tested = [other for other in alike if other.analysis is not None and other.analysis.cross.per_class]
        if run.label_counts is None or run is not alike[0]:
            continue
        counts = run.label_counts
        rows = []
        for place, name in enumerate(run.environment["classes"]):
            right = [other.analysis.cross.per_class[place] for other in tested if other.analysis is not None]
            accuracies = [f"{100 * own / of:.1f} % of {of}" if of else "-" for own, of in right]
            rows.append([str(name), *_counted(counts[:, place]), *accuracies])
        several = len(runs) > 1
        means = [f"accuracy{f', {other.label}' if several else ''}" for other in tested]
        note = "Accuracy of the personal models, each on test samples of its own client, at most 100."
        title = "Classes" + (f": {', '.join(o.label for o in alike)}" if len(alike) < len(runs) else "")
        head = ["class", "clients that have it", "training samples", *means]
        tables.append(Table(title, head, rows, [note] if tested else []))
    return tables


def _counted(samples: NDArray[np.int64]) -> tuple[str, str]:
    """How many clients have samples, and how many samples these are."""
    return f"{np.count_nonzero(samples)} of {len(samples)}", f"{int(samples.sum()):,}"
