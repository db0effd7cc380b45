"""Tables of words for the terminal, Markdown and CSV, and the formats of the numbers in them."""

import csv
import html
import io
import math
import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from copfl.errors import library

NONE = "-"  # the cell of a value that was not measured
FORMULA = re.compile(r"[A-Za-z(|!$:]")  # what a number with a sign does not have
RULE: tuple[str, ...] = ()  # a row that is a horizontal line in the text; Markdown and CSV leave it out


class Table(NamedTuple):
    """A title, the names of the columns, the rows, and paragraphs below them."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    numeric: bool = True  # whether Markdown aligns every column but the first to the right


def as_text(table: Table, width: int = 100) -> str:
    """The table as plain text; names of columns are wrapped where the table is wider than `width`."""
    columns = [[row[place] for row in table.rows if row] for place in range(len(table.head))]
    named = list(zip(table.head, columns, strict=True))
    longest = [max(map(len, (name, *cells))) for name, cells in named]
    heads = [[name] for name in table.head]
    if sum(longest) + 2 * len(longest) - 2 > width:
        longest = [max(map(len, ("-", *name.split(), *cells))) for name, cells in named]
        heads = [textwrap.wrap(name, size) for name, size in zip(table.head, longest, strict=True)]
    height = max(map(len, heads))
    heads = [[""] * (height - len(words)) + words for words in heads]
    numeric = [all(cell[:1] in "+-–[0123456789" for cell in cells) for cells in columns]
    sides = [">" if place and numeric[place] else "<" for place in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = (f"{c:{side}{size}}" for c, side, size in zip(cells, sides, longest, strict=True))
        return "  ".join(padded).rstrip()

    body = [line(row) if row else "" for row in table.rows]
    above = [line(words) for words in zip(*heads, strict=True)]
    rule = "-" * max(map(len, (*above, *body)))
    notes = [words for note in table.notes for words in textwrap.wrap(note, width)]
    title = [*textwrap.wrap(table.title, width), ""] if table.title else []
    return "\n".join([*title, *above, rule, *(text or rule for text in body), *notes])


def as_markdown(table: Table) -> str:
    """The table as Markdown, the title in bold above it."""
    side = "---:" if table.numeric else "---"
    rows = [[cell.replace("|", "\\|") for cell in row] for row in table.rows if row]
    grid = [table.head, ["---", *[side] * (len(table.head) - 1)], *rows]
    lines = ["| " + " | ".join(row) + " |" for row in grid]
    title = [f"**{table.title}**"] if table.title else []
    return "\n\n".join([*title, "\n".join(lines), *filter(None, table.notes)])


def as_html(table: Table) -> str:
    """The table for a notebook."""

    def row(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"

    rows = "".join(row(cells, "td") for cells in table.rows)
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in table.notes)
    head = f"<thead>{row(table.head, 'th')}</thead>"
    return f"<table><caption>{html.escape(table.title)}</caption>{head}<tbody>{rows}</tbody></table>{notes}"


def data_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """The columns as a data frame of pandas, which need not be installed."""
    return library("pandas", "a data frame").DataFrame(dict(columns))


def as_csv(table: Table) -> str:
    """The head and the rows as CSV, in which no name is a formula."""
    out = io.StringIO()
    rows = [table.head, *(row for row in table.rows if row)]
    csv.writer(out, lineterminator="\n").writerows([*map(without_formula, row)] for row in rows)
    return out.getvalue()


def without_formula(cell: str) -> str:
    """The cell as a spreadsheet shows it: behind an apostrophe, if it would be a formula.

    Names of classes and sites are another's. A number with a sign, such as -1.5 or +2.0 ± 0.3, is none.
    Where numbers have decimal commas, a spreadsheet divides lines at ";", so what follows one is a cell, too.
    """
    return ";".join(map(_without_formula, cell.split(";")))


def _without_formula(cell: str) -> str:
    first = unicodedata.normalize("NFKC", cell[:1])  # some programs take "＝" as "="
    is_formula = first in ("=", "@", "\t", "\r", "\n") or (first in ("+", "-") and FORMULA.search(cell))
    try:
        float(cell)
    except ValueError:
        return f"'{cell}" if is_formula else cell
    return cell


def capital(title: str) -> str:
    """The title with a capital first letter, as at the start of a sentence."""
    return title[:1].upper() + title[1:]


def listed(names: Sequence[str], most: int) -> str:
    """Such as "a, b and 3 more": the first names, and how many are left out."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def number(value: float | None, digits: str = ".1f") -> str:
    """Such as "65.0"; "-" where nothing was measured. `digits` is a format, "+.1f" shows the sign."""
    return NONE if value is None or math.isnan(value) else f"{value:{digits}}"


def percent(value: float | None, digits: str = ".1f") -> str:
    """A fraction in percent, without the sign %."""
    return number(None if value is None else 100 * value, digits)


def with_spread(mean: float, spread: float, digits: str = ".1f") -> str:
    """Such as "65.0 ± 7.1"; the mean alone where the spread is nan."""
    around = "" if math.isnan(mean) or math.isnan(spread) else f" ± {spread:{digits.lstrip('+')}}"
    return number(mean, digits) + around


def interval(low: float, high: float, digits: str = "+.1f") -> str:
    """Such as "[-1.5, +2.0]"; "-" for an interval without bounds, or of nothing."""
    return NONE if not math.isfinite(low) else f"[{number(low, digits)}, {number(high, digits)}]"


def size(count: float) -> str:
    """A number of bytes to three digits, such as "1.25 MB"; 1 kB is 1000 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds(mean: float, spread: float = math.nan) -> str:
    """Such as "0.46 ± 0.13", or "12.3" from ten seconds on."""
    return with_spread(mean, spread, ".2f" if mean < 10 else ".1f")


def plain(value: Any) -> Any:
    """The value for JSON: arrays as lists, None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
