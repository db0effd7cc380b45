"""The report of a comparison or a sweep, from the table.json in its folder.

`copfl report` on the folder of a comparison calls it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from copfl import foreign
from copfl.charts import Chart, Dots, Heat, Line, Lines, mean_curve, series_of, values_of
from copfl.errors import RunError, raised_as
from copfl.measures.metrics import ACCURACY, MetricInfo
from copfl.report.document import Document
from copfl.rivals.records import TITLES
from copfl.sections import Section
from copfl.tables import NONE, Table, capital, number, size

FILE = "table.json"
TILES = 8  # rows that have one
MODELS = {"": "after training", "_before": "before training", "_global": "global model"}
Row = Mapping[str, Any]


def is_comparison(folder: Path) -> bool:
    return (folder / FILE).is_file() and not (folder / "run.toml").exists()


def document_of(folder: Path) -> Document:
    path = folder / FILE
    damaged = f"cannot read {path} ({{}}); `copfl compare` or `copfl sweep` writes it again"
    with raised_as(RunError, damaged, OSError, *foreign.DAMAGE):
        content = foreign.read_json(foreign.inside(folder, path))
        metric = MetricInfo(**content["metrics"][0]) if "metrics" in content else ACCURACY
        return _document(content, metric)


def _document(content: Mapping[str, Any], metric: MetricInfo) -> Document:
    rows, seeds, reference = content["rows"], content["seeds"], content["reference"]
    compared = [row for row in rows if metric.name in row["differences"]]
    shares = [
        f"{label} {100 * np.mean(values):.0f} %" for label, values in content["share_that_gains"].items()
    ]
    accuracy, differences = _accuracy(content, metric), _differences(content, compared, metric)
    sections = [
        Section("accuracy", capital(metric.title), "How accurate are the sites' models?", accuracy),
        Section("difference", "Differences", "Which differences are distinguishable?", differences),
    ]
    return Document(
        title=content["title"],
        subtitle=f"{len(rows)} rows, {len(seeds)} seed{'s' * (len(seeds) > 1)}; {metric.in_unit}",
        conclusion=[
            *(_compared(compared, reference, len(seeds), metric) if compared else _best(rows, metric)),
            *_against_rivals(content, metric),
            *([f"Sites that are better than under local training: {', '.join(shares)}."] if shares else []),
            _cost(rows),
        ],
        tiles=[
            *(
                (row["label"], f"{metric.text(_mean(row, metric.name))}{metric.unit}", "")
                for row in rows[:TILES]
            ),
            *([(f"and {len(rows) - TILES} more", "", "in the table")] if len(rows) > TILES else []),
        ],
        tables=[
            _metrics(content, metric),
            _convergence(content, metric),
            *([_verdicts(compared, reference, metric)] if compared else []),
            *([_alone(content["rivals"])] if content.get("rivals") else []),
        ],
        notes=[f"Sites: {'; '.join(content['partition'])}.", *content["notes"]],
        facts=None,
        sections=[section for section in sections if section.charts],
    )


def _mean(row: Row, name: str, of: str = "mean") -> float:
    """The mean over seeds of a metric, or its "spread"; nan where there is none."""
    value = row[of].get(name)
    return np.nan if value is None else float(value)


# Words


def _compared(rows: list[Row], reference: str, seeds: int, metric: MetricInfo) -> list[str]:
    about = f"Mean {metric.title} compared with {reference}, the same site of the same seed under both"
    if seeds < 2:
        return [f"{about}: one seed says nothing about the next, so no difference is distinguishable."]
    texts = []
    known = ("higher", "lower", "not distinguishable")
    others = (row["differences"][metric.name]["verdict"] for row in rows)
    for verdict in dict.fromkeys((*known, *others)):
        of = [
            f"{row['label']} {_difference(row, metric)}"
            for row in rows
            if row["differences"][metric.name]["verdict"] == verdict
        ]
        if of:
            texts.append(f"{metric.verdict(verdict).capitalize()}: {', '.join(of)}.")
    how = f"in brackets the 95 % interval over sites and {seeds} seeds; verdicts hold for all rows together, by Holm"
    return [f"{about} ({how}). {' '.join(texts)}"]


def _against_rivals(content: Mapping[str, Any], metric: MetricInfo) -> list[str]:
    """Each row beside the best model that clients have alone; [] where there are no rivals."""
    rivals = content.get("rivals")
    if not rivals:
        return []
    texts = [
        f"{label} {_with_interval(gain, metric)}, {metric.verdict(gain['verdict'])}"
        for label, gain in rivals["differences"].items()
    ]
    title = TITLES[rivals["chosen"]]
    return [f"Compared with {title} that each site trains alone: {'; '.join(texts)}."]


def _difference(row: Row, metric: MetricInfo) -> str:
    """Such as "+2.1 [+0.4, +3.8]"."""
    return _with_interval(row["differences"][metric.name], metric)


def _with_interval(gain: Mapping[str, Any], metric: MetricInfo) -> str:
    bounds = [np.nan if end is None else end for end in gain["over_both"]]
    return f"{metric.text(gain['mean'], sign='+')} {metric.interval(*bounds)}"


def _best(rows: list[Row], metric: MetricInfo) -> list[str]:
    best = max(rows, key=lambda row: metric.score(_mean(row, metric.name)))
    text = f"{metric.text(_mean(best, metric.name))}{metric.unit}"
    return [f"Best mean {metric.title}: {best['label']}, {text}. It was chosen on test samples."]


def _cost(rows: list[Row]) -> str:
    texts = []
    for row in rows:
        up, down, seconds = (_mean(row, name) for name in ("bytes_up", "bytes_down", "seconds"))
        texts.append(f"{row['label']} {size(up)} up, {size(down)} down, {seconds:.2g} s")
    return f"Cost per site and round, and seconds of a round: {'; '.join(texts)}."


# Tables


def _alone(rivals: Mapping[str, Any]) -> Table:
    """The models that clients have alone, mean over clients and seeds."""
    metrics = [MetricInfo(**metric) for metric in rivals["metrics"]]
    rows = [
        [
            TITLES[name],
            *(metric.text(means[metric.name]) for metric in metrics),
            "best" * (name == rivals["chosen"]),
        ]
        for name, means in rivals["mean"].items()
    ]
    note = "Models of each site alone. best: by cross-validation within training rows."
    return Table("What each site has alone", ["", *(metric.label for metric in metrics), ""], rows, [note])


def _metrics(content: Mapping[str, Any], metric: MetricInfo) -> Table:
    names = {metric.name + of: title for of, title in MODELS.items()} | {"worst": "worst tenth"}
    cells = [
        [row["label"], *(metric.text(_mean(row, name), _mean(row, name, "spread")) for name in names)]
        for row in content["rows"]
    ]
    title = f"{capital(metric.in_unit)}: mean ± standard deviation over seeds"
    note = f"A value is the mean of {content['averaged']}"
    return Table(title, ["row", *names.values()], cells, [note])


def _convergence(content: Mapping[str, Any], metric: MetricInfo) -> Table:
    level = f"{metric.text(content['common_value'])}{metric.unit}"
    cells = [
        [
            row["label"],
            metric.text(_mean(row, metric.name)),
            metric.text(row["gained"], sign="+") + (", still rises" if row["rises"] else ""),
            number(row["rounds"], ".0f"),
            NONE if row["bytes"] is None else size(row["bytes"]),
        ]
        for row in content["rows"]
    ]
    head = ["row", "final", "gained in the last third", f"rounds to {level}", f"bytes to {level}"]
    note = f"{level} is the best {metric.title} that every row reaches; bytes are those of one site"
    return Table(f"Convergence: {metric.in_unit} after training", head, cells, [note])


def _verdicts(rows: list[Row], reference: str, metric: MetricInfo) -> Table:
    cells = [
        [row["label"], _difference(row, metric), metric.verdict(row["differences"][metric.name]["verdict"])]
        for row in rows
    ]
    title = f"Difference to {reference}{metric.points}, with its 95 % interval over sites and seeds"
    return Table(title, ["row", "difference", "verdict"], cells)


# Charts


def _accuracy(content: Mapping[str, Any], metric: MetricInfo) -> list[Chart]:
    rows = content["rows"]
    lines = []
    for colour, row in enumerate(rows):
        by_round = [
            dict(zip(of_seed["round"], of_seed[metric.name], strict=True)) for of_seed in row["curves"]
        ]
        lines.append(mean_curve(row["label"], by_round, colour, metric.factor))
    about = "Mean over sites and seeds. The bars are one standard deviation over seeds."
    curves = Lines("curves", f"{capital(metric.title)} by round", about, [], metric.label, lines, metric.unit)
    values = metric.factor * np.array([row["per_seed"][metric.name] for row in rows], np.float64)
    series = series_of(
        {f"seed {seed}": of_seed for seed, of_seed in zip(content["seeds"], values.T, strict=True)}
    )
    labels = [row["label"] for row in rows]
    about = f"The mean over the sites of each seed, of {content['averaged']}."
    dots = Dots("seeds", "Every seed", about, labels, metric.label, series, metric.unit, row_title="row")
    return [curves, dots, *_map(content, metric)]


def _differences(content: Mapping[str, Any], rows: list[Row], metric: MetricInfo) -> list[Chart]:
    """Each row's difference to the reference with its interval over clients and seeds."""
    if not rows or len(content["seeds"]) < 2:
        return []
    gains = [row["differences"][metric.name] for row in rows]
    ends = [np.array([gain["over_both"][end] for gain in gains], np.float64) for end in (0, 1)]
    low, high = (values_of(metric.factor * end) for end in ends)
    means = values_of(metric.factor * np.array([gain["mean"] for gain in gains], np.float64))
    series = [Line("difference", means, low, high, [metric.verdict(gain["verdict"]) for gain in gains])]
    about = (
        "An interval that contains zero: the difference is not distinguishable. 95 %, over sites and seeds."
    )
    unit = " points" if metric.fraction else ""
    x_title, labels = f"difference to {content['reference']}{metric.points}", [row["label"] for row in rows]
    title = f"Difference to {content['reference']}"
    return [Dots("differences", title, about, labels, x_title, series, unit, zero=True, row_title="row")]


def _map(content: Mapping[str, Any], metric: MetricInfo) -> Iterator[Chart]:
    """The cells of a sweep over two keys."""
    if len(content["over"]) == 2:
        (down, rows), (across, columns) = content["over"].items()
        means = metric.factor * np.array([_mean(row, metric.name) for row in content["rows"]])
        values = [values_of(row) for row in means.reshape(len(rows), len(columns))]
        names = list(map(str, rows)), list(map(str, columns))
        title, about = f"{down} and {across}", "The mean of each cell."
        yield Heat("map", title, about, *names, values, metric.title, across, metric.unit, row_title=down)
