"""Sums by column, node and bin: of single columns, of pairs, and of children by difference, against a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from copfl.kernels.histograms import in_pairs, sums_by_bin, sums_of_children

ROWS, WIDTH = 300, 6


def drawn(columns: int, nodes: int) -> tuple[Any, Any, list[Any]]:
    rng = np.random.default_rng(columns)
    bin = rng.integers(0, WIDTH, (columns, ROWS)).astype(np.int32)
    first, count = rng.integers(-99, 99, (2, ROWS)).astype(float)
    return bin, rng.integers(0, nodes, ROWS), [first, count, count]


@pytest.mark.parametrize("columns", [2, 4, 5])
def test_sums_are_those_of_a_loop_over_rows(columns: int) -> None:
    bin, node, numbers = drawn(columns, 4)
    expected = np.zeros((3, columns, 4, WIDTH))
    for row in range(ROWS):
        for column in range(columns):
            expected[:, column, node[row], bin[column, row]] += [one[row] for one in numbers]
    for given in (bin, in_pairs(bin, WIDTH)):
        assert np.array_equal(sums_by_bin(given, columns, node, numbers, WIDTH, 4), expected)
        chosen = np.flatnonzero(node == 2)
        of_two = [one[chosen] for one in numbers]
        part = sums_by_bin(given, columns, node[chosen], of_two, WIDTH, 4, chosen)
        assert np.array_equal(part[:, :, 2], expected[:, :, 2])
        assert not part[:, :, [0, 1, 3]].any()


def test_the_sums_of_a_child_are_the_rest_of_its_parent() -> None:
    bin, node, numbers = drawn(3, 8)
    parents = sums_by_bin(bin, 3, node // 2, numbers, WIDTH, 4)
    expected = sums_by_bin(bin, 3, node, numbers, WIDTH, 8)
    assert np.array_equal(sums_of_children(bin, 3, node, numbers, parents), expected)
