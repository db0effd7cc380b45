"""How a result is held in Python: a few lines, a table of a notebook, a data frame, a picture.

The methods of `Result` that a notebook calls are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from copfl import charts
from copfl.charts import Line, Lines, values_of
from copfl.errors import UsageError, unknown
from copfl.experiment.answer import answer_of, cells_of
from copfl.experiment.result import Result
from copfl.measures.metrics import MetricInfo
from copfl.rivals.records import TITLES
from copfl.stats import Numbers, mean_of_known
from copfl.tables import Table, as_html, data_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is evaluated, in words, by the ending of its metric's name; the first is the client's model at the end.
STAGES = {"": "after local training", "_before": "before local training", "_global": "global model"}
MOST_ROWS = 30  # of the clients in a notebook
FRAMES = ("clients", "rounds")
PICTURES = ("gains", "rounds")


def lines(result: Result) -> list[str]:
    """What decides, in one to six lines."""
    said, metric = [str(result)], result.primary
    said.append(f"  {result.experiment.run.method_text}")
    if (answer := answer_of(result)) is not None:
        said.append(f"  {answer.headline}")
    if (gains := result.gains) is not None and np.isfinite(gains.gain).any():
        better, known = int((gains.gain > 0).sum()), int(np.isfinite(gains.gain).sum())
        said.append(
            f"  alone {_mean(metric, gains.alone)}; {better} of {known} sites gain from the federation"
        )
    if result.rivals is not None:
        title = TITLES[result.rivals.chosen]
        said.append(f"  {title} at each site alone {_mean(result.rivals.metric, result.rivals.best)}")
    if count := len(result.warnings):
        said.append(f"  {count} warning{'s' * (count > 1)}, see .warnings")
    return said


def _mean(metric: MetricInfo, values: Numbers) -> str:
    return f"{metric.text(float(mean_of_known(values)))}{metric.unit}"


def columns_of(result: Result) -> dict[str, list[Any]]:
    """A value of each client by column: its name, samples, and metrics of the model that it ends with."""
    e, gains = result.experiment, result.gains
    metrics = [metric.name for metric in e.task.metrics]
    recorded = {name for record in result.records for name in record["per_client"]}
    values = {f"{name}{end}": result.final(f"{name}{end}") for name in metrics for end in STAGES}
    numbers = {name: column for name, column in values.items() if name in recorded}
    numbers |= {} if gains is None else {"alone": gains.alone, "gain": gains.gain}
    if result.rivals is not None:
        numbers["rival"] = result.rivals.best
    partition = e.federation.partition
    sizes = {
        "train": [len(samples) for samples in partition.train],
        "test": [len(samples) for samples in partition.test],
    }
    return {
        "client": result.client_names,
        **sizes,
        **{name: column.tolist() for name, column in numbers.items()},
    }


def html(result: Result) -> str:
    """A table of the sites with their gain, its interval and the verdict, under the headline and `lines`."""
    columns, metrics = columns_of(result), {metric.name: metric for metric in result.experiment.task.metrics}
    answer = answer_of(result)
    columns = {"site" if name == "client" else name: values for name, values in columns.items()}
    if answer is not None:  # it has a gain of its own
        columns.pop("gain", None)

    def cell(name: str, value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        metric = metrics.get(name.removesuffix("_before").removesuffix("_global"), result.primary)
        return "" if np.isnan(value) else metric.text(value, sign="+" if name == "gain" else "")

    rows = [
        [cell(name, value) for name, value in zip(columns, row, strict=True)]
        for row in zip(*columns.values(), strict=True)
    ]
    head = list(columns)
    if answer is not None:
        head += ["gain", "95 % interval", "verdict"]
        rows = [[*row, *cells_of(answer, n)] for n, row in enumerate(rows)]
    title, *notes = lines(result)
    if answer is not None:
        title, notes = answer.headline, [title, *notes]
        notes = [note for note in notes if note.strip() != answer.headline]
        notes.append(f"gain: {answer.chart.x_title}")
    more = [f"and {len(rows) - MOST_ROWS} sites more"] if len(rows) > MOST_ROWS else []
    return as_html(Table(title, head, rows[:MOST_ROWS], [*more, *(note.strip() for note in notes)]))


def frame(result: Result, of: str) -> Any:
    """A pandas data frame with a row per client, or a row per round and client.

    Args:
        result: What is shown.
        of: "clients" or "rounds".
    """
    if of not in FRAMES:
        raise unknown("data frame", of, FRAMES)
    if of == "clients":
        return data_frame(columns_of(result))
    recorded = sorted({name for record in result.records for name in record["per_client"]})
    clients, rounds = result.client_names, [record["round"] for record in result.records]
    tables = {name: result.metric(name) for name in recorded}
    return data_frame(
        {
            "round": np.repeat(rounds, len(clients)).tolist(),
            "client": clients * len(rounds),
            **{name: table.ravel().tolist() for name, table in tables.items()},
        }
    )


def picture(result: Result, of: str) -> Figure:
    """Each site's gain with its interval, or the curves over the rounds.

    Args:
        result: What is drawn.
        of: "gains" or "rounds"; where nothing is known of the gains, the rounds are drawn.
    """
    if of not in PICTURES:
        raise unknown("picture", of, PICTURES)
    if not charts.available():
        raise UsageError(charts.MISSING)
    if of == "gains" and (answer := answer_of(result)) is not None:
        return charts.draw([[answer.chart]], answer.headline)
    metric = result.primary
    rounds = [float(record["round"]) for record in result.records]
    stages = {words: result.metric_or_nan(f"{metric.name}{end}") for end, words in STAGES.items()}
    shown = {words: table for words, table in stages.items() if np.isfinite(table).any()}
    curves = [
        Line(words, values_of(metric.factor * mean_of_known(table, axis=1)), colour=n, dash=n)
        for n, (words, table) in enumerate(shown.items())
    ]
    label = f"{metric.title}{', %' if metric.fraction else ''}"
    return charts.draw([[Lines("curves", "Mean over sites", "", rounds, label, curves)]], str(result))
