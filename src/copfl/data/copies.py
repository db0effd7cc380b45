"""Which rows are copies of each other, and which are alike by chance, as their columns have so few values.

A row is known by a number that its content alone decides: not its place, its file, or the order of the columns.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data.samples import Inputs

Hashes = NDArray[np.uint64]
Codes = NDArray[np.int64]

BY_CHANCE = 0.05  # of the pairs of equal rows that may be expected by chance, so that they count as copies
TELLING = 8  # columns that rarely have the same value in two rows; by them the chance is computed
PRIOR = 100.0  # pairs: of fewer, a frequency is uncertain
MOST_LOOKED_AT = 10_000  # rows
FEWEST_DIFFERENT = 5  # rows of a site; of fewer, some would be on no side
OFTEN = 0.1  # of a site's rows that have equals, so that its columns have few values
MOST_COLUMNS = 256  # of an array, such as pixels


def mixed(numbers: Hashes) -> Hashes:
    """The finaliser of splitmix64: different numbers stay different, and all of their bits count."""
    with np.errstate(over="ignore"):
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))


def hash_of(text: str) -> np.uint64:
    """The number of a text."""
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def row_hashes(x: Inputs) -> Hashes:
    """A number for each sample of an array, or of several by name: its bytes decide it."""
    columns = [x[name] for name in sorted(x)] if isinstance(x, dict) else [x]
    rows = map(b"\0".join, zip(*map(_contents, columns), strict=True))
    digests = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def _contents(column: NDArray[Any]) -> list[bytes]:
    """The bytes of each row of an array, or its text."""
    if column.dtype.kind in "UO":
        return [str(value).encode() for value in column]
    content, size = column.tobytes(), column[:1].nbytes
    return [content[row * size : (row + 1) * size] for row in range(len(column))]


def columns_of(x: Inputs) -> list[Hashes]:
    """The columns of arrays as numbers that are equal where the cells are; of wide ones, some."""
    columns: list[Hashes] = []
    for array in x.values() if isinstance(x, dict) else [x]:
        flat = array.reshape(len(array), -1)
        some = np.unique(np.linspace(0, flat.shape[1] - 1, min(flat.shape[1], MOST_COLUMNS)).astype(np.int64))
        columns += [np.unique(flat[:, k], return_inverse=True)[1].astype(np.uint64) for k in some]
    return columns


def rows_of_sites(site: Codes) -> Iterator[Codes]:
    """The rows of each site, in their order."""
    order = np.argsort(site, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(site[order])) + 1)


def at_sites(columns: Mapping[str, Hashes], site: Codes) -> Hashes:
    """A number for each row, which its cells and its site's other rows decide.

    A column with one value in all rows of a site changes nothing there. So a site's rows have the same numbers
    in a file of their own and in one of all sites, with or without the column that names the site.

    Args:
        columns: By name, numbers that are equal where the cells are.
        site: Of each row.
    """
    keys = np.zeros(len(site), np.uint64)
    sites = list(rows_of_sites(site))
    with np.errstate(over="ignore"):
        for name, cells in columns.items():
            of_cells = mixed(cells + hash_of(name))
            for rows in sites:
                keys[rows] += of_cells[rows] - of_cells[rows].min()
    return keys


def copies(keys: Hashes, columns: Sequence[Hashes], site: Codes, is_text: bool = False) -> Codes:
    """For each row the first row that it is a copy of; its own number where it is no copy.

    Rows of different sites are no copies. At a site whose equal rows may be alike by chance, or which has hardly any
    different rows, no row is one.

    Args:
        keys: Equal where rows of a site are.
        columns: Numbers that are equal where the cells are.
        site: Of each row.
        is_text: Whether a row is a text; texts are not alike by chance.
    """
    original = np.arange(len(keys))
    for rows in rows_of_sites(site):
        _, first, member = np.unique(keys[rows], return_index=True, return_inverse=True)
        if FEWEST_DIFFERENT <= len(first) < len(rows):
            counts = np.bincount(member)
            pairs = float((counts * (counts - 1) / 2).sum())
            here = [column[rows] for column in columns]
            if is_text or pairs_by_chance(here, np.zeros(len(rows), np.int64), first) < BY_CHANCE * pairs:
                original[rows] = rows[first[member]]
    return original


def told_apart(keys: Hashes, site: Codes, original: Codes) -> Hashes:
    """Keys by which rows are drawn one by one, also those that are alike by chance.

    Drawn together, the rows of one class with the same inputs would all be test, and those of the other class all
    train. The same holds over sites, so rows that have equals at their site are drawn by what the whole site has, and
    so are all rows of a site where many have. Which of equal rows is the first makes no difference, as nothing tells
    them apart.

    Args:
        keys: Equal where rows of a site are.
        site: Of each row.
        original: Of each row the first that it is a copy of, as of `copies`; copies keep one key.
    """
    apart = keys.copy()
    for rows in rows_of_sites(site):
        order = np.argsort(keys[rows], kind="stable")
        is_next = np.append(False, np.diff(keys[rows][order]) == 0)  # equal to the row before
        if not is_next.any() or (original[rows] != rows).any():
            continue
        at, alike = np.arange(len(rows)), is_next | np.append(is_next[1:], False)
        alike |= alike.mean() > OFTEN  # then the others may be rows of other sites
        count = (at - np.maximum.accumulate(np.where(is_next, 0, at))).astype(np.uint64)
        equal = rows[order[alike]]
        with np.errstate(over="ignore"):
            of_site = mixed(mixed(keys[rows]).sum(keepdims=True))
            apart[equal] = mixed(keys[equal] + mixed(count[alike]) + of_site)
    return apart


def pairs_by_chance(columns: Sequence[Hashes], site: Codes, different: Codes) -> float:
    """How many pairs of rows of one site are alike by chance, at most.

    Two rows of a site share a value of the first column with the frequency of such pairs. That they share a value of
    the next column, too, depends on the columns before; the one that says most about it counts. More columns make
    the chance smaller, so some suffice.

    Args:
        columns: Numbers that are equal where the cells are.
        site: Of each row.
        different: Rows without two equal ones: copies say nothing about how frequent a value is.
    """
    some = np.random.default_rng(0).permutation(different)[:MOST_LOOKED_AT]

    def pairs(key: NDArray[Any]) -> float:
        """The pairs of rows that have the same key."""
        count = np.unique(key, return_counts=True)[1]
        return float((count * (count - 1.0) / 2).sum())

    at_a_site = mixed(site[some].astype(np.uint64))
    keys = [mixed(at_a_site + bits[some]) for bits in columns]
    sharing = [pairs(key) for key in keys]
    order: list[int] = np.argsort(sharing, kind="stable")[:TELLING].tolist()
    if not sharing[order[0]]:
        return 0.0
    every_pair = pairs(at_a_site)
    expected = pairs(site) * sharing[order[0]] / every_pair
    for number, k in enumerate(order[1:], 1):
        usual = sharing[k] / every_pair  # as if the columns were independent; PRIOR pairs say so

        def shared_given(j: int, k: int = k, usual: float = usual) -> float:
            return (pairs(mixed(keys[j]) + keys[k]) + PRIOR * usual) / (sharing[j] + PRIOR)

        expected *= max(usual, *map(shared_given, order[:number]))
    return expected
