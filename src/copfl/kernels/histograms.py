"""Sums of numbers of rows by column, node and bin, of many rows at once on a CPU.

`numpy.bincount` adds up one column after the other. Where rows are many, two columns are added up together, by pairs
of bins, and their sums follow from those of the pairs: half as many additions.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PAIRED = 2  # rows for each cell of a pair of columns from which pairs are faster

Ints = NDArray[np.integer]
Floats = NDArray[np.float64]


def in_pairs(bin: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """[pairs, n]: the bins of two columns as one number; a last single column is beside one of bin 0.

    Args:
        bin: [columns, n], of two columns or more.
        width: Bins of a column.
    """
    first, second = bin[::2], bin[1::2]
    paired = first * np.int32(width)
    paired[: len(second)] += second
    return paired


def sums_by_bin(
    bin: NDArray[np.int32],
    columns: int,
    node: Ints,
    numbers: Sequence[Floats],
    width: int,
    nodes: int,
    rows: Ints | None = None,
) -> Floats:
    """[len(numbers), columns, nodes, width]: the sums of the numbers of rows.

    Args:
        bin: Of each row, [columns, n], or in pairs.
        columns: How many there are.
        node: Of each row.
        numbers: Of each row; where one comes twice, it is added up once.
        width: Bins of a column.
        nodes: Their number.
        rows: Those that are added up, if not all; `node` and `numbers` have them alone.
    """
    is_paired = len(bin) < columns
    cells = width**2 if is_paired else width
    start, index = node * np.intp(cells), np.empty(node.shape, np.intp)
    different = {id(one): one for one in numbers}
    place = [list(different).index(id(one)) for one in numbers]
    sums, ones = np.empty((len(different), columns + is_paired, nodes, width)), np.ones(width)
    for number, column in enumerate(bin):
        np.add(column if rows is None else column[rows], start, out=index)
        for channel, one in enumerate(different.values()):
            found = np.bincount(index, one, nodes * cells)
            if is_paired:
                pairs = found.reshape(nodes, width, width)
                sums[channel, 2 * number], sums[channel, 2 * number + 1] = pairs @ ones, ones @ pairs
            else:
                sums[channel, number] = found.reshape(nodes, width)
    return sums[place, :columns]


def sums_of_children(
    bin: NDArray[np.int32], columns: int, node: Ints, numbers: Sequence[Floats], parents: Floats
) -> Floats:
    """`sums_by_bin` of the next level: of two children the one with fewer rows is added up, the other is the rest.

    It is exact where sums are, see `parts.boosting.UNITS`.

    Args:
        bin: Of each row, [columns, n], or in pairs.
        columns: How many there are.
        node: [n], of each row.
        numbers: [n] each.
        parents: The sums of the level before, of the same numbers.
    """
    _, _, before, width = parents.shape
    first = 2 * np.arange(before)
    fewer = first + np.bincount(node, minlength=2 * before).reshape(before, 2).argmin(1)
    rows = np.flatnonzero(np.isin(np.arange(2 * before), fewer)[node])
    chosen = {id(one): one[rows] for one in numbers}
    of_fewer = [chosen[id(one)] for one in numbers]
    sums = np.empty((len(numbers), columns, 2 * before, width))
    sums[:, :, fewer] = sums_by_bin(bin, columns, node[rows] >> 1, of_fewer, width, before, rows)
    sums[:, :, fewer ^ 1] = parents - sums[:, :, fewer]
    return sums
