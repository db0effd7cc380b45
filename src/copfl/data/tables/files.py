"""Readers of tables in files (.csv, .tsv, .jsonl, .parquet, .txt): they return a DataTable, or raise a DataError.

Cells of a .csv or .tsv file are texts without the spaces around them; which columns are numbers is decided by
who uses them, so "007" can still be a client. Cells of the other files have their own types.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from copfl.data import reading
from copfl.data.tables.columns import Column, DataTable, column_of, joined
from copfl.data.tables.parquet import plain_names, size_in_memory
from copfl.errors import DataError, raised_as
from copfl.tables import listed

LARGEST_FILE = 4096 * reading.MIB  # a table takes up to three times as much memory
LINES = "text"  # the only column of a .txt file
SEPARATORS = ",;\t|"
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")  # in small or capital letters
READ_AS_MISSING = "words that are read as missing values"
MOST_SHOWN = 5  # columns in a note
COMMA_NUMBER, POINT_NUMBER = r"^[+-]?\d*,\d+$", r"^[+-]?\d*\.\d+$"
BLOCK = 16 * reading.MIB  # of a file that is parsed at once; the largest row must fit
MOST_COLUMNS = 30_000  # each takes about a millisecond; the genes of a person are fewer
FEW_CELLS, MOST_EMPTY = 10_000_000, 50  # from so many cells on, one of so many at least must have a value
LONGEST_NAMES = reading.MIB  # characters of a first line that is read by itself
ROWS_AT_ONCE = 10_000  # of a .jsonl file, as Python objects
TOO_MANY = f"at most {MOST_COLUMNS:,} are read. Leave some out, or pass arrays from Python: copfl.run(dataset=(x, y))"


def read_table(path: Path) -> DataTable:
    """The columns of a table in a file.

    Args:
        path: A file of a kind in `READERS`, in UTF-8, of at most `LARGEST_FILE` bytes. The first line of a
            .csv or .tsv file names the columns; its separator is the most frequent of comma, semicolon, tab
            and bar there. A line of a .jsonl file is an object, a line of a .txt file a text.

    Returns:
        A table with at least one row. `DataError` names the line of a damaged file.
    """
    if path.suffix.lower() not in READERS:
        raise DataError(f"{path} is no table; expected {', '.join(READERS)}")
    with reading.data_errors(str(path), f"{path.suffix} file"):
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise DataError(
                f"{path} has {size:,} bytes; at most {LARGEST_FILE:,} are read into memory. Take a part of "
                "its rows or columns, or pass arrays from Python: copfl.run(dataset=(x, y))"
            )
        table = READERS[path.suffix.lower()](path)
        if not len(table):
            raise DataError(f"{path} has no rows")
        return table


# Separated values


def _separated(path: Path) -> DataTable:
    """A .csv or .tsv file."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    with _utf8(path), path.open(encoding="utf-8-sig", newline="") as file:
        separator, written_names = _first_line(path, file)
    names = [name.strip() for name in written_names]
    _check_names(path, names)
    if not names:
        raise DataError(f"{path} has no rows")
    if has_quotes := _has_quotes(path):
        _check_rows(path, separator, len(names))  # Arrow accepts a quote that is never closed
    try:
        content = arrow_csv.read_csv(
            path,
            arrow_csv.ReadOptions(block_size=BLOCK),
            arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=has_quotes),
            arrow_csv.ConvertOptions(column_types=dict.fromkeys(written_names, pa.string())),
        )
    except pa.ArrowInvalid:
        _check_rows(path, separator, len(names))  # says which line is wrong
        raise
    columns, with_commas, with_words = {}, [], []
    for name, written_name in zip(names, written_names, strict=True):
        columns[name], has_commas, words = _cells(content[written_name], separator)
        with_commas += [name] if has_commas else []
        with_words += [f"{name} ({', '.join(words)})"] if words else []
    notes = [f"decimal commas are read as points: {', '.join(with_commas)}"] if with_commas else []
    notes += [f"{READ_AS_MISSING}: {listed(with_words, MOST_SHOWN)}"] if with_words else []
    return DataTable(columns, tuple(notes))


def _first_line(path: Path, file: TextIO) -> tuple[str, list[str]]:
    """The separator of a .csv or .tsv file, and the names of its columns as they are written."""
    first_line = re.sub('"[^"]*"', "", next(filter(str.strip, _lines(path, file)), ""))
    separator = max(SEPARATORS, key=first_line.count)
    file.seek(0)
    return separator, next((row for _, row in _rows(path, file, separator) if row), [])


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a file; a DataError where one does not fit."""
    for number in itertools.count(1):
        line = file.readline(BLOCK)
        if len(line) == BLOCK:
            raise DataError(
                f"{path}, line {number}, has {BLOCK:,} or more characters; it is no row of a table"
            )
        if not line:
            return
        yield line


def _rows(path: Path, file: TextIO, separator: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a .csv or .tsv file, each with the number of its last line; a DataError where one does not fit."""
    size = 0

    def lines_of_a_row() -> Iterator[str]:
        nonlocal size
        for line in _lines(path, file):
            size += len(line)
            if size > BLOCK:
                raise DataError(f"{path} has a row of more than {BLOCK:,} characters; is a quote not closed?")
            yield line

    rows = csv.reader(lines_of_a_row(), delimiter=separator, strict=True)
    for row in rows:
        size = 0
        yield rows.line_num, row


def first_names(path: Path) -> list[str]:
    """The names of the columns, where the first line of a file has them; nothing else is read or imported.

    Args:
        path: Of a table. Of a file of another kind, or one that `read_table` refuses, the list is empty.
    """
    if READERS.get(path.suffix.lower()) is not _separated:
        return []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            begin = file.read(LONGEST_NAMES)
        is_whole = len(begin) < LONGEST_NAMES or bool(begin.strip().count("\n"))
        return (
            [name.strip() for name in _first_line(path, io.StringIO(begin, newline=""))[1]]
            if is_whole
            else []
        )
    except (OSError, UnicodeDecodeError, csv.Error, DataError):
        return []


def _check_names(path: Path, names: Sequence[str]) -> None:
    if len(names) > MOST_COLUMNS:
        raise DataError(f"{path} has {len(names):,} columns; {TOO_MANY}")
    if "" in names:
        index = "; pandas writes its index so, unless index=False" if names[0] == "" else ""
        raise DataError(f"{path} has no name for column {names.index('') + 1} in its first line{index}")
    doubled = next((name for name, count in Counter(names).items() if count > 1), None)
    if doubled is not None:
        raise DataError(f"{path} has the column {doubled!r} twice; rename or remove one")


def _cells(column: Column, separator: str) -> tuple[Column, bool, list[str]]:
    """The texts without spaces around them, null where one is missing; whether decimal commas became points;
    and the words that are read as missing, such as NA.

    A comma is decimal where it does not separate cells and no number of the column has a point: in 1.500 and
    0,5 the point may separate thousands.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = pc.utf8_trim_whitespace(column)
    is_missing = pc.is_in(pc.utf8_lower(column), pa.array(MISSING))
    words = sorted(filter(None, column.filter(is_missing).unique().to_pylist()))
    column = pc.if_else(is_missing, None, column)
    if separator == "," or not pc.any(pc.match_substring(column, ",")).as_py():
        return column, False, words
    has_comma = pc.match_substring_regex(column, COMMA_NUMBER)
    if not pc.any(has_comma).as_py() or pc.any(pc.match_substring_regex(column, POINT_NUMBER)).as_py():
        return column, False, words
    return pc.if_else(has_comma, pc.replace_substring(column, ",", "."), column), True, words


def _has_quotes(path: Path) -> bool:
    with path.open("rb") as file:
        return any(b'"' in block for block in iter(lambda: file.read(BLOCK), b""))


def _check_rows(path: Path, separator: str, count: int) -> None:
    """A DataError that names the first line with another number of values or with a wrong quote."""
    unreadable = f"{path} is not a readable {path.suffix} file: {{}}"
    with (
        _utf8(path),
        path.open(encoding="utf-8-sig", newline="") as file,
        raised_as(DataError, unreadable, csv.Error),
    ):
        for number, row in _rows(path, file, separator):
            if row and len(row) != count:
                found = f"{path}, line {number}, has {len(row)} values"
                raise DataError(f"{found}; the first line names {count} columns")


@contextmanager
def _utf8(path: Path) -> Iterator[None]:
    """Inside, text that is not UTF-8 is a DataError that names its line."""
    try:
        yield
    except UnicodeDecodeError as error:
        with path.open("rb") as file:
            number = 1 + next(n for n, line in enumerate(file) if not _is_utf8(line))
        raise DataError(
            f"{path}, line {number}, is not UTF-8. Save it as UTF-8 (in Excel: CSV UTF-8)"
        ) from error


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


# Other files


def _json_lines(path: Path) -> DataTable:
    """A .jsonl file: an object per line; a key that a line lacks is missing."""
    blocks: list[dict[str, Column]] = []
    sizes: list[int] = []
    names: dict[str, None] = {}
    values = 0
    with _utf8(path), path.open(encoding="utf-8-sig") as file:
        lines = ((number, line) for number, line in enumerate(_lines(path, file), 1) if line.strip())
        for batch in iter(lambda: list(itertools.islice(lines, ROWS_AT_ONCE)), []):
            rows = []
            for number, line in batch:
                rows.append(_json_object(path, number, line))
                names.update(dict.fromkeys(rows[-1]))
                values += len(rows[-1])
                if len(names) > MOST_COLUMNS:
                    found = (
                        f"{path} has {len(names):,} different keys up to line {number}, each of them a column"
                    )
                    raise DataError(f"{found}; {TOO_MANY}")
            cells = (sum(sizes) + len(rows)) * len(names)
            if cells > max(FEW_CELLS, MOST_EMPTY * values):
                raise DataError(
                    f"{path} has {len(names):,} different keys up to line {number}, and a line has "
                    f"{values / (sum(sizes) + len(rows)):.0f} of them: a table with these columns would be empty but "
                    f"for 1 in {cells // values:,} cells. Write a key and its value as two columns, or leave some out"
                )
            own_names = dict.fromkeys(name for row in rows for name in row)
            blocks.append({name: column_of([row.get(name) for row in rows]) for name in own_names})
            sizes.append(len(rows))
    columns = {
        name: joined(
            [
                block[name] if name in block else column_of([None] * n)
                for block, n in zip(blocks, sizes, strict=True)
            ]
        )
        for name in names
    }
    return DataTable(columns)


def _json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    with raised_as(DataError, f"{path}, line {number}, is not valid JSON: {{}}", ValueError, RecursionError):
        row = json.loads(line)
    if not isinstance(row, dict):
        raise DataError(f'{path}, line {number}, is no object such as {{"text": ..., "label": ...}}')
    return row


def _parquet(path: Path) -> DataTable:
    """A .parquet file; cells that are lists or records are left out, as no column of a run may have them."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        schema = file.schema_arrow
        _check_names(path, schema.names)
        if (size := size_in_memory(path, schema, file.metadata, LARGEST_FILE)) > LARGEST_FILE:
            raise DataError(
                f"{path} would unpack to {size:,} bytes or more; at most {LARGEST_FILE:,} are accepted. Take a part "
                "of its rows or columns"
            )
        content = file.read(plain_names(schema))
        nested = {
            field.name: pa.chunked_array([pa.nulls(file.metadata.num_rows, field.type)])
            for field in schema
            if pa.types.is_nested(field.type)
        }
    return DataTable.of({name: nested[name] if name in nested else content[name] for name in schema.names})


def text_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8; empty ones too, so that a line keeps its number.

    Args:
        path: A file of at most `LARGEST_FILE` bytes.
    """
    with _utf8(path):
        return reading.read_bytes(path, LARGEST_FILE).decode("utf-8-sig").splitlines()


def _text_table(path: Path) -> DataTable:
    return DataTable.of({LINES: [line for line in text_lines(path) if line.strip()]})


READERS: dict[str, Callable[[Path], DataTable]] = {
    ".csv": _separated,
    ".tsv": _separated,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".txt": _text_table,
}
