"""A report as a document, and the one HTML file that it becomes. The file makes no network requests.

Every page of copfl is a `Document`: of runs, of comparisons, of a server and of a node.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copfl import __version__
from copfl.charts import Chart, Dots, GainChart, Heat, Value, figure
from copfl.charts import Tree as TreeChart
from copfl.sections import Section
from copfl.tables import Table, number

if TYPE_CHECKING:
    from jinja2 import Environment

TABLE_ROWS = 60  # a table of more rounds contains some of them
DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # Unicode's marks and overrides
SCRIPTS, STYLE = ("draw.js", "page.js"), "page.css"  # all that a page executes and is styled by


class Source(NamedTuple):
    """A run that the document shows, and how to repeat it."""

    label: str
    path: str
    command: str
    toml: str


class Document(NamedTuple):
    """The content of a page, in its order."""

    title: str
    subtitle: str
    conclusion: Sequence[str | tuple[str, ...]]  # paragraphs, and lists
    tiles: Sequence[tuple[str, str, str]]  # what, its value, a remark
    tables: Sequence[Table]  # results that the conclusion refers to
    notes: Sequence[str]
    facts: Table | None  # the settings
    sections: Sequence[Section]
    sources: Sequence[Source] = ()
    ended: bool = True  # whether a served page asks for no more updates
    heading: str = "Conclusion"
    problems: Sequence[str] = ()  # above the conclusion
    answer: Section | None = None  # does it pay? First of all, with one chart; all else is folded then
    news: str = ""  # a sentence that a served page announces when it has changed


def render(document: Document, fingerprint: str = "") -> str:
    """The whole page. With a fingerprint, it asks its server for updates.

    Args:
        document: The page.
        fingerprint: Of the files that it shows; "": it asks for nothing.
    """
    shown = [*([] if document.answer is None else [document.answer]), *document.sections]
    charts = [chart for section in shown for chart in section.charts]
    data = {
        "figures": {chart.name: figure(chart) for chart in charts},
        "fingerprint": fingerprint,
        "ended": document.ended,
        "news": document.news,
    }
    return (
        _templates()
        .get_template("page.html")
        .render(
            document._asdict(),
            version=__version__,
            live=bool(fingerprint),
            policy=content_security_policy(live=bool(fingerprint)),
            style=_asset(STYLE),
            scripts=[_asset(name) for name in SCRIPTS],
            chart_texts={chart.name: text_of(chart) for chart in charts},
            chart_tables={chart.name: table_of(chart) for chart in charts},
            data=json.dumps(_rounded(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        )
    )


def _rounded(value: Any) -> Any:
    """What the scripts of the page read: numbers are rounded to five digits, which suffice for a chart.

    One that is not finite then, as the largest ones, is a gap.
    """
    if isinstance(value, float):
        rounded = float(f"{value:.5g}")
        return rounded if math.isfinite(rounded) else None
    if isinstance(value, dict):
        return {_directed(key): _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else _directed(value)


@cache
def content_security_policy(*, live: bool) -> str:
    """What a browser lets a page do: execute these scripts, by their hashes, and ask its server if `live`.

    So text from elsewhere that became markup by mistake would still not execute.
    """

    def hashes(*names: str) -> str:
        digests = (hashlib.sha256(_asset(name).encode()).digest() for name in names)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    allowed = {
        "default-src": "'none'",
        "script-src": hashes(*SCRIPTS),
        "style-src": hashes(STYLE),
        "img-src": "data: blob:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{what} {where}" for what, where in allowed.items())


@cache
def _asset(name: str) -> str:
    """A script or the style, as the page contains it."""
    return _templates().get_template(name).render()


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("copfl.report"), autoescape=True, undefined=StrictUndefined, finalize=_directed
    )


def _directed(value: Any) -> Any:
    """A text without marks that turn the direction of what follows: names come from other machines."""
    return DIRECTIONS.sub("\ufffd", value) if type(value) is str else value


def text_of(chart: Chart) -> str:
    """What a chart of gains shows, row by row, for a screen reader; "" of other charts, which have a table."""
    if not isinstance(chart, GainChart):
        return ""
    rows = [
        f"{row.label}: {row.words}"
        + (f", {row.gain:+z.{chart.digits}f}{chart.unit}" if math.isfinite(row.gain) else "")
        for row in chart.shown
    ]
    more = [f"{chart.folded} more rows are between them."] if chart.folded else []
    return " ".join([*(f"{row}." for row in rows), *more])


def table_of(chart: Chart) -> Table:
    """The numbers of a chart; of many rounds, some."""
    if isinstance(chart, GainChart):
        digits = chart.digits
        rows = [
            [row.label, *(f"{v:+z.{digits}f}" if math.isfinite(v) else "" for v in row[1:4]), row.words]
            for row in chart.shown
        ]
        notes = [f"{chart.folded} more are between them"] if chart.folded else []
        head = [chart.row_title, "gain", "low end", "high end", "verdict"]
        return Table(chart.title, head, rows, [*notes, chart.x_title])
    if isinstance(chart, TreeChart):
        above = ["" if parent < 0 else chart.labels[parent] for parent in chart.parents]
        levels = [str(level + 1) for level in chart.levels]
        return Table(
            chart.title, ["level", "node", "under"], list(zip(levels, chart.labels, above, strict=True))
        )

    def cell(values: Sequence[Value], index: int) -> str:
        known = values[index] if index < len(values) else None
        return number(known, f",.{chart.digits}f") + (chart.unit if known is not None else "")

    if isinstance(chart, Dots):
        head = [chart.row_title, *(series.name for series in chart.series)]
        columns = [
            [cell(series.y, row_index) for row_index in range(len(chart.rows))] for series in chart.series
        ]
        return Table(chart.title, head, list(zip(chart.rows, *columns, strict=True)))
    rounds = [] if isinstance(chart, Heat) else sorted({x for line in chart.lines for x in line.x or chart.x})
    count = len(chart.columns if isinstance(chart, Heat) else rounds)
    indices = sorted(
        {int(row_index) for row_index in np.linspace(0, count - 1, min(count, TABLE_ROWS)).round()}
    )
    left_out = f"{len(indices)} of {count} {chart.x_title}s; rounds.jsonl contains all."
    notes = [left_out] if len(indices) < count else []
    if isinstance(chart, Heat):
        head = [chart.row_title, *(f"{chart.x_title} {chart.columns[row_index]}" for row_index in indices)]
        named = zip(chart.rows, chart.values, strict=True)
        return Table(chart.title, head, [[row, *(cell(vs, p) for p in indices)] for row, vs in named], notes)
    curves: dict[str, dict[float, Value]] = {}
    for line in chart.lines:
        own_x = list(line.x or chart.x)
        curves[line.name] = dict(zip(own_x, line.y, strict=False))  # a run in progress has fewer values
        if line.low:
            curves[f"{line.name}, low end"] = dict(zip(own_x, line.low, strict=False))
            curves[f"{line.name}, high end"] = dict(zip(own_x, line.high, strict=False))
    rows = [
        [f"{rounds[row_index]:g}", *(cell([own_x.get(rounds[row_index])], 0) for own_x in curves.values())]
        for row_index in indices
    ]
    return Table(chart.title, [chart.x_title, *curves], rows, notes)
