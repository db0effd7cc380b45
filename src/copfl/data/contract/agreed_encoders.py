"""How the tables of all sites become the same numbers: agreed once, in the data contract of a federation.

The contract has an `Encoders`; nodes and predictions encode rows with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from copfl.data.samples import Dataset
from copfl.data.tables.columns import DataTable
from copfl.data.tables.encoders import TableInfo
from copfl.data.tables.files import read_table
from copfl.data.tables.tables import from_tables
from copfl.errors import DataError

MISSING = ("refuse", "fill", "drop")


@dataclass(frozen=True)
class Encoders(TableInfo):
    """The columns that a federation reads from a table, and how each becomes numbers."""

    @classmethod
    def of(cls, table: TableInfo) -> Self:
        """The encoders of a data set that was read from a table."""
        return cls(**vars(table))

    @property
    def used(self) -> tuple[str, ...]:
        """The columns of a table that a federation reads."""
        labelling = filter(None, (self.text, self.group, self.time))
        return (*self.targets, *labelling, *(e.name for e in self.columns))

    def dataset(self, path: Path, *, test: Path | None = None, kind: str | None = None) -> Dataset:
        """The rows of a table as samples. Columns that the federation does not use are not read.

        Args:
            path: The file; without `test` some of its rows are the test samples.
            test: A file of test rows.
            kind: Of the targets.
        """
        tables = [read_table(file) for file in (path, test) if file is not None]
        return self.dataset_of(tables, path.stem, kind)

    def dataset_of(
        self, tables: Sequence[DataTable], name: str, kind: str | None = None, leave_out: bool = True
    ) -> Dataset:
        """The rows of a table, or of train and test rows, as samples.

        Args:
            tables: The rows, or train and test rows.
            name: Of the data set.
            kind: Of the targets; None: what they look like.
            leave_out: As of `from_tables`.
        """
        require_columns(tables, self.used)
        return from_tables(
            [DataTable({name: table.columns[name] for name in self.used}, table.notes) for table in tables],
            name,
            target=",".join(self.targets),
            text=self.text or "",
            missing=self.missing,
            kind=kind,
            group=self.group,
            time=self.time,
            split=self.split,
            encoders=self.columns,
            leave_out=leave_out,
        )


def require_columns(tables: Sequence[DataTable], names: Sequence[str]) -> None:
    """DataError if a table lacks one of these columns.

    Args:
        tables: Of a site.
        names: Of the columns that they need.
    """
    for table in tables:
        if absent := [name for name in names if name not in table.columns]:
            has = ", ".join(table.columns)
            raise DataError(f'the table lacks the column "{absent[0]}" of the federation; it has {has}')
