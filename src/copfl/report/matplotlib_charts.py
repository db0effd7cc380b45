"""Charts as PNG and SVG for papers. matplotlib is an extra, copfl[plots]."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copfl.errors import UsageError
from copfl.files import write_bytes
from copfl.report.chart import Chart, Dots, Heat, Lines, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "pictures need matplotlib, which is not installed; `pip install 'copfl[plots]'` brings it"
# Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A7A00")
DASHES = ("-", "--", ":", "-.")
SYMBOLS = ("o", "D", "x", "s", "^", "+", "*", "v")
TALLEST = 9.0  # inches


def write(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """The pictures, once they are there: a PNG and an SVG of each chart, called after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(MISSING)
    from matplotlib import rc_context

    paths = []
    # The same run gives the same bytes: no date, and names that do not change.
    with rc_context({"svg.hashsalt": "copfl", "svg.fonttype": "none", "font.size": 9}):
        for chart in charts:
            figure = draw(chart)
            for kind, about in (("png", {"Software": None}), ("svg", {"Date": None})):
                content = io.BytesIO()
                figure.savefig(content, format=kind, dpi=200, metadata=about)
                paths.append(folder / f"{chart.name}.{kind}")
                write_bytes(paths[-1], content.getvalue(), durable=False)
    return paths


def draw(chart: Chart) -> Figure:
    """The picture, known to no window and no global state."""
    from matplotlib.figure import Figure

    height = 3.4 if isinstance(chart, Lines) else min(TALLEST, 1.2 + 0.22 * len(chart.rows))
    figure = Figure(figsize=(6.4, max(height, 2.0)), layout="constrained")
    axes = figure.subplots()
    if isinstance(chart, Lines):
        _lines(axes, chart)
    elif isinstance(chart, Dots):
        _dots(axes, chart)
    else:
        bar = figure.colorbar(_heat(axes, chart), ax=axes)
        bar.set_label(f"{chart.what},{chart.unit}" if chart.unit else chart.what)
    if not isinstance(chart, Heat):
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _lines(axes: Axes, chart: Lines) -> None:
    for line in chart.lines:
        x, colour = list(chart.x)[: len(line.y)], COLOURS[line.colour % len(COLOURS)]
        seen = ~np.isnan(numbers(line.y))
        points: dict[str, Any] = {"marker": "o"} if seen.sum() < 2 else {}
        where = np.array(x, float)[seen]
        style = DASHES[line.dash % len(DASHES)]
        axes.plot(where, numbers(line.y)[seen], style, color=colour, label=line.name, linewidth=1.4, **points)
        if line.low:
            low, high = numbers(line.low)[seen], numbers(line.high)[seen]
            axes.fill_between(where, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.set(xlabel=chart.x_title, ylabel=chart.y_title)
    axes.grid(alpha=0.3)


def _dots(axes: Axes, chart: Dots) -> None:
    heights = np.arange(len(chart.rows))
    if chart.zero:
        axes.axvline(0, color="black", linewidth=0.8)
    for place, series in enumerate(chart.series):
        colour, symbol = COLOURS[series.colour % len(COLOURS)], SYMBOLS[place % len(SYMBOLS)]
        fill: Any = "none" if place else "full"  # open shapes, so that dots on the same spot are all seen
        axes.plot(
            numbers(series.y), heights, symbol, color=colour, label=series.name, markersize=5, fillstyle=fill
        )
    _rows(axes, chart.rows)
    axes.set(xlabel=chart.x_title, ylim=(len(chart.rows) - 0.5, -0.5))
    axes.grid(alpha=0.3, axis="x")


def _heat(axes: Axes, chart: Heat) -> Any:
    image = axes.imshow(
        np.array([numbers(row) for row in chart.values]), cmap="cividis", aspect="auto", interpolation="nearest",
        vmin=0 if chart.zero else None,
    )  # fmt: skip
    _rows(axes, chart.rows)
    every = max(1, -(-len(chart.columns) // 12))
    places = range(0, len(chart.columns), every)
    axes.set_xticks(places, [chart.columns[p] for p in places])
    axes.set(xlabel=chart.x_title)
    return image


def _rows(axes: Axes, rows: Sequence[str]) -> None:
    every = max(1, -(-len(rows) // 40))
    places = range(0, len(rows), every)
    axes.set_yticks(places, [rows[p] for p in places])


def numbers(values: Sequence[Value]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The values, nan where there is none."""
    return np.array([np.nan if v is None else v for v in values], np.float64)
