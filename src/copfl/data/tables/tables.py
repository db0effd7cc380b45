"""Tables of a user (.csv, .tsv, .jsonl, .parquet, .txt) as a data set: one row, or line of text, per sample.

The targets, the clients and a text are columns by name. All other columns are features: numbers are
standardised with the mean and deviation of the train rows, texts are categories, one number each.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.data.arrays import from_splits
from copfl.data.copies import at_sites, copies, mixed, told_apart
from copfl.data.held_out import Marks, united
from copfl.data.samples import CLASSIFICATION, KINDS, NEXT_TOKEN, REGRESSION, SURVIVAL, Dataset
from copfl.data.tables.columns import (
    FEW,
    NUMBER,
    Column,
    DataTable,
    are_dates,
    as_numbers,
    cell_hashes,
    check_plain,
    coded,
    column_of,
    floats,
    is_number,
    joined,
    not_numbers,
    present,
    text_of,
    times_of,
    words,
)
from copfl.data.tables.doubts import Doubts, doubts_of, group_columns, identifiers, site_column
from copfl.data.tables.encoders import Encoder, TableInfo, encoded, encoder, unknown_categories
from copfl.data.tables.files import LINES, READ_AS_MISSING, first_names, read_table
from copfl.data.targets import LARGEST_NUMBER, MOST_AMBIGUOUS
from copfl.errors import DataError, PartError, how_to_set, one_of, raised_as, unknown
from copfl.tables import listed

FEWEST_ROWS = 50  # in which a column of different whole numbers or texts may be an identifier
MOST_REPEATED = 4  # rows of one text, on average, in such a column
LEAST_REPEATED = 5  # rows of one whole number, on average, in a target that may be classes
MOST_WORDS = 3  # on average, in a category; more are a sentence
SIGNED_NUMBER = re.compile(r"[€$£]?\s*[+-]?\d[\d.,' ]*\s*[%€$£]?")  # 12 %, $1,200
# The options that name columns, in the order in which they are looked up.
COLUMNS = ("target", "event", "start", "drop", "client", "text", "group", "time", "categories")
DURATION = "make a column of numbers of it, such as the days from the first visit to the date"
ROW = "\0row"  # beside the columns while rows are left out: their numbers in the file
LONGEST_TEXT = 4096  # characters; a numpy array has the longest text's memory for every text


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
    group: str = "",
    time: str = "",
    split: int = 0,
    event: str = "",
    start: str = "",
    keep_time: bool = False,
) -> Dataset:
    """A table in a file as a data set.

    Args:
        path: The file of the train rows, or of all rows; a fifth of them is test then.
        target: The column to predict, or several separated by commas.
        client: The column that says whose row it is.
        text: The column of the texts to learn from; all other columns are left out.
        test: The file of the test rows.
        drop: Columns to leave out, separated by commas.
        categories: Columns of numbers that are categories, separated by commas.
        missing: What happens to missing values: "refuse"; "fill" (the column's mean, with a feature that says
            where a number is missing, or no category); "drop" (their rows).
        kind: The kind of the targets, of `copfl.data.samples.KINDS`; None: inferred. With "next_token" the
            text is its own target; a .txt file has nothing else, a text per line.
        group: The column that says whose row it is within a client, such as the patient: all rows of one are
            on one side, train or test.
        time: The column that says when; the later rows of each client are test.
        split: The seed of the draw of the test rows.
        event: The column that says whether the event was seen at the time that the target has; with it the
            targets are of survival.
        start: Of survival, the column of the time after which a row is at risk; none: from time 0.
        keep_time: Whether the column that says when is learned from, too.
    """
    if path.suffix.lower() == ".txt":
        text, kind = text or LINES, kind or NEXT_TOKEN
    files = [Path(file) for file in (path, test) if file]
    return from_tables(
        map(read_table, files),
        path.stem,
        target=target,
        client=client,
        text=text,
        drop=drop,
        categories=categories,
        missing=missing,
        kind=kind,
        group=group,
        time=time,
        split=split,
        event=event,
        start=start,
        keep_time=keep_time,
    )


def check_columns(path: Path, options: Mapping[str, Any]) -> None:
    """A DataError for an option that names no column of the file, as far as its first line tells.

    Args:
        path: The file.
        options: Some of `table_file`, in any order.
    """
    if known := first_names(path):
        for use in COLUMNS:
            _columns(str(options.get(use) or ""), known)


def from_tables(
    tables: Iterable[DataTable],
    name: str,
    *,
    target: str,
    client: str = "",
    text: str = "",
    drop: str = "",
    categories: str = "",
    missing: str = "refuse",
    kind: str | None = None,
    group: str = "",
    time: str = "",
    split: int = 0,
    event: str = "",
    start: str = "",
    keep_time: bool = False,
    classes: Sequence[str] | None = None,
    encoders: Sequence[Encoder] = (),
    leave_out: bool = True,
) -> Dataset:
    """A table of train rows, or of train and test rows, as a data set.

    Args:
        tables: One or two.
        name: Of the data set.
        classes: The names of the classes, where the table does not have all of them.
        encoders: Those that are agreed with others; else they are learned from the train rows.
        leave_out: Whether train rows that are copies of test rows, or belong to them, are left out.
        target, client, text, drop, categories, missing, kind, group, time, split, event, start, keep_time: As of
            `table_file`.
    """
    kind = SURVIVAL if event and kind is None else kind
    one_of(("refuse", "fill", "drop"), missing=missing)
    if kind is not None:
        one_of(KINDS, kind=kind)
    tables = list(tables)
    known = list(tables[0].columns)
    roles, as_categories = (
        _roles(known, target, client, text, drop, kind, group, time, event, start, keep_time),
        _columns(categories, known),
    )
    for table in tables[1:]:
        if absent := [column for column in known if column not in table.columns]:
            raise DataError(f'the test table lacks the column "{absent[0]}"')
    may_be_dates = [] if encoders else [c for c in roles.features if c not in as_categories]
    dates = [c for c in may_be_dates if are_dates(joined([table.columns[c] for table in tables]))]
    about_dates = [_about_dates(name, joined([table.columns[name] for table in tables])) for name in dates]
    roles = roles._replace(features=[column for column in roles.features if column not in dates])
    if not roles.features and not roles.texts:
        why = f", as no model learns from dates ({listed(dates, 5)})" if dates else ""
        raise DataError(
            f"there is no column left to predict from{why}; besides the target at least one is needed"
        )
    notes = [note for table in tables for note in table.notes]
    labelling = [*roles.targets, *roles.clients, *roles.groups, *roles.times, *roles.texts]
    rows, spare = sum(map(len, tables)), {column: tables[0].columns[column] for column in roles.unused}
    tables = [
        DataTable(
            {column: table.columns[column] for column in (*labelling, *roles.features)}
            | {ROW: column_of(np.arange(len(table)))}
        )
        for table in tables
    ]
    words = [note for note in notes if note.startswith(READ_AS_MISSING)]
    with raised_as(DataError, "; ".join(("{}", *words)), DataError) if words else nullcontext():
        tables, missing_notes = _without_missing(tables, labelling, roles.features, missing)
    numbers = [table.columns.pop(ROW).to_numpy() for table in tables]
    for table in tables:
        for column, cells in table.columns.items():
            check_plain(column, cells)
    numbered = _row_numbers(tables, roles, kind, classes, name, split, leave_out)
    about_stretches = _about_stretches(numbered, bool(roles.groups))
    chosen = [part.x[:, 0] for part in (numbered.train, numbered.test)]
    if roles.texts:
        samples = _of_texts(tables, chosen, roles)
    else:
        samples = _of_columns(tables, chosen, chosen[0], roles, as_categories, encoders, missing)
    train, test = (
        replace(part, row=own[part.x[:, 0]])
        for part, own in zip((numbered.train, numbered.test), (numbers[0], numbers[-1]), strict=True)
    )
    data = _with_features(replace(numbered, train=train, test=test), samples, group, time, split)
    about_target = _doubtful_target(data, roles.targets) if kind is None else []
    are_all_rows = sum(map(len, tables)) == rows
    # Where encoders are agreed, the owner of the table has checked it against the contract.
    doubts = Doubts([], []) if encoders else doubts_of(tables, numbered, samples.info, are_all_rows)
    warnings = [*data.warnings, *doubts.warnings]
    if not encoders:
        learned = DataTable({column.name: tables[0].columns[column.name] for column in samples.info.columns})
        of_sites = tables[0].columns[roles.clients[0]] if roles.clients else None
        warnings = [
            *_about_names(learned, DataTable(spare) if spare else learned, of_sites, roles),
            *warnings,
        ]
    warnings = [*about_dates, *warnings]
    about_time = _about_time(roles, tables[0]) if not encoders else []
    about_rows = (*about_time, *missing_notes, *about_target, *about_stretches, *samples.notes, *doubts.notes)
    note = "; ".join(filter(None, (data.note, *notes, *about_rows)))
    cells = None if roles.texts or encoders else Cells(tables, chosen, roles, as_categories, missing)
    return replace(data, note=note, warnings=tuple(warnings), cells=cells)


class Cells(NamedTuple):
    """A table beside its features, whose encoders can be learned again."""

    tables: Sequence[DataTable]  # one or two
    chosen: Sequence[NDArray[np.int64]]  # the train and the test rows
    roles: _Roles
    as_categories: Sequence[str]
    missing: str


def learned_from(data: Dataset, rows: NDArray[np.int64]) -> Dataset:
    """The data set whose encoders, and scales of targets, are learned of some train samples.

    What others agreed on, and arrays, stay as they are.

    Args:
        data: With these samples.
        rows: Their numbers.
    """
    if data.cells is None:
        return replace(data, learned=rows)
    data = replace(data, learned=rows, origin=data.digest)
    tables, chosen, roles, as_categories, missing = data.cells
    samples = _of_columns(tables, chosen, chosen[0][rows], roles, as_categories, (), missing)
    return _with_features(data, samples, data.table.group, data.table.time, data.table.split)


def _with_features(data: Dataset, samples: _Samples, group: str, time: str, split: int) -> Dataset:
    """The data set with these features of its rows."""
    train, test = (
        replace(part, x=array) for part, array in zip((data.train, data.test), samples.x, strict=True)
    )
    return replace(
        data, train=train, test=test, table=replace(samples.info, group=group, time=time, split=split)
    )


class _Roles(NamedTuple):
    """What the columns of a table are for."""

    targets: list[str]
    clients: list[str]  # one or none
    texts: list[str]  # one or none
    features: list[str]  # none beside a text
    unused: list[str]
    groups: list[str]  # one or none
    times: list[str]  # one or none

    @property
    def read(self) -> list[str]:
        """The columns that are read, without the clients' column."""
        return [*self.targets, *self.groups, *self.times, *self.texts, *self.features]


def _roles(
    known: Sequence[str],
    target: str,
    client: str,
    text: str,
    drop: str,
    kind: str | None,
    group: str,
    time: str,
    event: str,
    start: str,
    keep_time: bool,
) -> _Roles:
    """What each of these columns is for; the rest as of `table_file`."""
    if kind == NEXT_TOKEN and (target or not text):
        column = how_to_set("data.text", "COLUMN", "--text")
        remedy = f"leave out the target {target}" if target else f"name the column of the texts with {column}"
        raise DataError(f"next_token predicts each token of a text from those before it; {remedy}")
    if not target and kind != NEXT_TOKEN:
        column = how_to_set("data.target", "COLUMN", "--target")
        free = [name for name in known if name not in (client, text, event, start, group, time)]
        raise PartError(
            f"name the column to predict with {column}; the columns are {', '.join(known)}",
            target=free[-1] if free else "",
        )
    targets = [column for written in (target, event, start) for column in _columns(written, known)]
    left_out = _columns(drop, known)
    for use, column in (("event", event), ("start", start)):
        if column and kind != SURVIVAL:
            problem = f'the column "{column}" is named as {use}, and the task is {kind or "not of survival"}'
            raise DataError(f"{problem}; leave one of them out")
    if kind == SURVIVAL and len(targets) not in ((2 + bool(start),) if event or start else (2, 3)):
        both = (
            f"{how_to_set('data.target', 'TIME', '--target')} {how_to_set('data.event', 'EVENT', '--event')}"
        )
        raise DataError(
            f"survival has two columns, the time and whether the event was seen then; name them: {both}"
        )
    clients, texts, groups, times = (_columns(written, known) for written in (client, text, group, time))
    _check_uses(
        {
            "target": targets,
            "client": clients,
            "text": texts,
            "group": groups,
            "time": times,
            "drop": left_out,
        }
    )
    special = {*targets, *clients, *texts, *groups, *left_out} | set([] if keep_time else times)
    others = [column for column in known if column not in special]
    return _Roles(targets, clients, texts, [] if texts else others, others if texts else [], groups, times)


class _Samples(NamedTuple):
    """What a model learns from."""

    x: list[NDArray[Any]]  # of the train and the test rows
    info: TableInfo
    notes: list[str]


def _of_texts(tables: Sequence[DataTable], chosen: Sequence[NDArray[Any]], roles: _Roles) -> _Samples:
    """The chosen train and test rows of a column of texts."""
    notes: list[str] = []
    sources = zip((tables[0], tables[-1]), chosen, strict=True)
    x = [_texts(table.columns[roles.texts[0]], rows, notes) for table, rows in sources]
    if roles.unused:
        notes.append(f"columns not used beside the text: {', '.join(roles.unused)}")
    return _Samples(x, TableInfo(tuple(roles.targets), text=roles.texts[0]), notes)


def _of_columns(
    tables: Sequence[DataTable],
    chosen: Sequence[NDArray[Any]],
    learned: NDArray[np.int64],
    roles: _Roles,
    as_categories: Sequence[str],
    agreed: Sequence[Encoder],
    missing: str,
) -> _Samples:
    """The chosen train and test rows of columns of numbers and categories, encoded.

    Args:
        tables: One or two. Their texts of numbers become numbers.
        chosen: The train and the test rows.
        learned: The train rows of which encoders are learned.
        roles: What the columns are for.
        as_categories: Columns of numbers that are categories.
        agreed: The encoders that are agreed with others; none: they are learned.
        missing: As of `table_file`.
    """
    of_numbers = {e.name for e in agreed if not e.categories}
    as_categories = [*as_categories, *(e.name for e in agreed if e.categories)]
    for column in [column for column in roles.features if column not in as_categories]:
        numbers = [numbers_of(column, table.columns[column]) for table in tables]
        if all(cells is not None for cells in numbers):
            for table, cells in zip(tables, numbers, strict=True):
                table.columns[column] = cells  # in place of their texts, which take more memory
        elif column in of_numbers:
            raise DataError(f'the column "{column}" has texts, and numbers in the federation')
    constant = [] if agreed else [c for c in roles.features if _is_constant([t.columns[c] for t in tables])]
    if len(constant) == len(roles.features):
        raise DataError(
            f"every column has one value in all rows ({listed(constant, 5)}): nothing can be learned"
        )
    encoders = agreed or [
        encoder(
            column,
            [table.columns[column] for table in tables],
            learned,
            column in as_categories,
            indicator=missing == "fill",
        )
        for column in roles.features
        if column not in constant
    ]
    notes = [_summary(encoders), *_doubtful(encoders, tables[0])]
    if constant:
        notes.append(f"left out, as all rows have one value: {', '.join(constant)}")
    if agreed:
        notes += unknown_categories(encoders, tables[0], "the federation does not have")
    notes += [f"test rows: {note}" for table in tables[1:] for note in unknown_categories(encoders, table)]
    sources = zip((tables[0], tables[-1]), chosen, strict=True)
    x = [encoded(encoders, table, rows) for table, rows in sources]
    return _Samples(x, TableInfo(tuple(roles.targets), tuple(encoders), missing), notes)


def _row_numbers(
    tables: Sequence[DataTable],
    roles: _Roles,
    kind: str | None,
    classes: Sequence[str] | None,
    name: str,
    split: int,
    leave_out: bool = True,
) -> Dataset:
    """A data set whose samples are the numbers of rows [n, 1]: it says which rows are train and test."""
    targets, clients = roles.targets, roles.clients
    labels = [
        _target([table.columns[column] for column in targets], targets, kind)
        if targets
        else np.zeros((len(table), 1), np.int64)  # the tokens follow from the model's tokenizer
        for table in tables
    ]
    kinds = {array.dtype.kind for array in labels}
    if len(kinds) > 1:  # numbers in one table, texts in the other
        labels = [array.astype(np.str_) for array in labels]
    rows = [np.arange(len(array))[:, None] for array in labels]
    splits: list[Sequence[Any]] = [rows, labels]
    if clients:
        splits.append(_origins([table.columns[clients[0]] for table in tables]))
    names = classes or (targets if labels[0].dtype.kind == "f" else None)
    called = f'the target column "{",".join(targets)}"'
    return from_splits(
        zip(*splits, strict=True),
        classes=names,
        kind=kind,
        name=name,
        called=called,
        marks=_marks(tables, roles),
        split=split,
        leave_out=leave_out,
    )


def _marks(tables: Sequence[DataTable], roles: _Roles) -> list[Marks]:
    """What the rows of each table are known by, what belongs together, and when they were."""
    columns = {
        name: joined([table.columns[name] for table in tables]) for name in (*roles.clients, *roles.read)
    }
    site = np.zeros(sum(map(len, tables)), np.int64)
    for client in roles.clients:
        site = coded(columns[client]).codes
    cells = {name: cell_hashes(columns[name]) for name in roles.read}
    keys = at_sites(cells, site)
    for group in roles.groups:
        first, member = np.unique(
            mixed(cells[group] + mixed(site.astype(np.uint64))), return_index=True, return_inverse=True
        )[1:]
        unit = united(first[member])
    if not roles.groups:
        first = copies(keys, list(cells.values()), site, bool(roles.texts))
        unit, keys = united(first), told_apart(keys, site, first)
    time = times_of(roles.times[0], columns[roles.times[0]]) if roles.times else None
    marks, begins = Marks(keys, unit, time), np.cumsum([0, *map(len, tables)]).tolist()
    return [marks.take(slice(*ends)) for ends in itertools.pairwise(begins)]


def numbered_rows(
    tables: Sequence[DataTable],
    targets: Sequence[str],
    features: Sequence[str],
    missing: str,
    kind: str,
    group: str = "",
    time: str = "",
    split: int = 0,
    text: str = "",
    leave_out: bool = True,
) -> Dataset:
    """The rows of a site that train and that test, without what `missing` drops: each sample is its number [n, 1].

    Args:
        tables: One, with some rows for testing, or train and test; numbers are those in its own table.
        targets, features: The columns that a federation uses; of texts no features.
        missing, kind, group, time, split, text: As of `table_file`.
        leave_out: As of `from_tables`.
    """
    labelling = [*targets, *filter(None, (group, time, text))]
    used = [*labelling, *features]
    numbered = [
        DataTable({"": column_of(np.arange(len(table))), **{name: table.columns[name] for name in used}})
        for table in tables
    ]
    complete, _ = _without_missing(numbered, labelling, features, missing)
    parts = [DataTable({name: table.columns[name] for name in used}) for table in complete]
    roles = _Roles(
        list(targets),
        [],
        [text] if text else [],
        list(features),
        [],
        [group] if group else [],
        [time] if time else [],
    )
    data = _row_numbers(parts, roles, kind, None, "", split, leave_out)
    numbers = [table.columns[""].to_numpy() for table in (complete[0], complete[-1])]
    train, test = (
        replace(part, x=own[part.x]) for part, own in zip((data.train, data.test), numbers, strict=True)
    )
    return replace(data, train=train, test=test)


# Features


def numbers_of(name: str, column: Column) -> Column | None:
    """The column as numbers, None if it has texts; a DataError if most are numbers and some not finite.

    Args:
        name: Of the column, for the error.
        column: Its cells.
    """
    numbers = as_numbers(column)
    if numbers is None:
        wrong = not_numbers(column)
        few = coded(column.take(wrong)).values
        has_commas = all(re.match(NUMBER, text.replace(",", ".", 1)) for text in few)
        if 2 * len(wrong) >= len(column) - column.null_count and not has_commas:
            return None
        other = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        remedy = "write 1.5, not 1,5" if has_commas else "leave a cell empty if its value is not known"
        raise PartError(
            f'the column "{name}" has numbers, but {few[0][:40]!r} in row {wrong[0] + 1}{other}; {remedy}, or if '
            f"its values are categories: {how_to_set('data.categories', name)}",
            categories=name,
        )
    if len(wrong := np.flatnonzero(np.abs(floats(numbers)) > LARGEST_NUMBER)):
        cell = str(column[int(wrong[0])])[:40]
        raise DataError(
            f'the column "{name}" has {cell} in row {wrong[0] + 1}; numbers must be finite, up to '
            f"{LARGEST_NUMBER:g}"
        )
    return numbers


def _about_names(learned: DataTable, named: DataTable, site: Column | None, roles: _Roles) -> list[str]:
    """Warnings of columns that look like a site, or like the number of a patient.

    Args:
        learned: The columns to learn from.
        named: The same, or those beside a text.
        site: Of each row; None: no column was named as the client.
        roles: What the columns are for.
    """
    found = [one for one in [site_column(named) if site is None else None] if one is not None]
    patients = [] if site is None or roles.groups or roles.texts else group_columns(learned, site)
    known = {*(one.column for one in found), *(one.column for one in patients)}
    numbers = [one for one in identifiers(learned) if one.column not in known]
    return [*(one.text for one in found), *(one.text for one in patients), *(one.text for one in numbers)]


def _about_dates(name: str, column: Column) -> str:
    """What a column is that no model learns from, and what its owner can do."""
    return (
        f'the column "{name}" has dates such as {column.drop_null()[0].as_py()}, and is left out, as no model learns '
        "from dates; a number made of it may help, such as the days between two dates; if it says when a row was, add "
        f"{how_to_set('data.time', name, '--time')}"
    )


def _about_time(roles: _Roles, table: DataTable) -> list[str]:
    """That the column which says when is not learned from, and how it is."""
    if not roles.times or roles.times[0] in roles.features or roles.texts:
        return []
    (name,) = roles.times
    note = f'the column "{name}" says when a row was, and is not learned from'
    if as_numbers(table.columns[name]) is None:
        return [f"{note}; a number made of the dates, in a column of its own, would be"]
    return [f"{note}; to learn from it too: {how_to_set('data.keep_time', 'true')}"]


def _is_constant(parts: Sequence[Column]) -> bool:
    """Whether all rows have the same value, or none has one; a value beside missing ones tells rows apart."""
    cells = joined(parts)
    if 0 < cells.null_count < len(cells):
        return False
    return all(len(some.unique()) == 1 for some in (cells[:FEW], cells))  # most columns vary at once


def _origins(columns: Sequence[Column]) -> list[NDArray[Any]]:
    """The client of each row of each table: whole numbers if all of them are, otherwise texts."""
    parts = [coded(column) for column in columns]
    names = [[text_of(value) for value in part.values] for part in parts]
    are_numbers = all(name.isdecimal() and str(int(name)) == name for part in names for name in part)
    dtype: Any = np.int64 if are_numbers else np.str_
    return [np.array(texts, dtype)[part.codes] for texts, part in zip(names, parts, strict=True)]


def _texts(column: Column, rows: NDArray[np.int64], notes: list[str]) -> NDArray[np.str_]:
    """The texts of these rows, cut where they are too long."""
    texts = [text_of(value) for value in column.take(rows).to_pylist()]
    if long := sum(len(text) > LONGEST_TEXT for text in texts):
        notes.append(f"{long:,} texts are cut to {LONGEST_TEXT:,} characters")
    return np.array([text[:LONGEST_TEXT] for text in texts])


def _summary(encoders: Sequence[Encoder]) -> str:
    """Which columns are numbers and which categories, for readers."""
    numbers = [e.name for e in encoders if not e.categories]
    words = [f"{e.name} ({len(e.categories)})" for e in encoders if e.categories]
    parts = [f"numbers, standardised: {listed(numbers, 8)}"] if numbers else []
    if marked := [e.name for e in encoders if e.indicator]:
        parts.append(f"a column that says where it is missing for {listed(marked, 8)}")
    parts += [f"categories: {', '.join(words[:8])}{', ...' if len(words) > 8 else ''}"] if words else []
    return "; ".join(parts)


def _doubtful(encoders: Sequence[Encoder], table: DataTable) -> list[str]:
    """A note for columns that hardly help as they are: sentences, numbers with a sign, and identifiers.

    A column of sentences that hardly repeat is an error: whoever has one wants to learn from its words.
    """
    if len(table) < FEWEST_ROWS:
        return []
    signs = [e.name for e in encoders if _are_signed(e.categories)]
    rare = [e for e in encoders if e.name not in signs and _is_rare(e, table)]
    sentences = [e.name for e in rare if e.categories and _words(e.categories) > MOST_WORDS]
    numbered = {one.column for one in identifiers(table)}  # a warning says it of these
    unlike = [e.name for e in rare if e.name not in (*sentences, *numbered)]
    notes = []
    if names := ",".join(unlike):
        leave_out = f"leave out identifiers with {how_to_set('data.drop', names)}"
        notes.append(f"{names}: few rows share a value; {leave_out}")
    if names := ",".join(signs):
        notes.append(
            f"{names}: numbers with a sign or separator, each a category, so write plain numbers, such as 12.5"
        )
    for e in rare:
        if e.name in sentences and len(table) < 2 * len(e.categories):
            raise PartError(
                f'the column "{e.name}" has {len(e.categories):,} different sentences in {len(table):,} rows, and as '
                f"categories they tell nothing about other rows; learn from them with "
                f"{how_to_set('data.text', e.name, '--text')}, or leave the column out with "
                f"{how_to_set('data.drop', e.name)}",
                drop=e.name,
            )
    for name in sentences:
        notes += [f"{name}: sentences, learn from them with {how_to_set('data.text', name, '--text')}"]
    return notes


def _are_signed(categories: Sequence[str]) -> bool:
    """Whether all are numbers, and some have a sign or separator that plain numbers do not have."""
    has_signs = any(set("%€$£,'") & set(text) for text in categories)
    return has_signs and all(map(SIGNED_NUMBER.fullmatch, categories))


def _is_rare(column: Encoder, table: DataTable) -> bool:
    """Whether few rows share a text, or all have different whole numbers."""
    if column.categories:
        return len(table) < MOST_REPEATED * len(column.categories)
    return all_differ(table.columns[column.name])


def all_differ(column: Column) -> bool:
    """Whether a column has another whole number in each row, of rows enough to tell."""
    if len(column) < FEWEST_ROWS or not is_number(column):
        return False
    numbers = floats(column)
    return bool((numbers == np.round(numbers)).all()) and len(np.unique(numbers)) == len(numbers)


def _words(texts: Sequence[str]) -> float:
    """How many words a text has on average."""
    return sum(len(text.split()) for text in texts) / len(texts)


# Targets and missing values


def _doubtful_target(data: Dataset, names: Sequence[str]) -> list[str]:
    """What to do if whole numbers that repeat are no values."""
    y = data.train.y
    numbers = len(np.unique(y))
    is_doubtful = data.kind == REGRESSION and len(names) == 1 and (y == np.round(y)).all()
    if not is_doubtful or len(y) < LEAST_REPEATED * numbers:
        return []
    as_classes = how_to_set("data.kind", CLASSIFICATION, "--task")
    taken = f"the {numbers} whole numbers of {names[0]} are values to predict"
    return [f"{taken}; if they are classes: {as_classes}"]


def _about_stretches(data: Dataset, are_grouped: bool) -> list[str]:
    """A note where rows have a start and nothing says whose they are; a DataError if two of one patient overlap."""
    if data.kind != SURVIVAL or data.train.y.shape[1] < 3:
        return []
    if not are_grouped:
        group = how_to_set("data.group", "COLUMN", "--group")
        return [f"rows have a start: if a patient has several, keep them on one side with {group}"]
    for part in (data.train, data.test):
        if part.unit is None:  # one row each
            continue
        order = np.lexsort((part.y[:, 2], part.unit))
        (end, begin), unit = part.y[order][:, [0, 2]].T, part.unit[order]
        if len(overlaps := np.flatnonzero((unit[1:] == unit[:-1]) & (begin[1:] < end[:-1]))):
            first = overlaps[0]
            raise DataError(
                f"a patient has a row until {end[first]:g} and one that starts at {begin[first + 1]:g}: the patient "
                "would be at risk twice; rows of one group must not overlap"
            )
    return []


def _target(columns: Sequence[Column], names: Sequence[str], kind: str | None) -> NDArray[Any]:
    """One target column as texts, whole numbers or numbers; several as numbers [n, k]."""
    if len(columns) > 1:
        parts = []
        for name, column in zip(names, columns, strict=True):
            if (numbers := numbers_of(name, column)) is None:
                needed = "time and event" if kind == SURVIVAL else "several targets"
                what = f"dates; {DURATION}; {needed}" if are_dates(column) else f"texts; {needed}"
                raise DataError(f'the target column "{name}" has {what} must be numbers')
            parts.append(floats(numbers))
        return np.stack(parts, axis=1)
    (column,), (name,) = columns, names
    numbers = None if kind == CLASSIFICATION else numbers_of(name, column)
    if numbers is None:
        if kind != CLASSIFICATION and are_dates(column):
            raise DataError(f'the target column "{name}" has dates; {DURATION}')
        if kind not in (None, CLASSIFICATION):
            shown = str(column[int(not_numbers(column)[0])])
            raise DataError(f'the target column "{name}" has {shown[:40]!r}; {kind} needs numbers')
        return words(column).astype(np.str_)
    values = floats(numbers)
    is_whole = (values == np.round(values)).all()
    if kind is None and is_whole and len(np.unique(values)) <= MOST_AMBIGUOUS:
        return values.astype(np.int64)
    return values


def _without_missing(
    tables: list[DataTable], needed: Sequence[str], features: Sequence[str], how: str
) -> tuple[list[DataTable], list[str]]:
    """The tables without rows that lack a value, or unchanged; and notes."""
    columns = [*needed, *features]
    counts = {name: sum(table.columns[name].null_count for table in tables) for name in columns}
    gaps = {name: count for name, count in counts.items() if count}
    if not gaps:
        return tables, []
    shown = listed([f"{name} {count:,}" for name, count in gaps.items()], 8)
    unfilled = [name for name in gaps if name in needed]
    if how == "fill":
        if not unfilled:
            return tables, [f"missing values filled: {shown}"]
        empty = np.flatnonzero(~np.all([present(tables[0].columns[name]) for name in unfilled], axis=0))
        first = f", the first in row {empty[0] + 1}" if len(empty) else ""
        counted = [f"{name} in {gaps[name]:,} row{'s' * (gaps[name] > 1)}" for name in unfilled]
        raise DataError(
            f"values that nothing can fill are missing: {listed(counted, 8)}{first}; complete these rows, or leave "
            "them out of the file"
        )
    complete = [np.all([present(table.columns[name]) for name in gaps], axis=0) for table in tables]
    before, after = sum(map(len, tables)), int(sum(mask.sum() for mask in complete))
    fill = f"{how_to_set('data.missing', 'fill')} (the column's mean, no category)"
    if how != "drop":
        drop = f"{how_to_set('data.missing', 'drop')} ({after:,} of {before:,} rows stay)"
        remedies = [f"use {fill}"]
        if unfilled and len(unfilled) == len(gaps):
            remedies = []
        elif unfilled:
            nobody_fills = f"rows without {listed(unfilled, 8)} out of the file, as they cannot be filled"
            remedies = [f"leave the {nobody_fills}, and use {fill}"]
        remedy = ", or ".join([*remedies, f"use {drop}"])
        raise PartError(
            f"values are missing (rows of each column): {shown}. Complete them, or {remedy}", missing="fill"
        )
    if not after:
        raise DataError(
            f"every row has a missing value: {shown}; use {fill} or {how_to_set('data.drop', 'COLUMN')}"
        )
    kept = [table.take(mask) for table, mask in zip(tables, complete, strict=True)]
    return kept, [f"{before - after:,} of {before:,} rows with missing values are left out: {shown}"]


def _check_uses(columns: dict[str, list[str]]) -> None:
    """A DataError for a column that has two uses.

    Args:
        columns: By their use.
    """
    uses: dict[str, str] = {}
    for use, names in columns.items():
        for name in names:
            if uses.get(name, use) != use:
                why = "; no model learns from it anyway" if use == "drop" and uses[name] != "target" else ""
                raise DataError(
                    f'the column "{name}" is named as {uses[name]} and as {use}; it can be one of them{why}'
                )
            uses[name] = use


def names_of(written: str, known: Collection[str]) -> list[str]:
    """The name of a known column, or several names separated by commas.

    Args:
        written: By a person.
        known: The names of the columns.
    """
    return [written] if written in known else [part.strip() for part in written.split(",") if part.strip()]


def _columns(written: str, known: Sequence[str]) -> list[str]:
    """The columns of a name, or of several separated by commas."""
    names = names_of(written, known)
    for name in names:
        if name not in known:
            raise DataError(str(unknown("column", name, known)))
    return names
