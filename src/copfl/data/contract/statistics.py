"""Means, deviations and categories of a table whose rows are at several sites, from sums of the sites.

A site gives, for each column of numbers that the contract leaves open, the number of values and their sum;
then, when the mean is known, the sums of the differences to it and of their squares. Of categories it gives
which ones it has. Nothing of fewer rows than a smallest count is given: the sums of such a column are zero,
such a category is not named. The two passes make the deviation as exact as the pooled table's.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.data.clients.partition import validation_part
from copfl.data.contract.agreed_encoders import require_columns
from copfl.data.contract.contract import ARRAYS, NUMBER, TEXT, Column, Contract
from copfl.data.samples import CLASSIFICATION, Dataset
from copfl.data.tables.columns import Column as Cells
from copfl.data.tables.columns import DataTable, check_plain, coded, floats, row_texts, text_of
from copfl.data.tables.encoders import MOST_CATEGORIES
from copfl.data.tables.files import read_table
from copfl.data.tables.tables import numbered_rows, numbers_of
from copfl.errors import DataError

Vector = NDArray[np.float64]

SMALLEST_COUNT = 5  # rows of which a site gives something
PASSES = 2
SMALLEST_DEVIATION = 1e-12  # below, a column is constant and keeps its unit, as in `tables.encoder`

ROUNDING = 1e-6  # of a range: by which the mean of equal values may be out of it


class Scale(NamedTuple):
    """Units in which a column is added up: its agreed range becomes -1 to 1; without one it is unchanged."""

    middle: float = 0.0
    half: float = 1.0

    @classmethod
    def of(cls, column: Column) -> "Scale":
        if column.minimum is None or column.maximum is None:
            return cls()
        low, high = column.minimum / 2, column.maximum / 2  # of halves neither sum nor difference overflows
        return cls(low + high, high - low)


@dataclass(frozen=True)
class ContractQuestion:
    """What a contract leaves open: each site gives a vector of numbers about it, and names of categories."""

    numbers: tuple[Column, ...]
    listed: tuple[Column, ...]  # categories of which candidates are listed
    free: tuple[Column, ...]  # categories of which nothing is known

    @classmethod
    def of(cls, contract: Contract) -> "ContractQuestion":
        """The question of a contract; DataError if nobody can answer it."""
        if contract.data == ARRAYS and contract.open:
            raise DataError("the classes of arrays are not agreed by sums; list them in the contract")
        named = [column for column in contract.open if column.type != NUMBER]
        return cls(
            tuple(column for column in contract.open if column.type == NUMBER),
            tuple(column for column in named if column.candidates),
            tuple(column for column in named if not column.candidates),
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of entries of the vector in each pass."""
        return 2 * len(self.numbers) + sum(len(c.candidates) for c in self.listed), 2 * len(self.numbers)


class HeldOut(NamedTuple):
    """Which training rows of a site are for validation: it learns nothing from them, neither an encoder nor a model."""

    fraction: float  # 0: none
    seed: int  # of the run
    client: int  # the number of the site

    def kept(self, contract: Contract, data: Dataset) -> NDArray[np.bool_]:
        """Which samples train, as in the training that follows.

        Args:
            contract: What the members have agreed on. Where they have not agreed on the classes, they will in
                the order of `_ordered`.
            data: The site's, with its own classes.
        """
        strata = data.train.strata
        if contract.task == CLASSIFICATION:
            agreed = contract.targets[0].categories or sorted(data.classes)
            numbers = {name: number for number, name in enumerate(agreed)}
            strata = np.array([numbers.get(name, -1) for name in data.classes])[strata]
        sides = validation_part(data.train, strata, self.fraction, self.seed, self.client)
        return sides.train if sides.test.any() else ~sides.test


class SiteValues(NamedTuple):
    """What a site's rows for training say about a question."""

    values: dict[str, NDArray[np.float64]]  # of columns of numbers, without missing ones
    counts: dict[str, dict[str, int]]  # of columns of categories
    rows: dict[str, NDArray[np.object_]]  # all cells of the rows: which rows they are


def site_of(contract: Contract, files: Sequence[Path], held_out: HeldOut | None = None) -> SiteValues:
    """A site's answer material, from its table.

    Args:
        contract: What the federation has agreed on.
        files: The table, and test rows if they are in a file of their own.
        held_out: The rows for validation; None: there are none.
    """
    return values_of(contract, [read_table(file) for file in files], held_out)


def rows_of(contract: Contract, tables: Sequence[DataTable], leave_out: bool = True) -> Dataset:
    """Which rows of a site train and which test, by their numbers, as of `numbered_rows`.

    Args:
        contract: What the federation has agreed on.
        tables: One, or train and test.
        leave_out: Whether train rows that are copies of test rows are left out.
    """
    features = [column.name for column in contract.features]
    text = contract.columns[0].name if contract.data == TEXT else ""
    used = [*contract.target_names, *filter(None, (contract.group, contract.time, text)), *features]
    require_columns(tables, used)
    for table in tables:
        for name in used:
            check_plain(name, table.columns[name])
    return numbered_rows(
        tables,
        contract.target_names,
        features,
        contract.missing,
        contract.task,
        contract.group,
        contract.time,
        contract.split,
        text,
        leave_out,
    )


def values_of(
    contract: Contract, tables: Sequence[DataTable], held_out: HeldOut | None = None, leave_out: bool = True
) -> SiteValues:
    """A site's answer material.

    Args:
        contract: What the federation has agreed on.
        tables: The site's, or those of its train and test rows.
        held_out: The rows for validation; None: there are none.
        leave_out: As of `rows_of`.
    """
    question, data = ContractQuestion.of(contract), rows_of(contract, tables, leave_out)
    numbers = data.train.x[:, 0] if held_out is None else data.train.x[held_out.kept(contract, data), 0]
    table = DataTable({name: column.take(numbers) for name, column in tables[0].columns.items()})
    targets = set(contract.target_names)
    values = {c.name: _values(c.name, table, c.name in targets) for c in question.numbers}
    is_class = contract.task == CLASSIFICATION
    counts = {
        column.name: counts_of(table.columns[column.name], is_class and column.name in targets)
        for column in (*question.listed, *question.free)
    }
    return SiteValues(values, counts, row_texts(table))


def _values(name: str, table: DataTable, is_target: bool) -> NDArray[np.float64]:
    cells = numbers_of(name, table.columns[name])
    if cells is None:
        raise DataError(f'the column "{name}" has texts, and numbers in the federation')
    numbers = floats(cells)
    numbers = numbers[~np.isnan(numbers)]
    return numbers.astype(np.float32).astype(np.float64) if is_target else numbers  # as samples have targets


def counts_of(cells: Cells, is_class: bool) -> dict[str, int]:
    """The number of rows of each category.

    Args:
        cells: Of a column.
        is_class: Whether they are classes, which keep their texts; others are named as whole numbers
            where they are such.
    """
    values, codes = coded(cells)
    rows = np.bincount(codes[codes >= 0], minlength=len(values)).tolist()
    counts: dict[str, int] = {}
    for value, count in zip(values, rows, strict=True):
        is_whole = not isinstance(value, str | bool) and float(value).is_integer() and not is_class
        name = str(int(value)) if is_whole else text_of(value)
        counts[name] = counts.get(name, 0) + count
    return counts


def may_leave(values: NDArray[np.float64], smallest: int) -> bool:
    """Whether the sum of these values hides single rows.

    It needs so many values. If all but a few are equal, the sum gives away these few: then it stays too.

    Args:
        values: Of a site's rows.
        smallest: Rows that a sum needs.
    """
    if len(values) < smallest:
        return False
    _, counts = np.unique(values, return_counts=True)
    others = len(values) - int(counts.max())
    return others == 0 or others >= smallest


class ColumnMoments(NamedTuple):
    """All that an answer depends on, whatever range and centre: floats round sums, and never single values.

    Of values over a huge range, only the large ones would be above zero in a sum of squares.
    """

    number: int
    total: float
    mean: float
    rest: float  # sum of the differences to the mean: what rounding left
    squares: float  # sum of their squares

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "ColumnMoments":
        mean = float(values.mean())
        differences = values - mean
        return cls(
            len(values),
            float(values.sum()),
            mean,
            float(differences.sum()),
            float(np.square(differences).sum()),
        )

    def first(self, scale: Scale) -> list[float]:
        """The number of values and their sum."""
        return [float(self.number), (self.total - self.number * scale.middle) / scale.half]

    def second(self, scale: Scale, centre: float) -> list[float]:
        """The sums of the differences to the centre, and of their squares.

        Args:
            scale: The range of the column.
            centre: The mean over all sites.
        """
        shift = self.mean - centre
        differences = self.number * shift + self.rest
        squares = self.squares + 2 * shift * self.rest + self.number * shift * shift
        return [differences / scale.half, squares / scale.half / scale.half]


def sums_of(
    question: ContractQuestion, site: SiteValues, smallest: int, centres: Vector | None = None
) -> Vector:
    """The vector that a site gives.

    Args:
        question: What is open.
        site: The site's rows.
        smallest: With fewer rows nothing is given.
        centres: In the second pass the mean of each column of numbers; None: the first pass.
    """
    entries: list[float] = []
    for number, column in enumerate(question.numbers):
        values, scale = site.values[column.name], Scale.of(column)
        if not may_leave(values, smallest):
            entries += [0.0, 0.0]
            continue
        moments = ColumnMoments.of(values)
        entries += moments.first(scale) if centres is None else moments.second(scale, float(centres[number]))
    if centres is None:
        for column in question.listed:
            counts = site.counts[column.name]
            entries += [float(counts.get(name, 0) >= smallest) for name in column.candidates]
    return np.array(entries, np.float64)


def names_of(question: ContractQuestion, site: SiteValues, smallest: int) -> dict[str, list[str]]:
    """The categories of columns without candidates that a site has in enough rows.

    Args:
        question: What the contract leaves open.
        site: What the rows say.
        smallest: Rows that a category needs.
    """
    return {
        column.name: sorted(name for name, count in site.counts[column.name].items() if count >= smallest)
        for column in question.free
    }


# What the sums of all sites say


def centres_of(question: ContractQuestion, total: Vector) -> Vector:
    """The mean of each column of numbers, from the first pass; DataError if no site gives one.

    Args:
        question: What the contract leaves open.
        total: The sum of the sites' first answers.
    """
    counts, sums = total[: 2 * len(question.numbers)].reshape(-1, 2).T
    if len(lacking := np.flatnonzero(np.rint(counts) < 1)):
        name = question.numbers[lacking[0]].name
        raise DataError(
            f'no site has enough values of "{name}" to give their sum: give its mean and deviation in the '
            "contract, or leave the column out"
        )
    scales = [Scale.of(column) for column in question.numbers]
    middles, halves = np.array(scales, np.float64).reshape(-1, 2).T
    return np.asarray(middles + halves * sums / np.rint(counts), np.float64)


def frozen(
    contract: Contract, first: Vector, second: Vector, names: Iterable[Mapping[str, Collection[str]]] = ()
) -> Contract:
    """The contract with what all sites together say; DataError names a column about which they say nothing.

    Args:
        contract: The open one.
        first: The sum of the sites' vectors of the first pass.
        second: The sum of the second pass.
        names: The categories that each site has.
    """
    question = ContractQuestion.of(contract)
    agreed: dict[str, dict[str, Any]] = {}
    counts = np.rint(first[: 2 * len(question.numbers) : 2])
    for column, count, centre, (difference, square) in zip(
        question.numbers, counts, centres_of(question, first), second.reshape(-1, 2), strict=True
    ):
        half, rest = Scale.of(column).half, difference / count  # what the rounded mean left
        deviation = half * float(np.sqrt(max(square / count - rest**2, 0.0)))
        mean = float(centre + half * rest)
        _require_in_range(column, mean)
        usual = deviation if deviation > SMALLEST_DEVIATION else 1.0
        agreed[column.name] = {"mean": mean, "deviation": usual}
    start = 2 * len(question.numbers)
    for column in question.listed:
        sites = np.rint(first[start : start + len(column.candidates)])
        start += len(column.candidates)
        common = [name for name, number in zip(column.candidates, sites, strict=True) if number > 0]
        agreed[column.name] = {"categories": _ordered(column, common), "candidates": ()}
    of_sites = list(names)
    for column in question.free:
        named = {name for site in of_sites for name in site.get(column.name, ())}
        agreed[column.name] = {"categories": _ordered(column, named)}
    return contract.replaced(agreed)


def _require_in_range(column: Column, mean: float) -> None:
    """DataError if the mean of all sites is out of the range of the column: then a site's mean is."""
    low = -math.inf if column.minimum is None else column.minimum
    high = math.inf if column.maximum is None else column.maximum
    rounding = ROUNDING * (high - low if math.isfinite(high - low) else abs(mean))
    if not low - rounding <= mean <= high + rounding:
        raise DataError(
            f'the mean of "{column.name}" over all sites is {mean:.4g}, which is not in {low:g} to {high:g}: '
            "a site has it in another unit, or the range is wrong. `copfl site check` at each site says "
            "which; one that corrects its table gives its sums again if its policy has statistics.questions "
            "= 2"
        )


def _ordered(column: Column, names: Collection[str]) -> tuple[str, ...]:
    if not names:
        raise DataError(
            f'no site has a category of "{column.name}" in enough rows: list its categories in the contract, '
            "or leave the column out"
        )
    if len(names) > MOST_CATEGORIES:
        raise DataError(
            f'"{column.name}" has {len(names):,} categories; at most {MOST_CATEGORIES:,} are accepted'
        )
    return tuple(sorted(names))
