"""A chart before it is drawn: what it shows, in numbers and words. The page, the pictures and the tables draw it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Value = float | None  # None: nothing was measured there

ROWS = 60  # of more rounds than this, a table shows some


class Line(NamedTuple):
    """A curve, with the band around it and a remark on each of its points where there is one."""

    name: str
    y: Sequence[Value]
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()
    remarks: Sequence[str] = ()
    colour: int = 0
    dash: int = 0


class Lines(NamedTuple):
    """Curves over the rounds."""

    name: str  # in one word: the anchor on the page, and the file of the picture
    title: str
    about: str  # what one sees, in a sentence or two
    x: Sequence[float]
    y_title: str
    lines: Sequence[Line]
    unit: str = ""
    digits: int = 1
    x_title: str = "round"


class Dots(NamedTuple):
    """A row per client or layer, in it a dot per series."""

    name: str
    title: str
    about: str
    rows: Sequence[str]
    x_title: str
    series: Sequence[Line]  # y is a value per row
    unit: str = ""
    digits: int = 1
    zero: bool = False  # whether zero is where one looks from
    row_title: str = "client"


class Heat(NamedTuple):
    """A table in colours."""

    name: str
    title: str
    about: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[Value]]  # [rows][columns]
    what: str  # a value's name
    x_title: str
    unit: str = ""
    digits: int = 1
    row_title: str = "client"
    zero: bool = False  # whether the colours begin at zero


Chart = Lines | Dots | Heat


class Table(NamedTuple):
    """The same in figures."""

    head: list[str]
    rows: list[list[str]]
    note: str = ""


def text(value: Value, digits: int, unit: str = "") -> str:
    """The value as a person reads it."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def table(chart: Chart) -> Table:
    """The figures behind a chart; of many rounds, some."""
    if isinstance(chart, Dots):
        rows = [
            [row, *(text(s.y[place], chart.digits, chart.unit) for s in chart.series)]
            for place, row in enumerate(chart.rows)
        ]
        return Table([chart.row_title, *(s.name for s in chart.series)], rows)
    if isinstance(chart, Heat):
        chosen = _some(len(chart.columns))
        head = [chart.row_title, *(f"{chart.x_title} {chart.columns[c]}" for c in chosen)]
        rows = [
            [row, *(text(values[c], chart.digits, chart.unit) for c in chosen)]
            for row, values in zip(chart.rows, chart.values, strict=True)
        ]
        return Table(head, rows, _note(chosen, len(chart.columns), chart.x_title))
    chosen = _some(len(chart.x))
    head = [chart.x_title]
    for line in chart.lines:
        head += [line.name] + (
            [f"{line.name}, lowest tenth", f"{line.name}, highest tenth"] if line.low else []
        )
    rows = []
    for place in chosen:
        row = [f"{chart.x[place]:g}"]
        for line in chart.lines:
            columns = [line.y, line.low, line.high] if line.low else [line.y]
            row += [text(c[place] if place < len(c) else None, chart.digits, chart.unit) for c in columns]
        rows.append(row)
    return Table(head, rows, _note(chosen, len(chart.x), chart.x_title))


def _some(count: int) -> list[int]:
    """The first, the last, and others evenly between them."""
    return (
        sorted({int(place) for place in np.linspace(0, count - 1, min(count, ROWS)).round()}) if count else []
    )


def _note(chosen: list[int], count: int, what: str) -> str:
    return "" if len(chosen) == count else f"{len(chosen)} of {count} {what}s; rounds.jsonl has them all."
