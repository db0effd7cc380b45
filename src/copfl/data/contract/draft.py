"""A first data contract from one site's table, with nothing in it that should not leave the site.

It has no value of a row: a category has at least so many rows, ranges are guesses: half as much again, rounded
outward to a power of ten. Means and deviations are written only if the owner asks for them.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from copfl.data.contract.contract import (
    BOOLEAN,
    CATEGORY,
    DATE,
    FREE_TEXT,
    NUMBER,
    TABLE,
    TEXT,
    Column,
    Contract,
)
from copfl.data.contract.statistics import SMALLEST_COUNT, SMALLEST_DEVIATION, counts_of, may_leave
from copfl.data.samples import CLASSIFICATION, MULTILABEL
from copfl.data.tables.columns import Column as Cells
from copfl.data.tables.columns import DataTable, are_dates, as_numbers, column_of, floats, is_number, words
from copfl.data.tables.doubts import identifiers
from copfl.data.tables.encoders import MOST_CATEGORIES
from copfl.data.tables.files import first_names, read_table
from copfl.data.tables.tables import (
    FEWEST_ROWS,
    MOST_REPEATED,
    all_differ,
    from_tables,
    names_of,
    numbers_of,
)
from copfl.errors import DataError, unknown, warn

WIDER = 1.5  # times a site's largest number, which another site's may exceed
LONG_TEXT = 60  # characters: longer on average, a column is no category


def draft(
    path: Path,
    *,
    target: str,
    text: str = "",
    drop: str = "",
    categories: str = "",
    missing: str = "",
    task: str | None = None,
    smallest: int = SMALLEST_COUNT,
    statistics: bool = False,
    leave_open: bool = False,
    group: str = "",
    time: str = "",
    tell: Callable[[str], None] = warn,
) -> Contract:
    """The contract that a table of one site suggests.

    Args:
        path: The table.
        target: The column to predict, or several separated by commas.
        text: The column of the texts to learn from, if the model learns from texts.
        drop: Columns that the federation does not use, separated by commas.
        categories: Columns of numbers that are categories, separated by commas.
        missing: What happens to missing values; empty: fill if the table has some, else refuse.
        task: The kind of the targets; None: inferred.
        smallest: Rows that a category must have to be named.
        statistics: Whether means and deviations are written.
        leave_open: Whether categories and classes are left to be agreed.
        group: The column that says what belongs together, such as the patient.
        time: The column that says when a row was.
        tell: Called with what the owner should know about columns that look like identifiers.
    """
    if path.is_dir() or path.suffix.lower() == ".npz":
        raise DataError(
            f"{path} is no table; images and arrays have the contract of `copfl federate init --dataset`"
        )
    if names := first_names(path):
        for as_written in (target, drop, categories, text, group, time):
            _known(as_written, names)
    table = read_table(path)
    targets, dropped, named = (_known(as_written, table.columns) for as_written in (target, drop, categories))
    if not targets:
        raise DataError(
            f"name the column to predict with --target; the columns are {', '.join(table.columns)}"
        )
    task = task or _task(table, targets)
    learned = [text] if text else [n for n in table.columns if n not in (*targets, *dropped, group, time)]
    for labelling in (text, group, time):
        _known(labelling, table.columns)
    plain = {n: _as_numbers(table.columns[n]) for n in learned if n not in (text, *named)}
    found = [] if text else identifiers(DataTable(plain))
    for one in found:
        tell(
            f'the column "{one.column}" is left out of the contract, as it looks like a number of patients or cases: '
            f"{one.values:,} values in {one.rows:,} rows; if rows of one belong together, add --group {one.column}"
        )
    learned = [n for n in learned if n not in {one.column for one in found}]
    if not learned:
        raise DataError("no column is left to learn from; besides the target at least one is needed")

    def column(name: str) -> Column:
        is_target = name in targets
        kind = _type(name, table.columns[name], name in named)
        if is_target and task == CLASSIFICATION:
            kind = CATEGORY
        elif is_target:
            kind = BOOLEAN if task == MULTILABEL else NUMBER
        kind = FREE_TEXT if name == text else kind
        return _described(name, table.columns[name], kind, smallest, statistics, leave_open, is_target)

    for name in learned:
        if name in plain and all_differ(plain[name]):
            tell(
                f'the column "{name}" has another whole number in each row; if it is an identifier and no measurement, '
                f"leave it out with --drop {name}"
            )
    columns = tuple(map(column, learned))
    missing = missing or ("fill" if any(c.missing for c in columns) else "refuse")
    if missing == "fill":
        columns = tuple(replace(c, indicator=c.missing and c.type == NUMBER) for c in columns)
    return Contract(
        data=TEXT if text else TABLE,
        task=task,
        missing=missing,
        columns=columns,
        targets=tuple(map(column, targets)),
        group=group,
        time=time,
    )


def _as_numbers(cells: Cells) -> Cells:
    """The cells, as numbers where all of them are."""
    import pyarrow as pa

    numbers = None if pa.types.is_nested(cells.type) else as_numbers(cells)
    return cells if numbers is None else numbers


def _known(written: str, columns: Collection[str]) -> list[str]:
    names = names_of(written, columns)
    for name in names:
        if name not in columns:
            raise DataError(str(unknown("column", name, columns)))
    return names


def _task(table: DataTable, targets: Collection[str]) -> str:
    """The kind of the targets, as a run would infer it."""
    rows = np.ones(len(table), bool)
    for name in targets:
        rows &= table.columns[name].is_valid().to_numpy()
    target_columns = DataTable({name: table.columns[name] for name in targets}).take(rows)
    if not len(target_columns):
        raise DataError("every row lacks a target")
    feature = f"not {next(iter(targets))}"  # from_tables needs one
    with_rows = DataTable({feature: column_of(np.arange(len(target_columns))), **target_columns.columns})
    return from_tables([with_rows], "", target=",".join(targets)).kind


def _type(name: str, cells: Cells, as_category: bool) -> str:
    """The type of a column, from its values."""
    values = set(words(cells)) - {None}
    if not values:
        raise DataError(f'the column "{name}" has no values; leave it out with --drop {name}')
    if values <= {"0", "1"} and len(values) == 2:
        return BOOLEAN
    if as_category:
        return CATEGORY
    if is_number(cells) or numbers_of(name, cells) is not None:
        return NUMBER
    if are_dates(cells):
        return DATE
    rows = len(cells)
    is_free = rows >= FEWEST_ROWS and rows < MOST_REPEATED * len(values)
    is_long = sum(map(len, values)) > LONG_TEXT * len(values)
    return FREE_TEXT if is_long or is_free or len(values) > MOST_CATEGORIES else CATEGORY


def _described(
    name: str, cells: Cells, kind: str, smallest: int, statistics: bool, leave_open: bool, is_target: bool
) -> Column:
    missing = bool(cells.null_count) and not is_target
    if kind == BOOLEAN:
        return Column(name=name, type=kind, missing=missing, categories=("0", "1"))
    if kind == CATEGORY:
        common = sorted(n for n, count in counts_of(cells, is_target).items() if count >= smallest)
        return Column(name=name, type=kind, missing=missing, categories=() if leave_open else tuple(common))
    if kind != NUMBER:
        return Column(name=name, type=kind, missing=missing)
    numbers = numbers_of(name, cells)
    if numbers is None:
        raise DataError(f'the target column "{name}" has texts; its task needs numbers')
    values = floats(numbers)
    values = values[~np.isnan(values)]
    low, high = _outward(WIDER * float(values.min())), _outward(WIDER * float(values.max()))
    low, high = min(low, 0.0), max(high, 0.0)
    column = Column(name=name, type=kind, missing=missing)
    column = column if low == high else replace(column, minimum=low, maximum=high, guess=True)
    if not statistics or not may_leave(values, smallest):
        return column
    deviation = float(values.std())
    return replace(
        column, mean=float(values.mean()), deviation=deviation if deviation > SMALLEST_DEVIATION else 1.0
    )


def _outward(value: float) -> float:
    """The power of ten that is as large at least, with its sign; 0 of 0."""
    return math.copysign(10.0 ** math.ceil(math.log10(abs(value))), value) if value else 0.0
