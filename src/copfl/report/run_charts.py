"""The charts of one run, and the charts and tables of all runs of a report together.

`page` puts them into sections.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from copfl.charts import Chart, Dots, Heat, Line, Lines, Tree, Value, percent, series_of, values_of
from copfl.experiment.analysis.gains import similar_first
from copfl.experiment.survival import Observed
from copfl.measures.metrics import ACCURACY, MetricInfo, metrics_of
from copfl.report import contributions
from copfl.report.choice import choice_table
from copfl.report.rivals import means_table, note, sites_table
from copfl.report.run_data import MODELS, RunData, Runs, paired
from copfl.rivals.records import TITLES
from copfl.stats import Numbers, mean_of_known, ranked
from copfl.tables import Table, capital

SCORES = {
    "weight": "The weight of each client in the round's mean",
    "gradient_score": "1 minus the cosine of a client's update and the server's step without it; "
    "high: a new direction",
    "prediction_score": "The loss on a client's data of the global model without it; "
    "high: the others do not cover its data",
}
BAND = "{} from the lowest to the highest tenth of the clients."
CONTRIBUTIONS = {  # in audit.json, see copfl.audit
    "leave_one_out_others": "leave-one-out: others",
    "leave_one_out_global": "leave-one-out: global",
    "shapley_global": "Shapley: global",
    "shapley_personal": "Shapley: personal",
}


# One colour and symbol for each model, in every chart; samples of new clients have the next three.
MODEL_STYLES = {"": 0, "_before": 1, "_global": 2, "alone": 3}
SAMPLE_STYLES, SHARED_STYLE = 4, 7
RIVAL_STYLES = 1


def clients(run: RunData, runs: Runs) -> Iterator[Chart]:
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
    about = f"Each client at its {run.selection}: {meanings}."
    if run is not local and local.clients == run.clients and local.has(metric.name):
        series.append(_model("alone", "local training only", metric, local.final(metric.name)))
        about += " Local training only: the same client in the run of the algorithm local."
    title = f"{capital(metric.title)} per client"
    yield Dots("clients", title, about, run.client_names, metric.label, series, metric.unit)


def gain(run: RunData) -> Iterator[Chart]:
    """Each client alone and with its personal model, in the order of the gain."""
    metric, gains = run.primary, run.gains
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
        f"Worst tenth of the clients: {metric.text(gains.worst)}{metric.unit}; standard deviation: "
        f"{metric.text(gains.spread)}. Alone: local training on the same batches, with the same optimizer. "
        "Clients are ordered by their gain. A single client's gain may be chance, as its test samples are few."
    )
    rows = [run.client_names[n] for n in order]
    yield Dots("gain", "What each client gains", about, rows, metric.label, series, metric.unit)


def rivals(run: RunData) -> Iterator[Chart]:
    """Each client's model beside its constant answer and the models that it trains alone."""
    metric, of_sites = run.primary, run.rivals
    if of_sites is None or not run.has(metric.name):
        return
    personal = run.final(metric.name)
    order = [int(n) for n in np.argsort(of_sites.gain(personal)) if not np.isnan(of_sites.gain(personal)[n])]
    if not order:
        return
    series = [_model("", "personal model, after training", metric, personal[order])]
    alone = {TITLES[name]: values.tested[metric.name][order] for name, values in of_sites.values.items()}
    series += series_of(alone, metric.factor, first=RIVAL_STYLES)
    about = f"{note(of_sites)} Clients are ordered by their gain over {TITLES[of_sites.chosen]}."
    names = [run.client_names[n] for n in order]
    yield Dots("rivals", "What each client has alone", about, names, metric.label, series, metric.unit)


def rival_tables(runs: Runs) -> list[Table]:
    """The means of the rivals, and their values at each client."""
    shown = []
    for run in runs:
        if run.rivals is not None and run.has(run.primary.name):
            tables = (
                *([] if run.choice is None else [choice_table(run.choice)]),
                means_table(run.rivals),
                sites_table(run.rivals, run.final(run.primary.name), run.client_names),
            )
            shown += [
                t._replace(title=f"{t.title}: {run.label}" if len(runs) > 1 else t.title) for t in tables
            ]
    return shown


def new(run: RunData) -> Iterator[Chart]:
    """Clients that did not train: a dot for each number of their samples, and for training alone."""
    if run.new is None:
        return
    accuracies = {f"{name} sample{'s' * (name != '1')}": values for name, values in run.new.accuracy.items()}
    series = series_of(accuracies, run.primary.factor, first=SAMPLE_STYLES)
    series.append(_model("alone", "alone, all samples", run.primary, run.new.alone["all"]))
    about = (
        "Clients that did not train, fitted after the last round by the algorithm's own local update with 1, "
        "5 or all of their samples. Alone: the same without the federation."
    )
    names = [run.client_names[n] for n in run.new.clients]
    yield Dots("new", "New clients", about, names, run.primary.label, series, run.primary.unit)


def probabilities(run: RunData) -> Iterator[Chart]:
    """Accuracy by the probability of the answer, and each client's log loss beside class frequencies'."""
    calibration = run.probabilities
    if calibration is None or not calibration.calibration or not run.records:
        return
    if len(calibration.log_loss) != len(run.client_names):
        raise ValueError("probabilities.json has another number of clients")
    bins = calibration.calibration
    confidence = [100 * one.confidence for one in bins]
    about = (
        "Test samples of all clients by the probability that their models give to the answer. Where "
        "probabilities mean what they say, the curve is on the diagonal; below it, models are too certain."
    )
    lines = [
        Line(
            "models", [100 * one.accuracy for one in bins], remarks=[f"{one.samples} samples" for one in bins]
        ),
        Line("as they say", confidence, colour=1, dash=1),
    ]
    title, x_title = "Calibration", "probability of the answer, %"
    yield Lines("calibration", title, about, confidence, "accuracy, %", lines, " %", x_title=x_title)
    about = (
        "The log loss of each client's model on its test samples, lower is better. A model right of the "
        "frequencies of the classes in the client's training samples has probabilities that are worth nothing."
    )
    series = [
        Line("personal model", values_of(calibration.log_loss), symbol=0),
        Line("class frequencies", values_of(calibration.reference), colour=1, symbol=1),
    ]
    yield Dots("log-loss", "Log loss per client", about, run.client_names, "log loss", series, digits=3)


def survival(run: RunData) -> Iterator[Chart]:
    """Kaplan and Meier's curves by predicted risk and per client, the calibration, and each client's Brier score."""
    found = run.survival
    if found is None or not run.records:
        return
    if len(found.brier) != len(run.client_names):
        raise ValueError("survival.json has another number of clients")
    if curves := [one for one in found.thirds if one.times]:
        about = (
            "Test samples of all clients without an event, by Kaplan and Meier, in thirds by the risk that each "
            "client's model predicts among its own; the bands are 95 % intervals. Where the risk orders the events, "
            "the curves are apart."
        )
        end = max(one.times[-1] for one in curves)
        lines = [_stairs(one, end, place) for place, one in enumerate(curves)]
        title, x_title = "Survival by predicted risk", "time"
        x = sorted({time for line in lines for time in line.x})
        yield Lines("kaplan-meier", title, about, x, "without an event, %", lines, " %", x_title=x_title)
    if curves := [one for one in found.sites if one.times]:
        some = f"the {len(curves)} largest clients" if len(run.client_names) > len(curves) else "each client"
        about = (
            f"All samples of {some} without an event, by Kaplan and Meier. Where the curves are apart, the "
            "clients' hazards differ, whatever the model; each client has a baseline hazard of its own."
        )
        end = max(one.times[-1] for one in curves)
        lines = [
            _stairs(one._replace(name=run.client_names[int(one.name)]), end, place)._replace(low=(), high=())
            for place, one in enumerate(curves)
        ]
        x = sorted({time for line in lines for time in line.x})
        title, x_title = "Survival per client", "time"
        yield Lines(
            "kaplan-meier-clients", title, about, x, "without an event, %", lines, " %", x_title=x_title
        )
    if (calibration := found.calibration) is not None:
        about = (
            "Test samples of all clients in groups by the probability of an event that each client's model predicts "
            f"by the time {calibration.horizon:g}, the median time of the training samples' events. Observed is Kaplan "
            "and Meier's share with its 95 % interval. Where probabilities mean what they say, the curve is on the "
            f"diagonal; the mean distance is {100 * calibration.error:.1f} points."
        )
        predicted, observed, low, high = (
            [100 * value for value in column] for column in list(zip(*calibration.groups, strict=True))[1:]
        )
        remarks = [f"{group.samples} samples" for group in calibration.groups]
        lines = [
            Line("models", observed, low, high, remarks),
            Line("as they say", predicted, colour=1, dash=1),
        ]
        title, x_title = "Calibration at a horizon", "predicted probability of the event, %"
        yield Lines(
            "calibration-horizon", title, about, predicted, "observed, %", lines, " %", x_title=x_title
        )
    if np.isfinite(found.brier).any():
        about = (
            "The integrated Brier score of each client's model on its test samples, lower is better. A model right of "
            "Kaplan and Meier's curve of the client's training samples, which is the same for all, has probabilities "
            "that are worth nothing."
        )
        series = [
            Line("personal model", values_of(found.brier), symbol=0),
            Line("Kaplan-Meier", values_of(found.reference), colour=1, symbol=1),
        ]
        yield Dots(
            "brier", "Brier score per client", about, run.client_names, "Brier score", series, digits=3
        )


def _stairs(one: Observed, end: float, place: int) -> Line:
    """The curve with both ends of every step, in %."""

    def both(values: Sequence[float]) -> list[float]:
        """From the values after each time, those before and after it, from all at the start to the end."""
        steps = [100.0, *(100 * value for value in values)]
        return [value for value in steps for _ in range(2)]

    x = [0.0, *(time for time in one.times for _ in range(2)), end]
    y, low, high = (both(values) for values in (one.survival, one.low, one.high))
    return Line(f"{one.name}, {one.samples} samples", y, low, high, colour=place, x=x)


def similar(run: RunData) -> Iterator[Chart]:
    """Every model on every client's samples, and the similarity of masks and labels, in one order."""
    if run.analysis is None or len(run.analysis.cross.clients) < 2:
        return
    clients, table, name, _ = run.analysis.cross
    metric = next(
        (metric_there for metric_there in metrics_of(run.environment) if metric_there.name == name), None
    )
    order = similar_first(table, metric or ACCURACY)
    names = [run.client_names[clients[index]] for index in order]

    def heat(
        name: str, title: str, about: str, table: Numbers, of: tuple[str, str], unit: MetricInfo = ACCURACY
    ) -> Heat:
        rows = [shown(unit, row[order]) for row in table[order]]
        chart = Heat(name, title, about, names, names, rows, title, of[1], unit.unit, row_title=of[0])
        return chart._replace(low_is_bright=not unit.higher_is_better)

    # None: an older run with another primary metric, whose matrix is of accuracy or loss.
    if metric is not None:
        about = (
            f"The {metric.title} of the personal model of a row's client on the test samples of a column's "
            "client. Clients whose models do well on each other's samples are next to each other."
        )
        of = ("model of", "samples of")
        yield heat("cross", "Every model on every client", about, table, of, metric)
    if run.masks is not None and len(run.masks.overlap) > max(clients):
        about = "The parameters that are personal for both clients, of those that are personal for either."
        table = run.masks.overlap[np.ix_(clients, clients)]
        yield heat("mask-overlap", "Similarity of the masks", about, table, ("client", "client"))
    if run.label_counts is not None and run.label_counts.shape[1]:
        counts = run.label_counts[clients].astype(np.float64)
        fractions = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        table = np.minimum(fractions[:, None], fractions[None]).sum(2)
        about = "The common part of the two clients' distributions of labels, over their training samples."
        yield heat("label-overlap", "Similarity of the labels", about, table, ("client", "client"))


def scores(run: RunData) -> Iterator[Chart]:
    """Weights over time, and the two scores that determine them."""
    for metric, meaning in SCORES.items():
        values, what = run.metric(metric), metric.replace("_", " ")
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
            about=f"{meaning}. A stroke where a client did not take part.",
            rows=run.client_names,
            columns=[str(number) for number in run.rounds],
            values=[values_of(row) for row in values.T],
            what=what,
            x_title="round",
            digits=3,
            centre=share,
            centre_title=equal,
        )


def benefit(run: RunData) -> Iterator[Chart]:
    """The benefit of each client to the others, of a run that measured it."""
    if (reported := contributions_of(run)) is not None:
        yield contributions.chart(reported)


def contributed(runs: Runs) -> list[Table]:
    """What each client contributes, a table per run that measured it."""
    of_runs = [(run, contributions_of(run)) for run in runs]
    tables = [(run, contributions.table(one)) for run, one in of_runs if one is not None]
    return [t._replace(title=f"{t.title}: {run.label}") if len(runs) > 1 else t for run, t in tables]


def contributions_of(run: RunData) -> contributions.Contributions | None:
    return contributions.contributions(run.records, run.client_names, run.sizes[0], run.gains, run.primary)


def audit(run: RunData) -> Iterator[Chart]:
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
        "global model, gain from the client. Shapley: its Shapley value, summed over the rounds."
    )
    yield Dots("audit-ranks", "Rank by weight and by contribution", about, rows, "rank", ranks)
    series = series_of(values, metric.factor, first=1)
    about = f"In {metric.gains}. {' '.join(run.audit['remarks'])}"
    title, unit = "Contribution of each client", " points" if metric.fraction else ""
    yield Dots("audit-values", title, about, rows, f"gain{metric.points}", series, unit, zero=True)


def by_layer(run: RunData) -> Iterator[Chart]:
    """The personal fraction of each layer per client, and the fraction that all clients share."""
    masks = run.masks
    if masks is None:
        return
    rows = [f"{layer} ({size:,})" for layer, size in zip(masks.layers, masks.sizes, strict=True)]
    yield Heat(
        name="where",
        title="Personal parameters by layer",
        about=f"After round {masks.round}: the personal fraction of each layer, per client; layers are in "
        "the order of the model, with their numbers of parameters.",
        rows=rows,
        columns=[name.removeprefix("client ") for name in run.client_names],
        values=[percent(row) for row in masks.fraction.T],
        what="personal parameters",
        x_title="client",
        unit=" %",
        row_title="layer",
    )
    series = [
        Line("personal parameters, mean over clients", percent(masks.fraction.mean(0)), symbol=0),
        Line("shared by all clients", percent(masks.shared_by_all), colour=SHARED_STYLE, symbol=SHARED_STYLE),
    ]
    about = f"After round {masks.round}. The rest is personal to some clients and shared by others."
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
        about = f"Mean over clients, each tested on its own samples. {meanings.capitalize()}."
        chart = Lines("accuracy", f"{word} by round", about, [], metric.label, [], metric.unit)
        # All models are named, so that each has its colour where another was not evaluated.
        return _curves(runs, chart, {metric.name + of: MODELS[of][0] for of in MODELS})
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
        difference = metric.factor * (run.final(metric.name) - runs[0].final(metric.name))
        colour = names.index(pair.label)
        series.append(Line(pair.label, values_of(difference), colour=colour, symbol=colour))
    if series:
        first, unit = runs[0].label, " points" if metric.fraction else ""
        about = f"{capital(metric.title)} minus that of the same client under {first}, {runs[0].selection}."
        x_title = f"difference to {first}{',' * metric.fraction}{unit}"
        yield Dots("differences", "Paired differences", about, rows, x_title, series, unit, zero=True)


def personal(runs: Runs) -> list[Chart]:
    """How the masks grow, and what is shared."""
    about = "The fraction of a client's parameters that is personal, mean over clients."
    growth = Lines("masks", "Growth of the masks", about, [], "personal parameters, %", [], " %")
    of = {"personal_fraction": "of all parameters", "personal_fraction_of_moving": "of those that change"}
    about = (
        "Of a client's parameters, those that it shares, mean over clients; of the server's, those that "
        "this round averaged, and those that are personal to no client."
    )
    shared = Lines("shared", "Shared parameters", about, [], "parameters, %", [], " %")
    whose = {
        "shared": "a client's parameters",
        "averaged": "averaged this round",
        "shared_by_all": "shared by all",
    }
    return [*_curves(runs, growth, of), *_curves(runs, shared, whose)]


def cost(runs: Runs) -> list[Chart]:
    about = "The traffic of one client in a round, mean over clients; 1 kB is 1000 bytes."
    traffic = Lines("bytes", "Bytes by round", about, [], "kB per client", [], " kB")
    about = "The wall-clock time of each round, all clients included; the first round contains the warm-up."
    seconds = Lines("seconds", "Seconds by round", about, [], "seconds", [], " s", 3)
    ways = {"bytes_up": "to the server", "bytes_down": "to the client"}
    return [*_curves(runs, traffic, ways), *_curves(runs, seconds, {"seconds": "seconds"})]


def trees(run: RunData) -> Iterator[Chart]:
    """Which columns count, how the answer depends on the first ones, and the first tree."""
    found = run.trees
    if found is None or not run.records:
        return
    about = (
        "Gain: of the splits of the shared trees, as a part of all gains. Shuffled: by how much the loss of a site's "
        "own test rows grows when the column is shuffled among them, mean over sites."
    )
    names = [one.column for one in found.importance]
    gain = Dots(
        "tree-gain", "Importance of the columns: gain", about, names, "part of all gains, %", [], " %"
    )
    growth = Dots(
        "tree-shuffled", "Importance of the columns: shuffled", about, names, "growth of the loss", []
    )
    yield gain._replace(
        series=[Line("gain", percent([one.gain for one in found.importance]))], zero=True, row_title="column"
    )
    if np.isfinite([one.permuted for one in found.importance]).any():
        series = [Line("shuffled", values_of([one.permuted for one in found.importance]))]
        yield growth._replace(series=series, zero=True, row_title="column", digits=4)
    about = "The mean answer for all test rows, each by its site's model, if the column had this value in all of them."
    for place, one in enumerate(found.dependence, 1):
        name, title = f"tree-dependence-{place}", f"Dependence on {one.column}"
        lines = [Line(of, values_of(y), colour=n, dash=n % 4) for n, (of, y) in enumerate(one.answers)]
        if one.is_number:
            x = [float(value) for value in one.values]
            yield Lines(name, title, about, x, "mean answer", lines, digits=3, x_title=one.column)
        else:
            yield Dots(
                name, title, about, list(one.values), "mean answer", lines, digits=3, row_title=one.column
            )
    if found.first:
        about = (
            "A row goes to the left where the answer is yes. A leaf adds its number to a value, to the log odds, or to "
            "the score of the first of several classes. Below a question with … are further ones."
        )
        labels, parents, levels, places = zip(*found.first, strict=True)
        yield Tree("first-tree", "The first tree", about, labels, parents, levels, places)


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
        worst = None if np.isnan(row).all() else int(find(row))
        remarks.append(
            "" if worst is None else f"{end}: {run.client_names[worst]}, {info.text(row[worst])}{info.unit}"
        )
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
    for number, run in enumerate(runs, 1):
        alike = [other.label for other in runs if other.partition == run.partition]
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
        for column, name in enumerate(run.environment["classes"]):
            right = [other.analysis.cross.per_class[column] for other in tested if other.analysis is not None]
            accuracies = [f"{100 * of_class / of:.1f} % of {of}" if of else "-" for of_class, of in right]
            of_class = counts[:, column]
            has_it, samples = f"{np.count_nonzero(of_class)} of {len(of_class)}", f"{int(of_class.sum()):,}"
            rows.append([str(name), has_it, samples, *accuracies])
        several = len(runs) > 1
        means = [f"accuracy{f', {other.label}' if several else ''}" for other in tested]
        note = (
            "Accuracy of the personal models, each on all test samples of its own client; at most 40 clients."
        )
        title = "Classes" + (f": {', '.join(o.label for o in alike)}" if len(alike) < len(runs) else "")
        head = ["class", "clients that have it", "training samples", *means]
        tables.append(Table(title, head, rows, [note] if tested else []))
    return tables
