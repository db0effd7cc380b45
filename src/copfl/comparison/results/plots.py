"""Pictures of a comparison: curves, clients, heat map of a sweep. matplotlib is an extra, copfl[plots].

`compare` and `sweep` on the command line write them; in Python, `Comparison.plot` draws one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copfl import charts
from copfl.charts import Chart, Heat, Line, Lines, Swarm
from copfl.comparison.results.results import Record
from copfl.comparison.results.tables import Comparison
from copfl.comparison.rows.spaces import Grid
from copfl.errors import UsageError
from copfl.files import write_bytes
from copfl.measures.metrics import ACCURACY, MetricInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def axis(metric: MetricInfo) -> str:
    """The title of an axis, such as "accuracy after local training, %"."""
    return f"{metric.title} after local training{', %' if metric.fraction else ''}"


def write(comparison: Comparison, out: Path) -> list[Path]:
    """The paths of the pictures, PNG and SVG, once they are written; none where matplotlib is missing.

    Args:
        comparison: What is drawn.
        out: The folder.
    """
    if not charts.available():
        return []
    panels: dict[str, list[Chart | Swarm]] = {
        "curves": [curves(comparison)],
        "clients": [*clients(comparison)],
    }
    if len(comparison.over) == 2:
        panels["map"] = [heat_map(comparison)]
    paths = []
    for name, row in panels.items():
        for kind, content in charts.pictures([row], comparison.title).items():
            paths.append(out / f"{name}.{kind}")
            write_bytes(paths[-1], content)
    return paths


def picture(comparison: Comparison) -> "Figure":
    """The curves of all rows as a figure of matplotlib."""
    if not charts.available():
        raise UsageError(charts.MISSING)
    return charts.draw([[curves(comparison)]], comparison.title)


def curves(comparison: Comparison) -> Lines:
    """Personal accuracy by round: the mean over seeds, and a band of one standard deviation."""
    metric = comparison.metric
    lines = [curve(row.title, row.outcomes, metric, colour) for colour, row in enumerate(comparison.rows)]
    return Lines("curves", comparison.title, "", [], axis(metric), lines)


def curve(label: str, runs: Sequence[Record], metric: MetricInfo, colour: int) -> Line:
    """The mean over the runs of one row, and a band of one standard deviation.

    Args:
        label: Of the row.
        runs: One of each seed.
        metric: What is drawn.
        colour: The number of its colour.
    """
    values = [dict(zip(run.rounds, run.curves[metric.name], strict=True)) for run in runs]
    return charts.mean_curve(label, values, colour, metric.factor)


def clients(comparison: Comparison) -> list[Swarm]:
    """A dot per client and seed: its accuracy, and its gain over the reference if there is one."""
    labels, titles = [row.label for row in comparison.rows], [row.title for row in comparison.rows]
    metric = comparison.metric
    accuracy = [
        [metric.factor * np.array(run.clients[metric.name]) for run in row.outcomes]
        for row in comparison.rows
    ]
    panels = [Swarm(titles, axis(metric), _by_seed(comparison, accuracy), title="A dot per client and seed")]
    if comparison.reference is not None:
        base = accuracy[labels.index(comparison.reference)]
        gains = [[values - other for values, other in zip(row, base, strict=True)] for row in accuracy]
        x_title = f"difference to {comparison.reference}{', points' if metric.fraction else ''}"
        by_seed = _by_seed(comparison, gains)
        panels.append(Swarm(titles, x_title, by_seed, zero=True, title="The same, paired"))
    return panels


def _by_seed(comparison: Comparison, values: list[list[Any]]) -> dict[str, list[Any]]:
    seeds = enumerate(comparison.seeds)
    return {f"seed {seed}": [row[seed_index] for row in values] for seed_index, seed in seeds}


def heat_map(comparison: Comparison) -> Heat:
    """The mean accuracy of each cell of a sweep over two keys."""
    metric = comparison.metric
    means = [row.metrics()[metric.name].mean for row in comparison.rows]
    texts, shown = [metric.text(mean) for mean in means], [metric.factor * mean for mean in means]
    return heat("map", comparison.title, comparison.over, shown, texts)._replace(what=axis(metric))


def heat(name: str, title: str, grid: Grid, values: Sequence[float | None], texts: Sequence[str]) -> Heat:
    """The accuracies of all cells of a grid of two keys; the second varies fastest.

    Args:
        name: Of the chart, as the name of its file.
        title: For the reader.
        grid: The two settings with their values.
        values: Of each cell; None where there is none.
        texts: The same as they are shown.
    """
    (down, rows), (across, columns) = grid.items()
    starts = range(0, len(values), len(columns))
    return Heat(
        name=name,
        title=title,
        about="",
        rows=list(map(str, rows)),
        columns=list(map(str, columns)),
        values=[values[start : start + len(columns)] for start in starts],
        what=axis(ACCURACY),
        x_title=".".join(across),
        row_title=".".join(down),
        texts=[texts[start : start + len(columns)] for start in starts],
    )
