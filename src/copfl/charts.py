"""Charts as data. matplotlib draws them as pictures; the HTML page draws them itself.

A chart contains numbers, words and the places of its colours, dashes and symbols, and no drawing library.
"""

from __future__ import annotations

import importlib.util
import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copfl.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

Value = float | None  # None: not measured
Figure = dict[str, Any]  # for report/templates/draw.js

MOST_INCHES = 100.0  # of a picture's width or height: matplotlib draws at most 65,536 points, 200 to an inch
MOST_ROWS = 20  # of a chart of gains; of more sites the middle is folded
MISSING = "pictures need matplotlib, which is not installed; `pip install 'copfl[plots]'` installs it"
# Okabe and Ito's colours, which colour-blind people can distinguish. page.css has them as var(--c0) to
# var(--c7), in a variant for light and one for dark.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A7A00")
DASHES = ("-", "--", ":", "-.")
SYMBOLS = "oDxs^+*v"


class Line(NamedTuple):
    """A curve or a series of dots; a band around it and a remark on each point where there are any."""

    name: str
    y: Sequence[Value]
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()
    remarks: Sequence[str] = ()
    colour: int = 0
    dash: int = 0
    symbol: int | None = None  # of dots; None: that of its place among the series
    x: Sequence[float] = ()  # of a curve; () for the x of its chart


class Lines(NamedTuple):
    """Curves over the rounds."""

    name: str  # one word: the anchor on the page and the name of the picture's file
    title: str
    about: str  # what the chart shows, in a sentence or two
    x: Sequence[float]
    y_title: str
    lines: Sequence[Line]
    unit: str = ""
    digits: int = 1
    x_title: str = "round"


class Dots(NamedTuple):
    """A row per client or layer with a dot per series; beside each other in a picture, with the same rows."""

    name: str
    title: str
    about: str
    rows: Sequence[str]
    x_title: str
    series: Sequence[Line]  # y is a value per row
    unit: str = ""
    digits: int = 1
    zero: bool = False  # whether a line marks zero
    row_title: str = "site"


class Heat(NamedTuple):
    """A table in colours."""

    name: str
    title: str
    about: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[Value]]  # [rows][columns]
    what: str  # the name of a value
    x_title: str
    unit: str = ""
    digits: int = 1
    row_title: str = "site"
    zero: bool = False  # whether the colours begin at zero
    low_is_bright: bool = False  # the colours are reversed: of a metric that is better when low
    centre: Value = None  # where two scales of colours meet
    centre_title: str = ""
    texts: Sequence[Sequence[str]] = ()  # [rows][columns], written into the cells of a picture


class Tree(NamedTuple):
    """Nodes from a root down, each a box with a text."""

    name: str
    title: str
    about: str
    labels: Sequence[str]  # a node comes after its parent
    parents: Sequence[int]  # -1: the root
    levels: Sequence[int]
    places: Sequence[float]  # from the left, 0 to 1


class GainRow(NamedTuple):
    """A gain with its interval, and what it means in words; nan: not known."""

    label: str
    gain: float
    low: float
    high: float
    words: str
    mark: str = ""  # ▲, ▼ or = beside the words, so that no colour is needed


class GainChart(NamedTuple):
    """Does it pay? A row per site: a dot with its interval, a line at zero between two named sides, and words."""

    name: str
    title: str  # the answer, a sentence
    about: str
    rows: Sequence[GainRow]
    x_title: str
    mean: GainRow | None = None  # below the others; None: there is one row, or rows have no mean
    folded: int = 0  # rows that are left out in the middle
    digits: int = 1
    unit: str = ""
    row_title: str = "site"
    left: str = "alone is better"
    right: str = "together is better"

    @property
    def shown(self) -> list[GainRow]:
        """The rows, with the mean below them."""
        return [*self.rows, *([] if self.mean is None else [self.mean])]


class Swarm(NamedTuple):
    """A row per algorithm with many dots per series, and a bar at their mean. Pictures only."""

    rows: Sequence[str]
    x_title: str
    series: Mapping[str, Sequence[Any]]  # [rows][dots], nan where not measured
    zero: bool = False
    title: str = ""


Chart = Lines | Dots | Heat | Tree | GainChart
Panels = Sequence[Sequence[Chart | Swarm]]  # [rows][columns] of a picture


def values_of(array: Any) -> list[Value]:
    """The numbers of an array; None for nan."""
    return [None if np.isnan(number) else float(number) for number in array]


def percent(fractions: Any) -> list[Value]:
    return values_of(100 * np.array(fractions, np.float64))  # None becomes nan, and None again


def series_of(values: Mapping[str, Any], factor: float = 1.0, first: int = 0) -> list[Line]:
    """A series per name, with the colours and symbols from `first` on."""
    named = enumerate(values.items(), first)
    return [Line(name, values_of(factor * own), colour=style, symbol=style) for style, (name, own) in named]


def mean_curve(name: str, curves: Sequence[Mapping[int, Value]], place: int, factor: float = 1.0) -> Line:
    """The mean of curves, values by round, at the rounds that all have; with a band of one deviation."""
    rounds = sorted(set.intersection(*(set(own) for own in curves)))
    values = factor * np.array([[own[round] for round in rounds] for own in curves], np.float64)
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(curves) > 1 else None
    low, high = ([], []) if spread is None else (values_of(mean - spread), values_of(mean + spread))
    return Line(name, values_of(mean), low, high, colour=place, dash=place // len(COLOURS), x=rounds)


def folded(
    rows: Sequence[GainRow],
) -> tuple[list[GainRow], int]:
    """The rows as they are; of more than MOST_ROWS, the best and the worst ones, and how many are left out."""
    left_out = max(0, len(rows) - MOST_ROWS)
    if not left_out:
        return list(rows), 0
    ordered = sorted(rows, key=lambda row: (np.isnan(row.gain), -row.gain))
    return [*ordered[: MOST_ROWS // 2], *ordered[-(MOST_ROWS // 2) :]], left_out


# matplotlib


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def pictures(panels: Panels, title: str = "", kinds: Sequence[str] = ("png", "svg")) -> dict[str, bytes]:
    """The charts drawn as one picture, by the kind of file; the same charts give the same bytes."""
    if not available():
        raise UsageError(MISSING)
    from matplotlib import rc_context

    metadata = {"png": {"Software": None}, "svg": {"Date": None}}
    files = {}
    with rc_context({"svg.hashsalt": "copfl", "svg.fonttype": "none", "font.size": 9}):
        picture = draw(panels, title)
        for kind in kinds:
            content = io.BytesIO()
            picture.savefig(content, format=kind, dpi=200, metadata=metadata[kind])
            files[kind] = content.getvalue()
    return files


def draw(panels: Panels, title: str = "") -> Picture:
    """The picture, which no window and no global state of matplotlib refers to."""
    from matplotlib import rc_context

    # A name with two signs of a dollar is no formula: names of columns, classes and clients are a user's.
    with rc_context({"text.parse_math": False}):
        return _drawn(panels, title)


def _drawn(panels: Panels, title: str) -> Picture:
    from matplotlib.figure import Figure as Picture

    width, height = _inches(panels)
    figure = Picture(layout="constrained")
    of_rounds = isinstance(panels[0][0], Lines)
    grid = figure.subplots(len(panels), len(panels[0]), squeeze=False, sharex="col" if of_rounds else "none")
    handles: dict[str, Any] = {}
    for place, row in enumerate(panels):
        for column, (axes, chart) in enumerate(zip(grid[place], row, strict=True)):
            if isinstance(chart, Lines):
                _curves(axes, chart)
            elif isinstance(chart, Heat):
                _image(axes, chart)
            elif isinstance(chart, Tree):
                _nodes(axes, chart)
            elif isinstance(chart, GainChart):
                _gains(axes, chart)
            else:
                _markers(axes, chart)
            if column and isinstance(chart, Swarm | Dots):  # the rows are those of the first column
                axes.set_yticklabels([])
            if column and isinstance(chart, Lines):
                axes.set_ylabel("")
            if place < len(panels) - 1:
                axes.set_xlabel("")
            if len(row) > 1 and not (place and chart.title == panels[0][column].title):
                axes.set_title(textwrap.fill(chart.title, 46), fontsize=9)
            handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    if title:
        figure.suptitle(title, wrap=True)
    per_line = max(1, int(width / (0.75 + 0.08 * max(map(len, handles), default=1))))
    figure.set_size_inches(width, height + 0.2 * -(-len(handles) // per_line))
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=per_line, frameon=False)
    return figure


def _inches(panels: Panels) -> tuple[float, float]:
    """The size without the legend."""
    chart = panels[0][0]
    if isinstance(chart, Lines):
        panel = 3.2, 3.3
    elif isinstance(chart, Tree):
        panel = (
            1.3 * max(map(chart.levels.count, chart.levels), default=1),
            1.0 * (1 + max(chart.levels, default=0)),
        )
    elif isinstance(chart, GainChart):
        panel = 6.4, 1.5 + 0.26 * (len(chart.shown) + bool(chart.folded))
    elif isinstance(chart, Heat) and chart.texts:
        panel = 0.6 + 0.95 * len(chart.columns), 1.0 + 0.55 * len(chart.rows)
    else:
        panel = 4.4, min(9.0, 1.0 + (0.42 if isinstance(chart, Swarm) else 0.22) * len(chart.rows))
    width, height = max(6.4, 1 + panel[0] * len(panels[0])), max(2.0, panel[1] * len(panels))
    return min(width, MOST_INCHES), min(height, MOST_INCHES)


def _curves(axes: Axes, chart: Lines) -> None:
    for line in chart.lines:
        values = _numbers(line.y)
        seen = ~np.isnan(values)
        x = np.array((line.x or chart.x)[: len(values)], float)[seen]
        colour = COLOURS[line.colour % len(COLOURS)]
        dash = DASHES[line.dash % len(DASHES)]
        marker = "o" if len(x) < 2 else ""
        axes.plot(x, values[seen], dash, color=colour, label=line.name, linewidth=1.4, marker=marker)
        if line.low:
            low, high = _numbers(line.low)[seen], _numbers(line.high)[seen]
            axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    if not chart.lines:
        axes.text(0.5, 0.5, "not yet run", ha="center", va="center", transform=axes.transAxes)
    axes.set(xlabel=chart.x_title, ylabel=chart.y_title)
    if chart.x_title == "round":
        axes.locator_params("x", integer=True)  # there is no round 1.5
    axes.grid(alpha=0.3)


def _markers(axes: Axes, chart: Dots | Swarm) -> None:
    if chart.zero:
        axes.axvline(0, color="black", linewidth=0.8)
    if isinstance(chart, Dots):
        heights = np.arange(len(chart.rows))
        for place, series in enumerate(chart.series):
            style_of = place if series.symbol is None else series.symbol
            colour, symbol = COLOURS[series.colour % len(COLOURS)], SYMBOLS[style_of % len(SYMBOLS)]
            fill = "none" if style_of else "full"
            style: Any = {"color": colour, "markersize": 5, "fillstyle": fill, "label": series.name}
            axes.plot(_numbers(series.y), heights, symbol, **style)
            if series.low:
                axes.hlines(heights, _numbers(series.low), _numbers(series.high), color=colour)
    else:
        _swarm(axes, chart)
    axes.set_yticks(*_ticks(chart.rows, 40))
    axes.set(xlabel=chart.x_title, ylim=(len(chart.rows) - 0.5, -0.5))
    axes.grid(alpha=0.3, axis="x")


ALONE, TOGETHER = "#faeee5", "#e6f2ec"  # the two sides of zero
ALONE_INK, TOGETHER_INK = "#a33d00", "#006b4e"  # their names


def _gains(axes: Axes, chart: GainChart) -> None:
    rows, fold = chart.shown, len(chart.rows) // 2 if chart.folded else len(chart.rows)
    heights = [place + (chart.folded > 0 and place >= fold) for place in range(len(rows))]
    bottom = heights[-1] + 0.6 if heights else 1.0
    ends = _numbers([value for row in rows for value in row[1:4]])
    ends = np.append(ends[np.isfinite(ends)], 0.0)
    room = 0.06 * (float(np.ptp(ends)) or 1.0)
    low, high = float(ends.min()) - room, float(ends.max()) + room
    axes.set(xlim=(low, high), ylim=(bottom, -0.7), xlabel=textwrap.fill(chart.x_title, 90))
    axes.axvspan(low, 0, color=ALONE, zorder=0, linewidth=0)
    axes.axvspan(0, high, color=TOGETHER, zorder=0, linewidth=0)
    axes.axvline(0, color="#222222", linewidth=1.2)
    # Each name at its own end; where its side is narrow it goes on outside of the frame, and not over the other.
    sides: Any = {"transform": axes.transAxes, "fontsize": 8}
    axes.text(0, 1.02, f"◀ {chart.left}", color=ALONE_INK, ha="left", **sides)
    axes.text(1, 1.02, f"{chart.right} ▶", color=TOGETHER_INK, ha="right", **sides)
    for height, row in zip(heights, rows, strict=True):
        is_mean = row is chart.mean
        colour = "#111111" if is_mean else COLOURS[0]
        if np.isfinite([row.low, row.high]).all():
            axes.hlines(height, row.low, row.high, color=colour, linewidth=3 if is_mean else 2.2)
        if np.isfinite(row.gain):
            axes.plot(row.gain, height, "D" if is_mean else "o", color=colour, markersize=6 if is_mean else 7)
        weight = "bold" if is_mean else "normal"
        words: Any = {
            "transform": axes.get_yaxis_transform(),
            "va": "center",
            "fontsize": 8,
            "color": "#333333",
        }
        value = f"{row.gain:+z.{chart.digits}f}".replace("-", "−") if np.isfinite(row.gain) else ""
        axes.text(1.13, height, value, ha="right", **words)
        axes.text(1.15, height, f"{row.mark} {row.words}".strip(), **words)
        axes.text(-0.02, height, row.label, ha="right", weight=weight, **words)
    if chart.folded:
        axes.text(0.5, fold, f"… {chart.folded} more between …", ha="center", **words)
    axes.set_yticks([])
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _swarm(axes: Axes, chart: Swarm) -> None:
    """Every series has a lane within its row, and its dots are spread over the lane."""
    lane = 0.6 / len(chart.series)
    for place, (name, rows) in enumerate(chart.series.items()):
        heights = [
            height + lane * (place + 0.5 + 0.8 * shift) - 0.3
            for height, dots in enumerate(rows)
            for shift in np.arange(len(dots)) / max(len(dots) - 1, 1) - 0.5
        ]
        style: Any = {"color": COLOURS[place % len(COLOURS)], "markersize": 3, "alpha": 0.6, "label": name}
        axes.plot(np.concatenate(list(rows)), heights, "o", markeredgewidth=0, **style)
    for height in range(len(chart.rows)):
        mean = float(np.mean([np.nanmean(rows[height]) for rows in chart.series.values()]))
        axes.plot([mean, mean], [height - 0.38, height + 0.38], color="black", linewidth=1.6)


def _image(axes: Axes, chart: Heat) -> None:
    values = np.ma.masked_invalid([_numbers(row) for row in chart.values])
    least = 0 if chart.zero else None
    scale: Any = {"cmap": "cividis_r" if chart.low_is_bright else "cividis", "vmin": least}
    if chart.centre is not None and values.count():
        reach = float(np.abs(values - chart.centre).max()) or 1.0
        scale = {"cmap": "PuOr_r", "vmin": chart.centre - reach, "vmax": chart.centre + reach}
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **scale)
    middle = (values.min() + values.max()) / 2
    for (i, j), value in np.ndenumerate(values.filled(np.inf)) if chart.texts else ():
        colour = "white" if value < middle else "black"
        axes.text(j, i, chart.texts[i][j], ha="center", va="center", fontsize=7, color=colour)
    axes.set_yticks(*_ticks(chart.rows, 40))
    axes.set_xticks(*_ticks(chart.columns, 12))
    axes.set(xlabel=chart.x_title, ylabel=chart.row_title if chart.texts else "")
    if values.count():
        label = f"{chart.what},{chart.unit}" if chart.unit else chart.what
        bar = axes.figure.colorbar(image, ax=axes, label=label)
        if chart.centre is not None:
            bar.ax.axhline(chart.centre, color="black")


def _nodes(axes: Axes, chart: Tree) -> None:
    heights = [-level for level in chart.levels]
    for node, parent in enumerate(chart.parents):
        if parent >= 0:
            ends = [chart.places[parent], chart.places[node]], [heights[parent], heights[node]]
            axes.plot(*ends, color="black", linewidth=0.8, zorder=0)
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": COLOURS[0]}
        place = chart.places[node], heights[node]
        axes.text(
            *place, textwrap.fill(chart.labels[node], 16), ha="center", va="center", fontsize=7, bbox=box
        )
    axes.set(xlim=(0, 1), ylim=(min(heights, default=0) - 0.5, 0.5))
    axes.axis("off")


def _ticks(names: Sequence[str], most: int) -> tuple[Sequence[int], Sequence[str]]:
    """The places of the names that an axis shows, and these names."""
    step = max(1, -(-len(names) // most))
    return range(0, len(names), step), names[::step]


def _numbers(values: Sequence[Value]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(values, np.float64)  # None becomes nan


# The HTML page


def figure(chart: Chart) -> Figure:
    """The record from which report/templates/draw.js draws the chart."""
    content = chart._asdict()
    if isinstance(chart, GainChart):
        content["rows"] = [row._asdict() for row in chart.shown]
        content["mean"] = chart.mean is not None
    for name in ("title", "about", "texts"):
        content.pop(name, None)
    for name in ("lines", "series"):
        if name in content:
            content[name] = [line._asdict() for line in content[name]]
    return {"kind": type(chart).__name__.lower(), **content}
