"""Tables of a user (.csv, .tsv, .jsonl, .parquet, .txt) as a data set: one row, or line of text, per sample.

The targets, the clients and a text are columns by name. All other columns are features: numbers are
standardised with the mean and deviation of the train rows, texts are categories, one number each.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data import reading
from copfl.data.arrays import from_splits
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset
from copfl.data.targets import LARGEST_NUMBER, MOST_AMBIGUOUS
from copfl.errors import DataError, how_to_set, library, one_of, raised_as, unknown
from copfl.tables import listed

Column = list[Any]  # texts or numbers; None where a value is missing
Table = dict[str, Column]  # by name, all of one length

LARGEST_FILE = 512 * reading.MIB  # Python's objects take about ten times as much memory
MOST_CATEGORIES = 1000
FEWEST_ROWS = 50  # in which a column of different whole numbers or texts may be an identifier
MOST_REPEATED = 4  # rows of one text, on average, in such a column
LINES = "text"  # the only column of a .txt file
LONGEST_TEXT = 4096  # characters; a numpy array has the longest text's memory for every text
NOT_A_NUMBER = (TypeError, ValueError, OverflowError)
MOST_SHOWN = 5  # values in a note
MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}


def table_file(
    path: Path,
    *,
    target: str = "",
    client: str = "",
    text: str = "",
    test: str = "",
    drop: str = "",
    categories: str = "",
    missing: str = "refuse",
    kind: str | None = None,
) -> Dataset:
    """A table with the column to predict (`target`), and optionally the clients' column and a text's.

    `target`, `drop` (columns to leave out) and `categories` (numbers that are categories) may be several
    columns, separated by commas. `test` is the file of the test rows. Missing values are refused, or with
    missing=fill the mean or no category; missing=drop leaves their rows out. With kind=next_token the text is
    its own target; a .txt file has nothing else, a text per line.
    """
    if path.suffix.lower() == ".txt":
        text, kind = text or LINES, kind or NEXT_TOKEN
    tables = [read_table(Path(file)) for file in (path, test) if file]
    options = {"target": target, "client": client, "text": text, "drop": drop, "categories": categories}
    return from_tables(tables, path.stem, missing=missing, kind=kind, **options)


def from_tables(
    tables: Sequence[Table],
    name: str,
    *,
    target: str,
    client: str = "",
    text: str = "",
    drop: str = "",
    categories: str = "",
    missing: str = "refuse",
    kind: str | None = None,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """A table of train rows, or of train and test rows, as a data set; see `table_file`."""
    one_of(("refuse", "fill", "drop"), missing=missing)
    known = list(tables[0])
    if kind == NEXT_TOKEN and (target or not text):
        column = how_to_set("data.text", "COLUMN", "--text")
        remedy = f"leave out the target {target}" if target else f"name the column of the texts with {column}"
        raise DataError(f"next_token predicts each token of a text from those before it; {remedy}")
    if not target and kind != NEXT_TOKEN:
        column = how_to_set("data.target", "COLUMN", "--target")
        raise DataError(f"name the column to predict with {column}; the columns are {', '.join(known)}")
    targets, left_out = _columns(target, known), _columns(drop, known)
    clients, texts = _columns(client, known), _columns(text, known)
    as_categories = _columns(categories, known)
    for table in tables[1:]:
        if absent := [column for column in known if column not in table]:
            raise DataError(f'the test table lacks the column "{absent[0]}"')
    special = {*targets, *clients, *texts, *left_out}
    features = [] if texts else [column for column in known if column not in special]
    if not features and not texts:
        raise DataError("there is no column left to predict from; besides the target at least one is needed")
    tables, notes = _without_missing(tables, [*targets, *clients, *texts], features, missing)
    for table in tables:
        for column in (*targets, *clients, *texts, *features):
            nested = [v for v in table[column] if isinstance(v, list | dict)]
            if nested:
                raise DataError(
                    f'the column "{column}" has {str(nested[0])[:40]}; a cell is one number or text'
                )
    labels = [
        _target([table[column] for column in targets], targets, kind)
        if targets
        else np.zeros((len(table[texts[0]]), 1), np.int64)  # the tokens follow from the model's tokenizer
        for table in tables
    ]
    kinds = {array.dtype.kind for array in labels}
    if len(kinds) > 1:  # numbers in one table, texts in the other
        labels = [array.astype(np.str_) for array in labels]
    rows = [np.arange(len(array))[:, None] for array in labels]
    splits: list[Sequence[Any]] = [rows, labels]
    if clients:
        origins = [[str(value) for value in table[clients[0]]] for table in tables]
        is_number = all(value.isdecimal() and str(int(value)) == value for part in origins for value in part)
        splits.append([np.array(part, np.int64 if is_number else np.str_) for part in origins])
    names = classes or (targets if labels[0].dtype.kind == "f" else None)
    called = f'the target column "{",".join(targets)}"'
    data = from_splits(zip(*splits, strict=True), classes=names, kind=kind, name=name, called=called)
    sources = [tables[0], tables[-1]]
    chosen = [part.x[:, 0] for part in (data.train, data.test)]
    if texts:
        x = [_texts(table[texts[0]], rows, notes) for table, rows in zip(sources, chosen, strict=True)]
        others = [column for column in known if column not in special]
        notes += [f"columns not used beside the text: {', '.join(others)}"] if others else []
        data = replace(data, table=TableInfo(tuple(targets), text=texts[0]))
    else:
        encoders = [
            encoder(column, [table[column] for table in tables], chosen[0], column in as_categories)
            for column in features
        ]
        features_of = [encoded(encoders, table) for table in tables]
        x = [features_of[0][chosen[0]], features_of[-1][chosen[1]]]
        notes += [_summary(encoders), *_identifiers(encoders, tables[0])]
        notes += [
            f"test rows: {note}" for table in tables[1:] for note in unknown_categories(encoders, table)
        ]
        data = replace(data, table=TableInfo(tuple(targets), tuple(encoders), missing))
    train, test = (replace(part, x=array) for part, array in zip((data.train, data.test), x, strict=True))
    note = "; ".join(filter(None, (data.note, *notes)))
    return replace(data, train=train, test=test, note=note)


# Features


@dataclass(frozen=True)
class Encoder:
    """How a column becomes numbers, learned from the train rows."""

    name: str
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] = ()  # none: the column has numbers

    def encoded(self, values: Column) -> NDArray[np.float32]:
        """The values as numbers, [n, 1] or [n, categories]; 0 where one is missing."""
        if not self.categories:
            numbers = (floats(values) - self.mean) / self.std
            return np.nan_to_num(numbers, nan=0.0).astype(np.float32)[:, None]
        place = {category: number for number, category in enumerate(self.categories)}
        number = np.array([place.get(str(value), -1) for value in values], np.int64)
        result = np.zeros((len(values), len(self.categories)), np.float32)
        known = np.flatnonzero(number >= 0)  # test rows may have others, which are none of the known
        result[known, number[known]] = 1
        return result


@dataclass(frozen=True)
class TableInfo:
    """What a model needs to know about the table that it was trained on, to take further rows."""

    targets: tuple[str, ...]  # columns to predict
    columns: tuple[Encoder, ...] = ()  # features; none of a table of texts
    missing: str = "refuse"
    text: str | None = None  # the column of the texts


def encoded(encoders: Sequence[Encoder], table: Table) -> NDArray[np.float32]:
    """The features of all rows, [n, features]."""
    return np.concatenate([encoder.encoded(table[encoder.name]) for encoder in encoders], axis=1)


def unknown_categories(encoders: Sequence[Encoder], table: Table) -> list[str]:
    """A note for each column with categories that the train rows do not have: how many cells, and which."""
    notes = []
    for encoder in encoders:
        cells = (
            [str(value) for value in table[encoder.name] if value is not None] if encoder.categories else []
        )
        new = Counter(cell for cell in cells if cell not in encoder.categories)
        if new:
            few = ", ".join(f'"{value[:40]}"' for value, _ in new.most_common(MOST_SHOWN))
            more = f" and {len(new) - MOST_SHOWN} more" if len(new) > MOST_SHOWN else ""
            notes.append(
                f'column "{encoder.name}": {new.total():,} of {len(table[encoder.name]):,} values are categories '
                f"that no train row has, and count as none: {few}{more}"
            )
    return notes


def encoder(name: str, columns: Sequence[Column], rows: NDArray[np.int64], is_category: bool) -> Encoder:
    """The encoder of a column of all tables; `rows` are the train rows of the first."""
    if not is_category and all(_are_numbers(name, column) for column in columns):
        numbers = floats(columns[0])[rows]
        numbers = numbers[~np.isnan(numbers)]
        std = float(numbers.std()) if len(numbers) else 0.0
        return Encoder(name, float(numbers.mean()) if len(numbers) else 0.0, std if std > 1e-12 else 1.0)
    different = tuple(sorted({str(columns[0][row]) for row in rows if columns[0][row] is not None}))
    if len(different) > MOST_CATEGORIES:
        raise DataError(
            f'the column "{name}" has {len(different):,} different texts, at most {MOST_CATEGORIES:,} '
            f"categories are accepted; leave it out with {how_to_set('data.drop', name)}, or if it is the text "
            f"to learn from, or the client, name it with {how_to_set('data.text', name, '--text')} or "
            f"{how_to_set('data.client', name, '--client')}"
        )
    return Encoder(name, categories=different or ("",))


def _are_numbers(name: str, column: Column) -> bool:
    """Whether the values are numbers; a DataError if most are and some are not, or are not finite."""
    try:
        numbers = floats(column)
    except NOT_A_NUMBER:
        wrong = [row for row, value in enumerate(column) if value is not None and not _is_number(value)]
        has_commas = all(_is_number(str(value).replace(",", ".", 1)) for value in column if value is not None)
        if 2 * len(wrong) >= len(column) - column.count(None) and not has_commas:
            return False
        raise DataError(
            f'the column "{name}" has numbers, but {str(column[wrong[0]])[:40]!r} in row {wrong[0] + 1}; '
            f"correct it (1.5, not 1,5), or if its values are categories: {how_to_set('data.categories', name)}"
        ) from None
    if len(wrong := np.flatnonzero(np.abs(numbers) > LARGEST_NUMBER).tolist()):
        cell = str(column[wrong[0]])[:40]
        raise DataError(f'the column "{name}" has {cell} in row {wrong[0] + 1}; all numbers must be finite')
    return True


def floats(column: Column) -> NDArray[np.float64]:
    """The values as numbers, nan where one is missing; ValueError or TypeError if one is not a number."""
    return np.array([np.nan if value is None else value for value in column], dtype=np.float64)


def words(column: Column) -> NDArray[np.str_]:
    """The values as texts."""
    return np.array([str(value) for value in column])


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except NOT_A_NUMBER:
        return False
    return True


def _texts(column: Column, rows: NDArray[np.int64], notes: list[str]) -> NDArray[np.str_]:
    """The texts of these rows, cut where they are too long."""
    texts = [str(column[row]) for row in rows]
    if long := sum(len(text) > LONGEST_TEXT for text in texts):
        notes.append(f"{long:,} texts are cut to {LONGEST_TEXT:,} characters")
    return np.array([text[:LONGEST_TEXT] for text in texts])


def _summary(encoders: Sequence[Encoder]) -> str:
    """Which columns are numbers and which categories, for readers."""
    numbers = [e.name for e in encoders if not e.categories]
    words = [f"{e.name} ({len(e.categories)})" for e in encoders if e.categories]
    parts = [f"{len(numbers)} standardised columns of numbers"] if numbers else []
    parts += [f"categories: {', '.join(words[:8])}{', ...' if len(words) > 8 else ''}"] if words else []
    return ", ".join(parts)


def _identifiers(encoders: Sequence[Encoder], table: Table) -> list[str]:
    """A note for columns of different whole numbers or of rare texts: numbers of patients, names, dates."""

    def is_identifier(column: Encoder) -> bool:
        rows = len(table[column.name])
        if column.categories:
            return rows < MOST_REPEATED * len(column.categories)
        numbers = floats(table[column.name])
        return len(np.unique(numbers)) == rows and bool((numbers == np.round(numbers)).all())

    found = [e.name for e in encoders if len(table[e.name]) >= FEWEST_ROWS and is_identifier(e)]
    names = ",".join(found)
    drop = how_to_set("data.drop", names)
    return (
        [f"{names}: values that few rows share; leave out identifiers and dates with {drop}"] if found else []
    )


# Targets and missing values


def _target(columns: Sequence[Column], names: Sequence[str], kind: str | None) -> NDArray[Any]:
    """One target column as texts, whole numbers or numbers; several as numbers [n, k]."""
    if len(columns) > 1:
        for name, column in zip(names, columns, strict=True):
            if not _are_numbers(name, column):
                raise DataError(f'the target column "{name}" has texts; several targets must be numbers')
        return np.stack([floats(column) for column in columns], axis=1)
    (column,), (name,) = columns, names
    if kind == CLASSIFICATION or not _are_numbers(name, column):
        if kind not in (None, CLASSIFICATION):
            shown = next(str(value) for value in column if not _is_number(value))
            raise DataError(f'the target column "{name}" has {shown[:40]!r}; {kind} needs numbers')
        return words(column)
    numbers = floats(column)
    is_whole = (numbers == np.round(numbers)).all()
    if kind is None and is_whole and len(np.unique(numbers)) <= MOST_AMBIGUOUS:
        return numbers.astype(np.int64)
    return numbers


def _without_missing(
    tables: Sequence[Table], needed: Sequence[str], features: Sequence[str], how: str
) -> tuple[list[Table], list[str]]:
    """The tables without rows that lack a value, or unchanged; and notes."""
    columns = [*needed, *features]
    counts = {name: sum(table[name].count(None) for table in tables) for name in columns}
    found = {name: count for name, count in counts.items() if count}
    if not found:
        return list(tables), []
    shown = listed([f"{name} {count:,}" for name, count in found.items()], 8)
    fill = f"{how_to_set('data.missing', 'fill')} (the column's mean, no category)"
    drop = f"{how_to_set('data.missing', 'drop')} (without those rows)"
    if how == "fill" and not found.keys() & set(needed):
        return list(tables), [f"missing values filled: {shown}"]
    if how != "drop":
        remedy = drop if found.keys() & set(needed) else f"{fill} or {drop}"
        raise DataError(
            f"values are missing, in {len(found)} columns: {shown}. Complete them, or use {remedy}"
        )
    kept = []
    for table in tables:
        rows = [n for n in range(len(table[columns[0]])) if all(table[c][n] is not None for c in columns)]
        kept.append({name: [column[n] for n in rows] for name, column in table.items()})
    sizes = [sum(len(table[columns[0]]) for table in some) for some in (tables, kept)]
    if not sizes[1]:
        raise DataError(
            f"every row has a missing value: {shown}; use {fill} or {how_to_set('data.drop', 'COLUMN')}"
        )
    return kept, [f"{sizes[0] - sizes[1]:,} of {sizes[0]:,} rows with missing values are left out: {shown}"]


def names_of(given: str, known: Collection[str]) -> list[str]:
    """The name of a known column, or several names separated by commas."""
    return [given] if given in known else [part.strip() for part in given.split(",") if part.strip()]


def _columns(given: str, known: Sequence[str]) -> list[str]:
    """The columns of a name, or of several separated by commas."""
    names = names_of(given, known)
    for name in names:
        if name not in known:
            raise DataError(str(unknown("column", name, known)))
    return names


# Files


def read_table(path: Path) -> Table:
    """The columns of a .csv, .tsv, .jsonl or .parquet file."""
    with reading.data_errors(str(path), f"{path.suffix} file"):
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise DataError(
                f"{path} has {size:,} bytes; at most {LARGEST_FILE:,} are read into memory. Take a part of "
                "its rows or columns, or pass arrays from Python: copfl.run(dataset=(x, y))"
            )
        table = READERS[path.suffix.lower()](path)
        if not table or not len(next(iter(table.values()))):
            raise DataError(f"{path} has no rows")
        return table


def _csv(path: Path) -> Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline()
        file.seek(0)
        delimiter = max(",;\t", key=head.count)
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        names = [name.strip() for name in next(rows, [])]
        if doubled := [name for name in names if names.count(name) > 1 or not name]:
            raise DataError(
                f"{path} has the column {doubled[0]!r} twice, or without a name, in its first row"
            )
        cells = []
        for row in rows:
            if len(row) == len(names):
                cells.append(row)
            elif row:
                found = f"{path}, line {rows.line_num}, has {len(row)} values"
                raise DataError(f"{found}; the first line names {len(names)} columns")
    columns = zip(*cells, strict=True) if cells else ([] for _ in names)
    return {name: [_plain(cell) for cell in column] for name, column in zip(names, columns, strict=True)}


def _plain(cell: str) -> str | None:
    cell = cell.strip()
    return None if cell.lower() in MISSING else cell


def _jsonl(path: Path) -> Table:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            with raised_as(DataError, f"{path}, line {number}, is not valid JSON: {{}}", ValueError):
                row = json.loads(line)
            if not isinstance(row, dict):
                raise DataError(f'{path}, line {number}, is no object such as {{"text": ..., "label": ...}}')
            rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [cell(row.get(name)) for row in rows] for name in names}


def cell(value: Any) -> Any:
    """A value of a typed file; nan counts as missing."""
    is_missing = value is None or (isinstance(value, float) and value != value) or value == ""
    return None if is_missing else int(value) if isinstance(value, bool) else value


def _parquet(path: Path) -> Table:
    file = library("pyarrow.parquet", "reading .parquet").ParquetFile(path)
    groups = range(file.metadata.num_row_groups)
    if (size := sum(file.metadata.row_group(n).total_byte_size for n in groups)) > LARGEST_FILE:
        raise DataError(f"{path} would unpack to {size:,} bytes; at most {LARGEST_FILE:,} are accepted")
    content = file.read()
    return {name: [cell(v) for v in content.column(name).to_pylist()] for name in content.column_names}


READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".txt": lambda path: {LINES: list(filter(str.strip, path.read_text("utf-8").splitlines()))},
}
