"""Charts as plotly figures: plain records that plotly.js draws in the page.

Colours are names such as "var(--c0)", which the page looks up in its own style: so light and dark are one figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from copfl.report.chart import Chart, Dots, Heat, Line, Lines

Figure = dict[str, Any]

COLOURS = 8  # --c0 to --c7 in page.css
DASHES = ("solid", "dash", "dot", "dashdot")
# Open shapes after the first, so that dots on the same spot are all seen.
SYMBOLS = (
    "circle",
    "diamond-open",
    "x-thin",
    "square-open",
    "triangle-up-open",
    "cross-thin",
    "star-open",
    "hexagon-open",
)
ROW = 26  # pixels; with more clients they get closer
TALLEST = 900


def figure(chart: Chart) -> Figure:
    """What plotly.js needs to draw it."""
    if isinstance(chart, Lines):
        return _lines(chart)
    return _dots(chart) if isinstance(chart, Dots) else _heat(chart)


def _colour(number: int) -> str:
    return f"var(--c{number % COLOURS})"


def _hover(name: str, remarks: Sequence[str], value: str, unit: str) -> Figure:
    """What a hover says of a point."""
    remark = "<br>%{customdata}" if remarks else ""
    return {"customdata": list(remarks), "hovertemplate": f"{name}: {value}{unit}{remark}<extra></extra>"}


def _lines(chart: Lines) -> Figure:
    traces: list[Figure] = []
    for line in chart.lines:
        if line.low:
            traces += _band(chart, line)
        few = len(chart.x) < 2
        hover = _hover(_plain(line.name), line.remarks, f"%{{y:.{chart.digits}f}}", chart.unit)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if few else "lines",
                "name": _plain(line.name),
                "x": list(chart.x)[: len(line.y)],
                "y": list(line.y),
                "connectgaps": True,  # of rounds without a look
                "line": {"color": _colour(line.colour), "width": 2, "dash": DASHES[line.dash % len(DASHES)]},
                **hover,
            }
        )
    layout = {
        "hovermode": "x unified",
        "xaxis": {"title": {"text": chart.x_title}, "zeroline": False, "hoverformat": "d"},
        "yaxis": {"title": {"text": chart.y_title}, "zeroline": False, "rangemode": "tozero"},
        "showlegend": True,
        "height": 380,
    }
    return {"data": traces, "layout": layout}


def _band(chart: Lines, line: Line) -> list[Figure]:
    """Two invisible edges with the space between them filled."""
    edge = {
        "type": "scatter",
        "mode": "lines",
        "x": list(chart.x)[: len(line.y)],
        "connectgaps": True,
        "line": {"width": 0, "color": _colour(line.colour)},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    filled = {
        "fill": "tonexty",
        "fillcolor": _colour(line.colour),
        "meta": "band",
    }  # page.js makes it translucent
    return [{**edge, "y": list(line.low)}, {**edge, "y": list(line.high), **filled}]


def _dots(chart: Dots) -> Figure:
    traces = []
    for place, series in enumerate(chart.series):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _plain(series.name),
                "x": list(series.y),
                "y": list(chart.rows),
                "marker": {
                    "color": _colour(series.colour),
                    "size": 11 if place else 8,
                    "symbol": SYMBOLS[place % len(SYMBOLS)],  # a shape beside the colour
                    "line": {"width": 2, "color": _colour(series.colour)},
                },
                **_hover(
                    f"%{{y}}, {_plain(series.name)}", series.remarks, f"%{{x:.{chart.digits}f}}", chart.unit
                ),
            }
        )
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": chart.x_title}, "zeroline": chart.zero, "zerolinewidth": 2},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
        "showlegend": True,
        "height": _height(len(chart.rows)),
    }
    return {"data": traces, "layout": layout}


def _heat(chart: Heat) -> Figure:
    numbered = all(
        column.isdecimal() and len(column) < 16 for column in chart.columns
    )  # then the axis finds room for its ticks
    trace = {
        "type": "heatmap",
        "x": [int(column) for column in chart.columns] if numbered else list(chart.columns),
        "y": list(chart.rows),
        "z": [list(row) for row in chart.values],
        "colorscale": "Cividis",  # made to look alike to all eyes, and in grey
        "hoverongaps": False,
        **(
            {"zmin": 0, "zmax": max((v for row in chart.values for v in row if v is not None), default=1)}
            if chart.zero
            else {}
        ),
        "xgap": 1 if len(chart.columns) <= 60 else 0,
        "ygap": 1 if len(chart.rows) <= 60 else 0,
        "colorbar": {
            "title": {"text": chart.what, "side": "right"},
            "thickness": 12,
            "ticksuffix": chart.unit.strip(),
        },
        "hovertemplate": f"%{{y}}, {chart.x_title} %{{x}}: %{{z:.{chart.digits}f}}{chart.unit}<extra></extra>",
    }
    layout = {
        "xaxis": {
            "type": "linear" if numbered else "category",
            "title": {"text": chart.x_title},
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
            **({"dtick": 1} if len(chart.columns) <= 12 else {}),
        },
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True, "showgrid": False},
        "height": _height(len(chart.rows)),
    }
    return {"data": [trace], "layout": layout}


def _height(rows: int) -> int:
    return min(TALLEST, 160 + ROW * rows)


def _plain(text: str) -> str:
    """The text without what plotly takes for markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")
