"""How the tables of all sites become the same numbers: agreed once, and plain data that travels in a federation."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from copfl.data.columns import Table
from copfl.data.encoders import Encoder, TableInfo
from copfl.data.samples import Dataset
from copfl.data.table_files import read_table
from copfl.data.tables import from_tables
from copfl.errors import DataError, raised_as

MISSING = ("refuse", "fill", "drop")


@dataclass(frozen=True)
class Encoders(TableInfo):
    """The columns that a federation reads from a table, and how each becomes numbers."""

    @classmethod
    def of(cls, table: TableInfo) -> Self:
        """Those of a data set that was read from a table."""
        return cls(table.targets, table.columns, table.missing, table.text)

    def as_json(self) -> str:
        """The encoders as text, which `read` gives back exactly."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def read(cls, text: str) -> Self:
        """The encoders of a text; DataError if they are none."""
        with raised_as(DataError, "these are no encoders of a table: {}", ValueError, TypeError, KeyError):
            content = json.loads(text)
            targets, columns, missing, column = (
                content[f.name] for f in dataclasses.fields(cls)
            )  # of this order
            if len(content) != 4 or missing not in MISSING or not (column is None or isinstance(column, str)):
                raise ValueError("they have other fields")
            return cls(_words(targets), tuple(map(_encoder, _list(columns))), missing, column)

    def dataset(self, path: Path, *, test: Path | None = None, kind: str | None = None) -> Dataset:
        """The rows of a table as samples. Columns that the federation does not use are not read.

        Args:
            path: The file; without `test` some of its rows are the test samples.
            test: A file of test rows.
            kind: Of the targets.
        """
        tables = [read_table(file) for file in (path, test) if file is not None]
        used = [*self.targets, *([self.text] if self.text else []), *(e.name for e in self.columns)]
        for table in tables:
            if absent := [name for name in used if name not in table.columns]:
                has = ", ".join(table.columns)
                raise DataError(f'the table lacks the column "{absent[0]}" of the federation; it has {has}')
        return from_tables(
            [Table({name: table.columns[name] for name in used}, table.notes) for table in tables],
            path.stem,
            target=",".join(self.targets),
            text=self.text or "",
            missing=self.missing,
            kind=kind,
            encoders=self.columns,
        )


def _encoder(content: Any) -> Encoder:
    mean, std = (float(content[name]) for name in ("mean", "std"))
    if not isinstance(content["name"], str) or len(content) != 4:
        raise ValueError("a column has other fields")
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ValueError(f"the column {content['name'][:40]!r} has no finite mean and deviation")
    return Encoder(content["name"], mean, std, _words(content["categories"]))


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("a list is missing")
    return content


def _words(content: Any) -> tuple[str, ...]:
    if not all(isinstance(word, str) for word in _list(content)):
        raise ValueError("names must be texts")
    return tuple(content)
