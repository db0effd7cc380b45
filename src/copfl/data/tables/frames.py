"""Data frames of a program, of pandas or another library, as a data set; no such library is imported.

`settings.user_code` comes here with data frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from copfl.data.samples import Dataset
from copfl.data.tables.columns import DataTable, joined
from copfl.data.tables.files import READERS, read_table
from copfl.data.tables.tables import from_tables
from copfl.errors import DataError

CLIENT, TARGET = "client", "target"  # columns that are added where a program has them apart


def is_frame(value: object) -> bool:
    """Whether it is a data frame: of pandas, polars, Arrow or Hugging Face."""
    return hasattr(value, "to_pandas") or (hasattr(value, "columns") and hasattr(value, "iloc"))


def has_frames(value: object) -> bool:
    """Whether these data are a data frame, or several: train and test, (x, y), or one of each client.

    A client's may be a file of a table, beside data frames or alone.
    """
    if isinstance(value, Mapping):
        return bool(value) and all(is_frame(one) or _is_file(one) for one in value.values())
    if isinstance(value, list):
        return bool(value) and all(is_frame(one) or _is_file(one) for one in value)
    return is_frame(value[0]) if isinstance(value, tuple) and value else is_frame(value)


def dataset_of(frames: Any, name: str, *, target: str = "", client: str = "", **options: Any) -> Dataset:
    """The data set of data frames.

    Args:
        frames: One; a pair of train and test; (x, y) or (x, y, x_test, y_test) with the targets apart; or one of
            each client, as a list or by name. A client's may be a file.
        name: Of the data set.
        target: The column to predict, or several with commas.
        client: The column that says whose row it is.
        options: Others of `copfl.data.tables.tables.from_tables`.
    """
    if isinstance(frames, Mapping | list):
        if client:
            raise DataError("these data are one table of each client already; leave out client")
        by_client = dict(frames) if isinstance(frames, Mapping) else dict(enumerate(frames))
        tables, client = [_of_clients(by_client, unused := _unused(by_client))], unused
    else:
        splits = list(frames) if isinstance(frames, tuple) else [frames]
        if len(splits) in (2, 4) and not _is_like(splits[0], splits[1]):
            if target:
                raise DataError(f"(x, y) has the targets apart, so target={target!r} is none; leave it out")
            pairs = list(zip(splits[::2], splits[1::2], strict=True))
            target = str(getattr(pairs[0][1], "name", None) or _first_column(pairs[0][1]) or TARGET)
            tables = [_beside(x, y, target) for x, y in pairs]
        elif len(splits) > 2:
            raise DataError(
                f"{len(splits)} data frames are neither one, (train, test), (x, y) nor a list of one per client"
            )
        else:
            tables = [_table(split) for split in splits]
    known = {column for table in tables for column in table.columns}
    for column in (target, client, *map(str, options.values())):
        if column not in known and column in _index_names(frames):
            raise DataError(f'"{column}" is the index of the data frame; pass it with .reset_index()')
    return from_tables(tables, name, target=target, client=client, **options)


def _is_file(value: object) -> bool:
    return isinstance(value, str | Path) and Path(value).suffix.lower() in READERS


def _is_like(frame: Any, other: Any) -> bool:
    """Whether the other one is a data frame with the columns of this one."""
    return is_frame(other) and {str(c) for c in _names(frame)} <= {str(c) for c in _names(other)}


def _names(frame: Any) -> Sequence[Any]:
    return list(getattr(frame, "column_names", None) or frame.columns)


def _index_names(frames: Any) -> set[str]:
    """The names of the indices of data frames of pandas."""
    splits = (
        frames.values()
        if isinstance(frames, Mapping)
        else frames
        if isinstance(frames, list | tuple)
        else [frames]
    )
    return {str(name) for frame in splits for name in getattr(getattr(frame, "index", None), "names", ())}


def _first_column(y: Any) -> str:
    return str(_names(y)[0]) if is_frame(y) and len(_names(y)) == 1 else ""


def _table(frame: Any) -> DataTable:
    if isinstance(frame, str | Path):
        return read_table(Path(frame))
    names = _names(frame)
    if twice := [str(name) for name in names if sum(str(name) == str(other) for other in names) > 1]:
        raise DataError(f'the data frame has several columns called "{twice[0]}"; rename all but one')
    table = DataTable.of({name: _plain(frame[name]) for name in names})
    if not len(table):
        raise DataError("the data frame has no rows")
    return table


def _plain(column: Any) -> Any:
    """A column as Arrow takes it; of categories, their values."""
    return column.to_pandas() if hasattr(column, "to_pandas") else column


def _beside(x: Any, y: Any, target: str) -> DataTable:
    """The features and the targets as one table, row by row; the index of a data frame has no say."""
    table = _table(x)
    if target in table.columns:
        raise DataError(f'x has a column "{target}" as y has; leave it out of x')
    column = y[_names(y)[0]] if is_frame(y) else y
    values = np.asarray(column)
    if values.ndim != 1 or len(values) != len(table):
        raise DataError(f"y has shape {list(values.shape)}, but x has {len(table):,} rows")
    return DataTable({**table.columns, **DataTable.of({target: values}).columns})


def _unused(by_client: Mapping[Any, Any]) -> str:
    """A name for the column of the clients, which no table has."""
    known = {str(name) for frame in by_client.values() if is_frame(frame) for name in _names(frame)}
    return next(name for name in (CLIENT, *(f"{CLIENT}_{n}" for n in range(2, 1000))) if name not in known)


def _of_clients(by_client: Mapping[Any, Any], column: str) -> DataTable:
    """The tables of the clients below each other, with a column of their names."""
    tables = {str(name): _table(frame) for name, frame in by_client.items()}
    (first, known), *_ = ((name, table.columns) for name, table in tables.items())
    for name, table in tables.items():
        if absent := [one for one in known if one not in table.columns]:
            raise DataError(f'client {name} lacks the column "{absent[0]}", which client {first} has')
        if extra := [one for one in table.columns if one not in known]:
            raise DataError(f'client {name} has a column "{extra[0]}", which client {first} lacks')
    names = np.repeat([*tables], [len(table) for table in tables.values()]).tolist()
    columns = {one: joined([table.columns[one] for table in tables.values()]) for one in known}
    return DataTable({**columns, **DataTable.of({column: names}).columns})
