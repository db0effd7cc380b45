"""Columns of a table as Arrow arrays: texts, whole numbers or numbers, null where a value is missing.

Arrow is imported by the functions, so that data without tables is loaded without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from copfl.data.copies import Hashes, hash_of
from copfl.data.tables import dates
from copfl.data.tables.dates import DATES
from copfl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

FEW = 1000  # rows that tell at once that a column varies, or has no dates
MISSING = -1.2345678901234567e300  # in place of a number: no table has it
Column: TypeAlias = "pa.ChunkedArray"
NUMBER = r"^\s*[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?|[nN][aA][nN])\s*$"


@dataclass(frozen=True)
class DataTable:
    """Columns of one length by name, and what the owner should know about how they were read."""

    columns: dict[str, Column]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> DataTable:
        """A table of sequences, arrays or Arrow arrays by name."""
        return cls({str(name): column_of(values) for name, values in columns.items()})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def take(self, mask: NDArray[np.bool_]) -> DataTable:
        """The rows of a mask [n]."""
        return DataTable({name: column.filter(mask) for name, column in self.columns.items()}, self.notes)


def column_of(values: Any) -> Column:
    """Values of Python, numpy, pandas or Arrow as a column; None, nan and the empty text are missing.

    Args:
        values: Dates, times and bytes become texts, and so does a mixture of types. Lists and records stay
            what they are: a table may have them in columns that are left out.

    Returns:
        An Arrow array of the type string, int64, double or bool, or of a nested type.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(values, pa.ChunkedArray):
        values = pa.chunked_array([_array(values)])
    kind = pa.types
    if kind.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if kind.is_nested(values.type) or kind.is_boolean(values.type):
        return values
    if kind.is_integer(values.type) and values.type != pa.uint64():
        return values.cast(pa.int64())
    if kind.is_integer(values.type) or kind.is_floating(values.type) or kind.is_decimal(values.type):
        numbers = values.cast(pa.float64(), safe=False)
        return pc.if_else(pc.is_nan(numbers), None, numbers)
    if kind.is_null(values.type):
        return values.cast(pa.float64())
    texts = values.cast(pa.string())
    return pc.if_else(pc.equal(texts, ""), None, texts)


def _array(values: Any) -> pa.Array:
    """Values of Python, numpy or pandas as an Arrow array; texts, if they are of several types."""
    import pyarrow as pa

    try:
        array = pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        if any(isinstance(value, list | dict) for value in values):
            return _in_lists(values)
        texts = [None if value is None or value != value else text_of(value) for value in values]
        return pa.array(texts, pa.string())
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _in_lists(values: Sequence[Any]) -> pa.Array:
    """Values, some of them nested, as one nested type."""
    import pyarrow as pa

    return pa.array([None if value is None else [str(value)] for value in values], pa.list_(pa.string()))


def joined(columns: Sequence[Column]) -> Column:
    """Successive parts of one column: of one type, or numbers if all are numbers, otherwise texts."""
    import pyarrow as pa

    types = {column.type for column in columns if column.null_count < len(column)} or {pa.float64()}
    if any(map(pa.types.is_nested, types)) and len(types) > 1:
        return pa.chunked_array([_in_lists(column.to_pylist()) for column in columns])
    if len(types) == 1:
        (common,) = types
    else:
        common = pa.string() if pa.string() in types else pa.float64()
    chunks = [
        pa.nulls(len(column), common)
        if column.null_count == len(column)
        else pa.array(words(column) if common == pa.string() else floats(column), common, from_pandas=True)
        if column.type != common
        else column.combine_chunks()
        for column in columns
    ]
    return pa.chunked_array(chunks)


def check_plain(name: str, column: Column) -> None:
    """A DataError if the cells of the column are lists or records.

    Args:
        name: Of the column, for the error.
        column: Its cells.
    """
    import pyarrow as pa

    if pa.types.is_nested(column.type):
        example = next((str(value)[:40] for value in column.to_pylist() if value is not None), column.type)
        raise DataError(f'the column "{name}" has {example}; a cell is one number or text')


def is_number(column: Column) -> bool:
    """Whether the cells are numbers, and neither texts nor truth values."""
    import pyarrow as pa

    return column.type in (pa.int64(), pa.float64())


def present(column: Column) -> NDArray[np.bool_]:
    """A mask [n] of the cells that have a value."""
    mask: NDArray[np.bool_] = column.is_valid().to_numpy()
    return mask


def as_numbers(column: Column) -> Column | None:
    """A column that is not nested as doubles; None if a text is not a number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.type != pa.string():
        return column.cast(pa.float64(), safe=False)
    try:
        return column.cast(pa.float64())
    except pa.ArrowInvalid:
        pass
    if pc.any(pc.invert(pc.match_substring_regex(column, NUMBER))).as_py():
        return None
    return pc.utf8_trim_whitespace(column).cast(pa.float64())


def floats(column: Column) -> NDArray[np.float64]:
    """The numbers of a column of numbers, nan where one is missing."""
    import pyarrow as pa

    numbers: NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def not_numbers(column: Column) -> NDArray[np.int64]:
    """The rows of a column of texts whose text is not a number."""
    import pyarrow.compute as pc

    is_number = pc.fill_null(pc.match_substring_regex(column, NUMBER), True)
    return np.flatnonzero(~is_number.to_numpy())


class Coded(NamedTuple):
    """A column as its distinct values and, for each row, the index of its own; -1 where it is missing."""

    values: list[Any]
    codes: NDArray[np.int64]


def coded(column: Column) -> Coded:
    """The distinct values of a column, in the order in which they occur, and the index of each row's."""
    import pyarrow.compute as pc

    values = column.drop_null().unique()
    codes = pc.fill_null(pc.index_in(column, value_set=values), -1)
    return Coded(values.to_pylist(), codes.to_numpy().astype(np.int64))


def text_of(value: Any) -> str:
    """A value as text; true and false are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def words(column: Column) -> NDArray[np.object_]:
    """The values as texts; None where one is missing."""
    values, codes = coded(column)
    return np.array([*map(text_of, values), None], dtype=object)[codes]


def cell_hashes(column: Column) -> Hashes:
    """A number for each cell: the same for 1, 1.0, true and the texts of them, whatever file they are in."""
    import pyarrow as pa

    if is_number(column) or pa.types.is_boolean(column.type):
        numbers = floats(column.cast(pa.int64()) if pa.types.is_boolean(column.type) else column)
        return (np.nan_to_num(numbers, nan=MISSING, posinf=np.inf, neginf=-np.inf) + 0.0).view(np.uint64)
    values, codes = coded(column)
    texts = [str(value) for value in values]
    numbers = (
        np.array([float(text) if re.match(NUMBER, text) else MISSING for text in texts] + [MISSING]) + 0.0
    )
    hashes = numbers.view(np.uint64)
    for row, text in enumerate(texts):
        if not re.match(NUMBER, text):
            hashes[row] = hash_of(text)
    return hashes[codes]


def times_of(name: str, column: Column) -> NDArray[np.float64]:
    """The numbers, or the dates as numbers, of a column that says when each row was; later is larger.

    Args:
        name: Of the column, for the error.
        column: Its cells.
    """
    numbers = as_numbers(column)
    if numbers is not None:
        return floats(numbers)
    values, codes = coded(column)
    return dates.seconds_of(name, list(map(str, values)))[codes]


def are_dates(column: Column) -> bool:
    """Whether all texts of a column look like dates."""
    import pyarrow as pa

    if column.type != pa.string() or column.null_count == len(column):
        return False
    few = coded(column[:FEW]).values  # most columns have another text at once
    return all(map(DATES.fullmatch, few)) and all(map(DATES.fullmatch, coded(column).values))


def row_texts(table: DataTable) -> dict[str, NDArray[np.object_]]:
    """All cells of a table as texts, by column; None where one is missing. They tell which rows are alike."""
    import pyarrow as pa

    return {
        name: np.array([None if v is None else str(v) for v in column.to_pylist()], object)
        if pa.types.is_nested(column.type)
        else words(column)
        for name, column in table.columns.items()
    }
