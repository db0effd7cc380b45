"""Which rows of a node's table train, and which test: in all secure sums the same, whatever the target is.

A fifth of the rows is drawn class by class, and copies by the columns that are read are on one side. So another
target, or other columns, would draw other test rows, and the difference of two sums would be that of a few rows.
A node remembers what it drew for its first sum, and takes the same rows for every later one of the same table.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl import foreign
from copfl.data.contract.contract import Contract
from copfl.data.contract.statistics import rows_of
from copfl.data.copies import Hashes, row_hashes
from copfl.data.tables.columns import DataTable
from copfl.errors import RunError, raised_as
from copfl.federation.node.known_data import cells_of
from copfl.federation.node.node import Node
from copfl.federation.node.secure_memory import SumMemory, choices_of
from copfl.files import write_bytes

NEITHER, TRAIN, TEST = range(3)
Sides = NDArray[np.uint8]  # of each row of the node's table


class SiteTables(NamedTuple):
    """A node's tables, as `dataset_of` and `values_of` take them."""

    tables: Sequence[DataTable]  # one, of which some rows will be for testing, or train and test
    leave_out: bool  # whether train rows that are copies of test rows are left out


def remembered(node: Node, contract: Contract, tables: Sequence[DataTable], is_secure: bool) -> SiteTables:
    """The rows of the table that train and those that test; the tables as they are where no sum has them.

    Args:
        node: The one whose tables these are.
        contract: What the federation has agreed on.
        tables: The node's, or train and test.
        is_secure: Whether the run adds up securely.
    """
    if not is_secure and SumMemory(node.memory).is_empty:
        return SiteTables(tables, leave_out=True)
    hashes = [row_hashes(cells_of(table)) for table in tables]
    # A report may be of somebody else's folder.
    path = foreign.inside(node.folder, node.memory / f"{_name_of(hashes, choices_of(contract))}.rows")
    order = np.argsort(hashes[0], kind="stable")  # equal rows are one as the other
    if not path.exists():
        drawn = _drawn(contract, tables)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, drawn[order].tobytes(), private=True)
    sides = np.empty(len(order), np.uint8)
    damaged = "the rows that this node trains on cannot be read: {}; restore the node's state-dir"
    with raised_as(RunError, damaged, OSError, ValueError):
        sides[order] = np.frombuffer(path.read_bytes(), np.uint8)
    train = tables[0].take(sides == TRAIN)
    return SiteTables(
        [train, *tables[1:]] if len(tables) > 1 else [train, tables[0].take(sides == TEST)], leave_out=False
    )


def _drawn(contract: Contract, tables: Sequence[DataTable]) -> Sides:
    """The side of each row of the first table, as a simulation draws them."""
    data, sides = rows_of(contract, tables), np.full(len(tables[0]), NEITHER, np.uint8)
    sides[data.train.x[:, 0]] = TRAIN
    if len(tables) == 1:
        sides[data.test.x[:, 0]] = TEST
    return sides


def _name_of(hashes: Sequence[Hashes], choices: str) -> str:
    """The rows of these tables in any order, and the settings that leave some of them out."""
    content = b"".join(np.sort(rows).astype("<u8").tobytes() for rows in hashes)
    return hashlib.sha256(content + choices.encode()).hexdigest()[:32]
