"""The charts of one run, and the charts and tables of all runs of a report together.

`page` puts them into sections.
"""

import warnings
from collections.abc import Iterator, Mapping

import numpy as np

from copfl.charts import Chart, Dots, Heat, Line, Lines, Value, percent, series_of, values_of
from copfl.experiment.analysis.gains import similar_first
from copfl.experiment.run_record import RunRecord
from copfl.measures.metrics import ACCURACY, MetricInfo, metrics_of
from copfl.report import contributions
from copfl.report.paired import Runs, paired
from copfl.stats import Numbers, mean_of_known, ranked
from copfl.tables import Table, capital

SCORES = {
    "weight": "The weight of each site in the round's mean",
    "gradient_score": "1 minus the cosine of a site's update and the server's step without it; "
    "high: a new direction",
    "prediction_score": "The loss on a site's data of the global model without it; "
    "high: the others do not cover its data",
}
BAND = "{} from the lowest to the highest tenth of the sites."
CONTRIBUTIONS = {  # in audit.json, see copfl.audit
    "leave_one_out_others": "leave-one-out: others",
    "leave_one_out_global": "leave-one-out: global",
    "shapley_global": "Shapley: global",
    "shapley_personal": "Shapley: personal",
}


MODELS = {  # by the suffix of the metric
    "": ("after training", "after local training"),
    "_before": ("before training", "with the new global model, before local training"),
    "_global": ("global model", "with the global model alone, as a new site would have it"),
}

# One colour and symbol for each model, in every chart.
MODEL_STYLES = {"": 0, "_before": 1, "_global": 2, "alone": 3}
SHARED_STYLE = 7


def clients(run: RunRecord, runs: Runs) -> Iterator[Chart]:
    """A dot per client and model, and one for local training if another run has it.

    Args:
        run: The run.
        runs: All runs of the page.
    """
    metric = run.primary
    names = [of for of in MODELS if run.has(metric.name + of)]
    local = next((other for other in runs if other.algorithm == "local"), run)
    if "" not in names or (run is local and len(runs) > 1):
        return
    series = [_model(of, MODELS[of][0], metric, run.final(metric.name + of)) for of in names]
    meanings = ", ".join(MODELS[of][1] for of in names[::-1])
    about = f"Each site at its {run.selection}: {meanings}."
    if run is not local and local.clients == run.clients and local.has(metric.name):
        series.append(_model("alone", "local training only", metric, local.final(metric.name)))
        about += " Local training only: the same site in the run of the algorithm local."
    title = f"{capital(metric.title)} per site"
    yield Dots("clients", title, about, run.client_titles, metric.label, series, metric.unit)


def gain(run: RunRecord) -> Iterator[Chart]:
    """Each client alone and with its personal model, in the order of the gain."""
    metric, gains = run.primary, run.known_gains
    if gains is None:
        return
    order = [int(n) for n in np.argsort(gains.gain) if not np.isnan(gains.gain[n])]
    models = {
        "": ("personal model, after training", gains.personal),
        "_global": ("global model", gains.global_model),
        "alone": ("alone", gains.alone),
    }
    series = [
        _model(of, name, metric, values[order])
        for of, (name, values) in models.items()
        if not np.isnan(values[order]).all()
    ]
    about = (
        f"Worst tenth of the sites: {metric.text(gains.worst)}{metric.unit}; standard deviation: "
        f"{metric.text(gains.spread)}. Alone: local training on the same batches, with the same optimizer. "
        "Sites are ordered by their gain. A single site's gain may be chance, as its test samples are few."
    )
    rows = [run.client_titles[n] for n in order]
    yield Dots("gain", "What each site gains", about, rows, metric.label, series, metric.unit)


def similar(run: RunRecord) -> Iterator[Chart]:
    """Every model on every client's samples, and the similarity of masks and labels, in one order."""
    if run.analysis is None or len(run.analysis.cross.clients) < 2:
        return
    clients, table, name, _ = run.analysis.cross
    metric = next(
        (metric_there for metric_there in metrics_of(run.environment) if metric_there.name == name), None
    )
    order = similar_first(table, metric or ACCURACY)
    names = [run.client_titles[clients[index]] for index in order]

    def heat(
        name: str, title: str, about: str, table: Numbers, of: tuple[str, str], unit: MetricInfo = ACCURACY
    ) -> Heat:
        rows = [shown(unit, row[order]) for row in table[order]]
        chart = Heat(name, title, about, names, names, rows, title, of[1], unit.unit, row_title=of[0])
        return chart._replace(low_is_bright=not unit.higher_is_better)

    # None: an older run with another primary metric, whose matrix is of accuracy or loss.
    if metric is not None:
        about = (
            f"The {metric.title} of the personal model of a row's site on the test samples of a column's "
            "site. Sites whose models do well on each other's samples are next to each other."
        )
        of = ("model of", "samples of")
        yield heat("cross", "Every model on every site", about, table, of, metric)
    if run.masks is not None and len(run.masks.overlap) > max(clients):
        about = "The parameters that are personal for both sites, of those that are personal for either."
        table = run.masks.overlap[np.ix_(clients, clients)]
        yield heat("mask-overlap", "Similarity of the masks", about, table, ("site", "site"))
    if run.label_counts is not None and run.label_counts.shape[1]:
        counts = run.label_counts[clients].astype(np.float64)
        fractions = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        table = np.minimum(fractions[:, None], fractions[None]).sum(2)
        about = "The common part of the two sites' distributions of labels, over their training samples."
        yield heat("label-overlap", "Similarity of the labels", about, table, ("site", "site"))


def scores(run: RunRecord) -> Iterator[Chart]:
    """Weights over time, and the two scores that determine them."""
    for metric, meaning in SCORES.items():
        values, what = run.metric_or_nan(metric), metric.replace("_", " ")
        known = values[~np.isnan(values)]
        if not len(known) or (metric == "weight" and np.ptp(known) < 1e-9):  # all clients have equal weights
            continue
        share, equal = (None, "")
        if metric == "weight":
            count = int(np.median((~np.isnan(values)).sum(1)))
            share, equal = 1 / count, f"mark: the equal weight 1/{count} = {1 / count:.3f}"
        yield Heat(
            name=metric,
            title=f"{what.capitalize()} by round",
            about=f"{meaning}. A stroke where a site did not take part.",
            rows=run.client_titles,
            columns=[str(number) for number in run.rounds],
            values=[values_of(row) for row in values.T],
            what=what,
            x_title="round",
            digits=3,
            centre=share,
            centre_title=equal,
        )


def benefit(run: RunRecord) -> Iterator[Chart]:
    """The benefit of each client to the others, of a run that measured it."""
    if (reported := contributions_of(run)) is not None:
        yield contributions.chart(reported)


def contributed(runs: Runs) -> list[Table]:
    """What each client contributes, a table per run that measured it."""
    of_runs = [(run, contributions_of(run)) for run in runs]
    tables = [(run, contributions.table(one)) for run, one in of_runs if one is not None]
    return [t._replace(title=f"{t.title}: {run.label}") if len(runs) > 1 else t for run, t in tables]


def contributions_of(run: RunRecord) -> contributions.Contributions | None:
    return contributions.contributions(
        run.records, run.client_titles, run.sizes[0], run.known_gains, run.primary
    )


def audit(run: RunRecord) -> Iterator[Chart]:
    """Each client's rank by weight and by contribution, and the contributions, of an audited run."""
    if run.audit is None:
        return
    metric = MetricInfo(**run.audit.get("metric", {}))
    mean, rows = run.audit["mean"], [str(name) for name in run.audit["clients"]]
    known = {label: mean["values"][key] for key, label in CONTRIBUTIONS.items() if key in mean["values"]}
    values = {label: np.array(row, np.float64) for label, row in known.items()}
    weight = np.array(mean["scores"]["weight"], np.float64)
    ranks = series_of({label: ranked(-row) for label, row in {"weight": weight, **values}.items()})
    about = (
        "Rank 1 is the highest weight or contribution. Where the dots of a row are far apart, the weight "
        f"does not reflect the contribution. Leave-one-out: the {metric.title} that the others, or the "
        "global model, gain from the site. Shapley: its Shapley value, summed over the rounds."
    )
    yield Dots("audit-ranks", "Rank by weight and by contribution", about, rows, "rank", ranks)
    series = series_of(values, metric.factor, first=1)
    about = f"In {metric.gains}. {' '.join(run.audit['remarks'])}"
    title, unit = "Contribution of each site", " points" if metric.fraction else ""
    yield Dots("audit-values", title, about, rows, f"gain{metric.points}", series, unit, zero=True)


def by_layer(run: RunRecord) -> Iterator[Chart]:
    """The personal fraction of each layer per client, and the fraction that all clients share."""
    masks = run.masks
    if masks is None:
        return
    rows = [f"{layer} ({size:,})" for layer, size in zip(masks.layers, masks.sizes, strict=True)]
    yield Heat(
        name="where",
        title="Personal parameters by layer",
        about=f"After round {masks.round}: the personal fraction of each layer, per site; layers are in "
        "the order of the model, with their numbers of parameters.",
        rows=rows,
        columns=[name.removeprefix("site ") for name in run.client_titles],
        values=[percent(row) for row in masks.fraction.T],
        what="personal parameters",
        x_title="site",
        unit=" %",
        row_title="layer",
    )
    series = [
        Line("personal parameters, mean over sites", percent(masks.fraction.mean(0)), symbol=0),
        Line("shared by all sites", percent(masks.shared_by_all), colour=SHARED_STYLE, symbol=SHARED_STYLE),
    ]
    about = f"After round {masks.round}. The rest is personal to some sites and shared by others."
    title = "Shared parameters by layer"
    yield Dots("layers", title, about, rows, "parameters, %", series, " %", row_title="layer")


def _model(of: str, name: str, metric: MetricInfo, values: Numbers) -> Line:
    """A dot per client of one kind of model, in its colour and with its symbol."""
    return Line(name, shown(metric, values), colour=MODEL_STYLES[of], symbol=MODEL_STYLES[of])


def shown(metric: MetricInfo, values: Numbers) -> list[Value]:
    return values_of(metric.factor * values)


# All runs together


def accuracy(runs: Runs) -> list[Chart]:
    """The primary metric of all models of one run, or a chart of several runs for each model."""
    metric = runs[0].primary
    word = capital(metric.title)
    if len(runs) == 1:
        names = [of for of in MODELS if runs[0].has(metric.name + of)]
        meanings = "; ".join(": ".join(MODELS[of]) for of in names[1:])
        about = f"Mean over sites, each tested on its own samples. {meanings.capitalize()}."
        chart = Lines("accuracy", f"{word} by round", about, [], metric.label, [], metric.unit)
        # All models are named, so that each has its colour where another was not evaluated.
        return _curves(runs, chart, {metric.name + of: MODELS[of][0] for of in MODELS})
    charts = []
    for of, (short, long) in MODELS.items():
        title = f"{word} {'of the ' * (of == '_global')}{short} by round"
        about = f"Mean over sites {long}, each tested on its own samples."
        chart = Lines(f"accuracy{of}", title, about, [], metric.label, [], metric.unit)
        charts += _curves(runs, chart, {metric.name + of: ""})
    return charts


def differences(runs: Runs) -> Iterator[Chart]:
    metric, rows = runs[0].primary, runs[0].client_names
    names = [run.label for run in runs]
    series = []
    for pair in paired(runs):
        run = runs[names.index(pair.label)]
        difference = metric.factor * (run.final(metric.name) - runs[0].final(metric.name))
        colour = names.index(pair.label)
        series.append(Line(pair.label, values_of(difference), colour=colour, symbol=colour))
    if series:
        first, unit = runs[0].label, " points" if metric.fraction else ""
        about = f"{capital(metric.title)} minus that of the same site under {first}, {runs[0].selection}."
        x_title = f"difference to {first}{',' * metric.fraction}{unit}"
        yield Dots("differences", "Paired differences", about, rows, x_title, series, unit, zero=True)


def personal(runs: Runs) -> list[Chart]:
    """How the masks grow, and what is shared."""
    about = "The fraction of a site's parameters that is personal, mean over sites."
    growth = Lines("masks", "Growth of the masks", about, [], "personal parameters, %", [], " %")
    of = {"personal_fraction": "of all parameters", "personal_fraction_of_moving": "of those that change"}
    about = (
        "Of a site's parameters, those that it shares, mean over sites; of the server's, those that "
        "this round averaged, and those that are personal to no site."
    )
    shared = Lines("shared", "Shared parameters", about, [], "parameters, %", [], " %")
    whose = {
        "shared": "a site's parameters",
        "averaged": "averaged this round",
        "shared_by_all": "shared by all",
    }
    return [*_curves(runs, growth, of), *_curves(runs, shared, whose)]


def cost(runs: Runs) -> list[Chart]:
    about = "The traffic of one site in a round, mean over sites; 1 kB is 1000 bytes."
    traffic = Lines("bytes", "Bytes by round", about, [], "kB per site", [], " kB")
    about = "The wall-clock time of each round, all sites included; the first round contains the warm-up."
    seconds = Lines("seconds", "Seconds by round", about, [], "seconds", [], " s", 3)
    ways = {"bytes_up": "to the server", "bytes_down": "to the site"}
    return [*_curves(runs, traffic, ways), *_curves(runs, seconds, {"seconds": "seconds"})]


def _curves(runs: Runs, chart: Lines, metrics: Mapping[str, str]) -> list[Chart]:
    """The chart with a line per run and metric, given with their labels; none where nothing was recorded.

    The lines of one run have a colour each; of several, each run has a colour and each metric a dash.
    """
    lines = []
    for number, run in enumerate(runs):
        for dash, (metric, label) in enumerate(metrics.items()):
            line = _line(run, metric, band=not dash and len(runs) < 5)
            if any(value is not None for value in line.y):
                several = f"{run.label}: {label}" if label else run.label
                name, colour = (label, dash) if len(runs) == 1 else (several, number)
                lines.append(line._replace(name=name, colour=colour, dash=dash))
    banded = sum(bool(line.low) for line in lines)  # draw.js draws several bands as bars
    band = BAND.format("The bars reach" if banded > 1 else "The band reaches")
    about = f"{chart.about} {band}" if banded else chart.about
    rounds = max((run.rounds for run in runs), key=len)
    return [chart._replace(about=about, x=rounds, lines=lines)] if lines else []


def _line(run: RunRecord, metric: str, band: bool) -> Line:
    """A metric by round; of the clients the mean, fractions in percent, with a band and the worst client."""
    if metric == "seconds":
        return Line(metric, run.seconds)
    if not run.has(metric):
        return Line(metric, percent(run.federation_metric(metric)))
    if metric.startswith("bytes"):
        return Line(metric, values_of(mean_of_known(run.metric_or_nan(metric), axis=1) / 1000))
    info = run.primary if metric.startswith(run.primary.name) else ACCURACY
    end, find = ("lowest", np.nanargmin) if info.higher_is_better else ("highest", np.nanargmax)
    remarks = []
    for row in run.metric_or_nan(metric):
        worst = None if np.isnan(row).all() else int(find(row))
        remarks.append(
            "" if worst is None else f"{end}: {run.client_titles[worst]}, {info.text(row[worst])}{info.unit}"
        )
    values = info.factor * run.metric_or_nan(metric)
    line = Line(metric, values_of(mean_of_known(values, axis=1)), remarks=remarks)
    if not band:
        return line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a round without an evaluation has no quantiles
        low, high = np.nanquantile(values, (0.1, 0.9), axis=1)
    return line._replace(low=values_of(low), high=values_of(high))


def data(runs: Runs) -> Iterator[Chart]:
    """Training samples of each class; runs with the same partition have one chart."""
    for number, run in enumerate(runs, 1):
        alike = [other.label for other in runs if other.partition.fingerprint == run.partition.fingerprint]
        if run.label_counts is None or run.label != alike[0]:
            continue
        common = len(alike) == len(runs)
        train, test = (
            f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
            for sizes in run.sizes
        )
        yield Heat(
            name="data" if common else f"data-{number}",
            title="Training samples by class" + ("" if common else f": {', '.join(alike)}"),
            about="The number of training samples of each class per site; a stroke where there are none. A "
            f"site has {train} training and {test} test samples.",
            rows=run.client_titles,
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
        alike = [other for other in runs if other.partition.fingerprint == run.partition.fingerprint]
        tested = [other for other in alike if other.analysis is not None and other.analysis.cross.per_class]
        if run.label_counts is None or run is not alike[0]:
            continue
        counts = run.label_counts
        rows = []
        for column, name in enumerate(run.environment["classes"]):
            right = [other.analysis.cross.per_class[column] for other in tested if other.analysis is not None]
            accuracies = [f"{100 * of_class / of:.1f} % of {of}" if of else "-" for of_class, of in right]
            of_class = counts[:, column]
            has_it, samples = f"{np.count_nonzero(of_class)} of {len(of_class)}", f"{int(of_class.sum()):,}"
            rows.append([str(name), has_it, samples, *accuracies])
        several = len(runs) > 1
        means = [f"accuracy{f', {other.label}' if several else ''}" for other in tested]
        note = "Accuracy of the personal models, each on all test samples of its own site; at most 40 sites."
        title = "Classes" + (f": {', '.join(o.label for o in alike)}" if len(alike) < len(runs) else "")
        head = ["class", "sites that have it", "training samples", *means]
        tables.append(Table(title, head, rows, [note] if tested else []))
    return tables
