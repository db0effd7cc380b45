"""What the owner of a table should hear before anything is trained on it, each with what to do.

`tables.from_tables` asks every question once for a data set. An answer is a record whose `text` is for the owner:

1. `spellings`: a category that is written in several ways is several categories.
2. `repeated_rows`: copies of a row, above all those of a train row among the test rows.
3. `giveaways`: a column from which alone the target follows.
4. `site_column`: a column that looks like a site, where no column was named as the client.
5. `group_columns`: a column that looks like a patient with several rows.
6. `identifiers`: a column whose name says that it numbers patients, cases or rows.
7. `far_numbers`: a few numbers of a column that are far from all others, as 999999 is.
8. `other_units`: a site whose numbers of a column are a multiple of those of the others.

Every question is bounded: for a table of 100,000 rows and 40 columns all of them take about a second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.data.copies import copies, mixed
from copfl.data.samples import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL, Dataset
from copfl.data.tables.columns import Column, DataTable, coded, floats, is_number, joined, text_of
from copfl.data.tables.encoders import TableInfo, one_spelling
from copfl.data.targets import plain_spelling
from copfl.errors import how_to_set
from copfl.tables import listed

SHOWN = 3  # examples in a sentence
Codes = NDArray[np.int64]


class AllRows(NamedTuple):
    """All rows of a data set, those for training first."""

    table: DataTable  # the columns that are used
    numbers: Codes  # in their file, from 0
    y: NDArray[Any]
    site: Codes  # 0 where no column was named as the client
    sites: tuple[str, ...]  # their names; none: no column was named
    is_test: NDArray[np.bool_]
    kind: str


def rows_of(tables: Sequence[DataTable], data: Dataset, columns: Sequence[str]) -> AllRows:
    """The rows of train and test in one table.

    Args:
        tables: One, or train and test.
        data: Says by the number of a row, x [n, 1], which rows of the tables are train and test.
        columns: Those that are compared.
    """
    splits = [(tables[0], data.train), (tables[-1], data.test)]
    used_columns = {
        name: joined([table.columns[name].take(split.x[:, 0]) for table, split in splits]) for name in columns
    }
    sites = [np.zeros(len(split), np.int64) if split.group is None else split.group for _, split in splits]
    return AllRows(
        DataTable(used_columns),
        np.concatenate([split.x[:, 0] for _, split in splits]),
        np.concatenate([split.y for _, split in splits]),
        np.concatenate(sites),
        data.groups,
        np.repeat([False, True], [len(data.train), len(data.test)]),
        data.kind,
    )


# 1. A category in several spellings


class Spelling(NamedTuple):
    text: str
    rows: int
    sites: tuple[str, ...]  # that write it so; none: no column was named as the client

    def __str__(self) -> str:
        where = f", at {listed(self.sites, SHOWN)}" if self.sites else ""
        return f'"{self.text[:40]}" ({self.rows:,} row{"s" * (self.rows != 1)}{where})'


class Spellings(NamedTuple):
    """Texts of a column that are probably spellings of the same categories."""

    column: str
    alike: tuple[tuple[Spelling, ...], ...]  # of each category
    are_united: bool  # they are spellings of whole numbers, which become one category each

    @property
    def text(self) -> str:
        shown = listed([" and ".join(map(str, spellings)) for spellings in self.alike], SHOWN)
        if self.are_united:
            return f'in the column "{self.column}" these are one category: {shown}'
        return (
            f'the column "{self.column}" has as different categories {shown}; if they mean the same, write them '
            "alike in the file"
        )


def spellings(column: str, rows: AllRows) -> list[Spellings]:
    """The categories of a column that are written in several ways: those that are united, and the others.

    Args:
        column: Its name.
        rows: With this column.
    """
    values, codes = coded(rows.table.columns[column])
    texts = [text_of(value) for value in values]
    usual = set(one_spelling(texts))
    numbers_of: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        numbers_of.setdefault(plain_spelling(text), []).append(number)

    def spelling(number: int) -> Spelling:
        where = codes == number
        sites = tuple(rows.sites[site] for site in np.unique(rows.site[where])) if rows.sites else ()
        return Spelling(texts[number], int(where.sum()), sites)

    alike: dict[bool, list[tuple[Spelling, ...]]] = {True: [], False: []}
    for numbers in numbers_of.values():
        if len(numbers) > 1:
            are_united = len(usual & {texts[number] for number in numbers}) == 1
            alike[are_united].append(tuple(map(spelling, numbers)))
    return [
        Spellings(column, tuple(alike_texts), are_united)
        for are_united, alike_texts in alike.items()
        if alike_texts
    ]


# 2. The same row several times


class RepeatedRows(NamedTuple):
    """Rows that equal an earlier row of their site in all columns that are used."""

    repeats: int
    total: int
    in_test: int  # test rows that equal a train row
    tested: int
    examples: tuple[tuple[int, ...], ...]  # rows that are alike, by their number in the file from 1
    are_copies: bool  # at some site it is improbable that they are alike by chance
    of_sites: bool  # a column was named as the client

    @property
    def text(self) -> str:
        where = " of their site" if self.of_sites else ""
        shown = ", ".join(" and ".join(map(str, numbers)) for numbers in self.examples)
        examples = f" (such as rows {shown})" if shown else ""
        what = "are copies of" if self.are_copies else "equal"
        text = f"{self.repeats:,} of {self.total:,} rows {what} another row{where}{examples}"
        if self.in_test:
            text += f", and {self.in_test:,} of {self.tested:,} test rows {what} a train row"
        if not self.are_copies:
            return f"{text}: its columns have so few values that this may be chance"
        side = (
            ", so that the test also rewards memory"
            if self.in_test
            else ", and copies are on one side, train or test"
        )
        return f"{text}{side}; leave copies out of the file, unless they are different cases"


def repeated_rows(rows: AllRows, are_numbered: bool = True, is_text: bool = False) -> RepeatedRows | None:
    """How many rows repeat another row of their site; None: no row does.

    Args:
        rows: With the targets among their columns.
        are_numbered: Whether the numbers of the rows are those in the file.
        is_text: Whether a row is a text; texts are not alike by chance.
    """
    columns = [_bits(cells) for cells in rows.table.columns.values()]
    digest = mixed(rows.site.astype(np.uint64))
    for bits in columns:
        digest = mixed(digest * np.uint64(0x9E3779B97F4A7C15) + bits)
    _, row_of, counts = np.unique(digest, return_inverse=True, return_counts=True)
    if not (counts > 1).any():
        return None
    repeated = np.flatnonzero(counts > 1)
    trained = np.bincount(row_of[~rows.is_test], minlength=len(counts)) > 0
    order = np.argsort(row_of, kind="stable")
    firsts = np.searchsorted(row_of[order], np.arange(len(counts)))
    members = [rows.numbers[order[firsts[k] : firsts[k] + counts[k]]] + 1 for k in repeated]
    members.sort(key=lambda alike: int(alike.min()))
    return RepeatedRows(
        int(counts[repeated].sum() - len(repeated)),
        len(row_of),
        int(trained[row_of[rows.is_test]].sum()),
        int(rows.is_test.sum()),
        tuple(tuple(sorted(alike.tolist())[:SHOWN]) for alike in members[:SHOWN]) if are_numbered else (),
        bool((copies(digest, columns, rows.site, is_text) != np.arange(len(row_of))).any()),
        bool(rows.sites),
    )


def _bits(cells: Column) -> NDArray[np.uint64]:
    """A number for each cell, equal where the cells are."""
    if is_number(cells):
        return (floats(cells) + 0.0).view(np.uint64)  # -0.0 + 0.0 is 0.0
    return coded(cells).codes.view(np.uint64)


# 3. A column that gives the target away

NEARLY = 0.97  # of the errors of a constant answer that such a column avoids
NEARLY_OF_VALUES = 0.9  # of the variance of values that it explains; a correlation of .95
NEARLY_BY_NAME = 0.5  # of either, if it is called as the target
NEARLY_AT_A_SITE = 0.9  # of the share over all sites, at each site that can be judged by itself
FEWEST_ERRORS = 10  # of constant answers, from which a column is judged
MOST_TRIED = 4_000  # rows
BINS = 512  # of a column of numbers
WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+"


class Giveaway(NamedTuple):
    """A column from which alone the target follows, at every site."""

    column: str
    target: str
    share: float  # of the errors of a constant answer that it avoids, or of the variance that it explains
    kind: str

    @property
    def text(self) -> str:
        share = f"{int(1000 * self.share) / 10:g} %"
        of = "of its variance" if self.kind == REGRESSION else "of the errors of a constant answer avoided"
        leave_out = how_to_set("data.drop", self.column)
        if self.kind == SURVIVAL:
            return (
                f'the column "{self.column}" alone tells the {self.target} of survival ({share} of the variance of '
                f"its ranks, on rows that it was not fitted to); if it is not known at the start, leave it out with "
                f"{leave_out}"
            )
        return (
            f'the column "{self.column}" alone predicts the target "{self.target}" ({share} {of}, on rows that it '
            f"was not fitted to); if it is not known before the target, leave it out with {leave_out}"
        )


def giveaways(rows: AllRows, columns: Sequence[str], targets: Sequence[str]) -> list[Giveaway]:
    """The columns that predict a target nearly alone, each fitted on one half and tried on the other.

    Of survival the targets are the ranks of the times, and the events. A column that is called as the target is
    doubted earlier.

    Args:
        rows: With these columns.
        columns: Those that a model learns from.
        targets: The names of what it predicts.
    """
    if rows.kind not in (CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL):
        return []
    looked_at = np.random.default_rng(0).permutation(len(rows.numbers))[:MOST_TRIED]
    halves = looked_at[::2], looked_at[1::2]
    site = np.concatenate([rows.site[half] for half in halves])
    answers = []
    of_targets = [*(rows.y[:, None] if rows.y.ndim == 1 else rows.y).T]
    if rows.kind == SURVIVAL:
        of_targets = [
            np.searchsorted(np.sort(of_targets[0]), of_targets[0]).astype(np.float64),
            of_targets[1],
        ]
    for target, y in zip(targets, of_targets, strict=False):
        is_value = rows.kind == REGRESSION or (rows.kind == SURVIVAL and target == targets[0])
        constant = _errors(rows.site.astype(np.float64), False, y, halves, is_value)
        to_lose = np.bincount(site, constant)  # by site
        wrong = np.bincount(site, constant > 0)
        if wrong.sum() < FEWEST_ERRORS:
            continue
        for name in columns:
            cells = rows.table.columns[name]
            numbers = floats(cells) if is_number(cells) else coded(cells).codes.astype(np.float64)
            errors = [_errors(numbers, is_number(cells), y, halves, is_value)]
            if is_value and is_number(cells):
                errors.append(_errors_of_lines(numbers, y, rows.site, halves))
            lost = np.bincount(site, min(errors, key=lambda each: float(each.sum())))
            share = 1 - lost.sum() / to_lose.sum()
            at_sites = 1 - lost[wrong >= FEWEST_ERRORS] / to_lose[wrong >= FEWEST_ERRORS]
            nearly = NEARLY_OF_VALUES if is_value else NEARLY
            is_nearly = share >= nearly and (at_sites >= NEARLY_AT_A_SITE * nearly).all()
            if is_nearly or (share >= NEARLY_BY_NAME and _is_called_as(name, target)):
                kind = CLASSIFICATION if rows.kind == SURVIVAL and not is_value else rows.kind
                answers.append(Giveaway(name, "time" if kind == SURVIVAL else target, float(share), kind))
    return answers


def _is_called_as(column: str, target: str) -> bool:
    """Whether all words of the target's name are words of the column's, as in price and log_price."""
    own, wanted = ({w.casefold() for w in re.findall(WORD, name)} for name in (column, target))
    return bool(wanted) and wanted <= own and max(map(len, wanted)) > 1


def _errors_of_lines(
    x: NDArray[np.float64], y: NDArray[Any], site: Codes, halves: tuple[Codes, Codes]
) -> NDArray[np.float64]:
    """The squared error of each row of the halves, by one slope, and a mean of each site, of the other half."""
    errors = []
    x = np.where(np.isnan(x), np.nanmean(x) if not np.isnan(x).all() else 0.0, x)
    for tried, fitted in (halves, halves[::-1]):
        rows = np.maximum(np.bincount(site[fitted], minlength=site.max() + 1), 1)
        x_mean, y_mean = (np.bincount(site[fitted], v[fitted], site.max() + 1) / rows for v in (x, y))
        inside = x[fitted] - x_mean[site[fitted]]
        slope = (inside * y[fitted]).sum() / max((inside**2).sum(), 1e-300)
        errors.append((y_mean[site[tried]] + slope * (x[tried] - x_mean[site[tried]]) - y[tried]) ** 2)
    return np.concatenate(errors)


def _errors(
    x: NDArray[np.float64], is_ordered: bool, y: NDArray[Any], halves: tuple[Codes, Codes], is_value: bool
) -> NDArray[np.float64]:
    """The error of each row, of one half after the other, of what the other half says about it by one column."""
    errors = []
    for tried, fitted in (halves, halves[::-1]):
        predicted = _predicted(x[fitted], y[fitted], x[tried], is_ordered, is_value)
        errors.append((predicted - y[tried]) ** 2 if is_value else predicted != y[tried])
    return np.concatenate(errors).astype(np.float64)


def _predicted(
    x: NDArray[np.float64], y: NDArray[Any], further: NDArray[np.float64], is_ordered: bool, is_value: bool
) -> NDArray[Any]:
    """The targets of further values of a column: the mean, or the most frequent class, of its bin."""
    edges = np.unique(x[~np.isnan(x)])
    if is_ordered and len(edges) > 1:
        edges = (edges[1:] + edges[:-1]) / 2  # the bin of a value is that of the nearest fitted one
        edges = edges[:: len(edges) // BINS + 1]
    bins, further_bins = (np.searchsorted(edges, values, side="right") for values in (x, further))
    bins[np.isnan(x)] = further_bins[np.isnan(further)] = len(edges) + 1
    if is_value:
        count = np.bincount(bins, minlength=len(edges) + 2)
        mean = np.bincount(bins, y, minlength=len(edges) + 2) / np.maximum(count, 1)
        return np.where(count > 0, mean, y.mean())[further_bins]
    classes, labels = np.unique(y, return_inverse=True)
    counts = np.zeros((len(edges) + 2, len(classes)), np.int32)
    np.add.at(counts, (bins, labels), 1)
    usual = np.bincount(labels).argmax()
    best = np.where(counts.any(axis=1), counts.argmax(axis=1), usual)
    return np.asarray(classes[best][further_bins])


# 4. A column that looks like a site

SITES = re.compile(
    "(bank|branch|center|centre|client|clinic|cluster|customer|desk|device|district|facility|factory|farm|hospital|"
    "household|institute|institution|lab|laboratory|machine|node|participant|patient|person|plant|practice|school|"
    "sensor|shop|site|speaker|station|store|subject|tenant|user|vehicle|ward|writer)s?"
)
ENDINGS = ("id", "ids", "name", "no", "nr", "num", "number", "code", "key")  # hospital_id is a hospital
FEWEST_ROWS = 3  # of a site, in the median
FEWEST_BLOCKS = 4  # sites whose rows follow each other
MOST_BLOCKS = 1.1  # of each site
FEWEST_SHARED = 2  # columns whose value is one for all rows of a site


class SiteColumn(NamedTuple):
    """A column that looks like a site, where no column was named as the client."""

    column: str
    sites: int
    rows: int  # of a site, in the median
    shared: tuple[
        str, ...
    ]  # columns that have one value at each site, by which it was found; else by its name

    @property
    def text(self) -> str:
        client = how_to_set("data.client", self.column, "--client")
        drop = how_to_set("data.drop", self.column)
        why = f": {self.sites:,} values, each in {self.rows:,} rows in the median"
        if self.shared:
            why += f", one block after the other, with one value of {listed(self.shared, SHOWN)} in each"
        return (
            f'the column "{self.column}" looks like a site{why}, and no column is named as the client; if its '
            f"values are your sites, add {client}; if not, and it should be no feature, {drop}"
        )


def site_column(table: DataTable) -> SiteColumn | None:
    """The column that looks most like a site: by its name, or as the file has one block of rows for each value.

    Args:
        table: The columns that nobody has named as target, client, text or left out, in the order of the file.
    """
    codes = {name: coded(cells) for name, cells in table.columns.items() if _may_be_names(cells)}
    grouping = {
        name: column
        for name, column in codes.items()
        if len(column.values) > 1 and _rows_of_a_value(column.codes) >= FEWEST_ROWS
    }
    named = [name for name in grouping if _is_called_site(name)]
    if named:
        name = max(
            named, key=lambda name: _rows_of_a_value(codes[name].codes)
        )  # a hospital, not its patients
        return SiteColumn(name, len(codes[name].values), _rows_of_a_value(codes[name].codes), ())
    for name, column in grouping.items():
        count = len(column.values)
        blocks = 1 + np.count_nonzero(np.diff(column.codes))
        is_in_blocks = count >= FEWEST_BLOCKS and blocks <= MOST_BLOCKS * count and (column.codes >= 0).all()
        if not is_in_blocks:
            continue
        shared = tuple(
            other
            for other, cells in codes.items()
            if 1 < len(cells.values) < count
            and len(np.unique(column.codes * len(cells.values) + cells.codes)) == count
        )
        if len(shared) >= FEWEST_SHARED:
            return SiteColumn(name, count, _rows_of_a_value(column.codes), shared)
    return None


def _may_be_names(cells: Column) -> bool:
    """Whether the cells are neither lists nor, by the first rows, fractions: no site is called 1.5."""
    import pyarrow as pa

    if not is_number(cells):
        return not pa.types.is_nested(cells.type)
    first = floats(cells[:1000])
    return bool((first[~np.isnan(first)] % 1 == 0).all())


def _rows_of_a_value(codes: Codes) -> int:
    return int(np.median(np.bincount(codes[codes >= 0])))


def _is_called_site(name: str) -> bool:
    """Whether the name is of a site, such as hospital, Site_ID or schoolName."""
    parts = re.findall(WORD, name)
    words = [word.casefold() for word in parts]
    while len(words) > 1 and words[-1] in ENDINGS:
        words.pop()
    return bool(words) and SITES.fullmatch(words[-1]) is not None


# 5. A column that looks like a patient

MOST_REPEATS = 4  # rows of a patient, on average: a ward or a doctor has more
FEWEST_REPEATED = 10  # patients with several rows


class GroupColumn(NamedTuple):
    """A column that looks like a patient of several rows, where no column was named as the group."""

    column: str
    values: int
    rows: int

    @property
    def text(self) -> str:
        return (
            f'the column "{self.column}" looks like a patient\'s number: {self.values:,} values in {self.rows:,} rows, '
            f"each at one client alone; if so, add {how_to_set('data.group', self.column, '--group')}, else rows of "
            f"one patient train and test; if not, and it should be no feature, {how_to_set('data.drop', self.column)}"
        )


def group_columns(table: DataTable, site: Column) -> list[GroupColumn]:
    """Columns whose values have few rows each, and never rows at two sites, as chance hardly does.

    Args:
        table: The columns to learn from.
        site: Of each row.
    """
    sites, patients = coded(site), []
    for name, cells in table.columns.items():
        if not _may_be_names(cells):
            continue
        column = coded(cells)
        count, rows = len(column.values), len(cells)
        is_repeated = np.count_nonzero(np.bincount(column.codes[column.codes >= 0]) > 1) >= FEWEST_REPEATED
        if cells.null_count or not is_repeated or rows > MOST_REPEATS * count:
            continue
        if len(np.unique(column.codes * len(sites.values) + sites.codes)) == count and len(sites.values) > 1:
            patients.append(GroupColumn(name, count, rows))
    return patients


# 6. A column that numbers patients, cases or rows

_OF = (
    "patient|patienten|pat|person|personen|proband|probanden|subject|participant|case|fall|record|visit|besuch|"
    "encounter|episode|admission|aufnahme|hospital|insurance|versicherten|versicherungs|study|studien|sample|proben|"
    "row|zeilen|lfd|nhs|kv"
)
_NUMBER = "id|ids|nr|no|num|number|nummer|key|code|identifier"
IDENTIFIERS = re.compile(
    f"id|pid|mrn|ssn|uuid|guid|identifier|({_OF})({_NUMBER})|patient|person|proband|subject"
)
FEWEST_IDENTIFIERS = 5


class Identifier(NamedTuple):
    """A column that numbers patients, cases or rows by its name, with few rows of each value."""

    column: str
    values: int
    rows: int

    @property
    def text(self) -> str:
        what = (
            f'the column "{self.column}" looks like a number of patients or cases: {self.values:,} values in '
        )
        what += f"{self.rows:,} rows, which tell nothing about other rows"
        drop = how_to_set("data.drop", self.column)
        if self.values == self.rows:
            return f"{what}; leave it out with {drop}"
        group = how_to_set("data.group", self.column, "--group")
        return f"{what}; add {group}, else rows of one train and test, or leave it out with {drop}"


def identifiers(table: DataTable) -> list[Identifier]:
    """The columns that look like numbers of patients, cases or rows, such as patient_id, PID or Fallnummer.

    Args:
        table: The columns to learn from.
    """
    found = []
    for name, cells in table.columns.items():
        plain = re.sub(r"[\W\d_]", "", name).casefold()
        if IDENTIFIERS.fullmatch(plain) is None or not _may_be_names(cells):
            continue
        count, rows = len(coded(cells).values), len(cells) - cells.null_count
        if count >= FEWEST_IDENTIFIERS and rows <= MOST_REPEATS * count:
            found.append(Identifier(name, count, rows))
    return found


# 7. Numbers far from all others

FARTHEST = 10.0  # times as far from the median as the number before
MOST_FAR = 0.1  # of the rows
FEWEST_NEAR = 10  # different numbers that are not far away


class FarNumbers(NamedTuple):
    """A few numbers of a column that are far from all others."""

    column: str
    rows: int
    total: int
    example: float  # the most frequent one
    values: int  # different ones

    @property
    def text(self) -> str:
        others = "" if self.values == 1 else f", and {self.values - 1:,} more"
        return (
            f'the column "{self.column}" has {self.rows:,} of {self.total:,} numbers far from all others '
            f"({self.example:g}{others}); if they stand for a missing value, leave "
            "these cells empty in the file, and if they are in another unit, convert them"
        )


def far_numbers(table: DataTable) -> list[FarNumbers]:
    """The columns with numbers that are ten times as far from the median as all others, in a tenth of the rows at most.

    Args:
        table: The columns to learn from.
    """
    found = []
    for name, cells in table.columns.items():
        if not is_number(cells):
            continue
        numbers = floats(cells)
        numbers = numbers[~np.isnan(numbers)]
        if len(numbers) < FEWEST_NEAR:
            continue
        distance = np.abs(numbers - np.median(numbers))
        ordered = np.sort(distance)
        quarter, first = ordered[len(ordered) // 2], len(ordered) - int(MOST_FAR * len(ordered))
        gaps = np.flatnonzero(ordered[first:] > FARTHEST * np.maximum(ordered[first - 1 : -1], quarter))
        if not len(gaps):
            continue
        is_far = distance >= ordered[first + gaps[0]]
        if len(np.unique(numbers[~is_far])) >= FEWEST_NEAR:
            values, counts = np.unique(numbers[is_far], return_counts=True)
            example = float(values[counts.argmax()])
            found.append(FarNumbers(name, int(is_far.sum()), len(cells), example, len(values)))
    return found


# 8. A site in another unit

LEAST_FACTOR = 5.0  # between units; millimoles and milligrams of glucose have 18
SAME_UNIT = 3.0  # between the medians of sites in one unit, and between the factors of median and spread
FEWEST_ROWS_OF_A_UNIT = 8  # of a site


class OtherUnit(NamedTuple):
    """A site whose numbers of a column are a multiple of those of the other sites."""

    column: str
    site: str
    factor: float  # of its median to that of the others

    @property
    def text(self) -> str:
        factor = f"{self.factor:.3g} times" if self.factor > 1 else f"1/{1 / self.factor:.3g} of"
        return (
            f'the column "{self.column}" may have another unit at {self.site}: its numbers there are {factor} those of '
            "the other sites, and so is their spread; convert them in the file if so"
        )


def other_units(rows: AllRows, columns: Sequence[str]) -> list[OtherUnit]:
    """The sites whose numbers are apart from those of all others by one factor, in the median and in the spread.

    Args:
        rows: With these columns.
        columns: Those that a model learns from.
    """
    found = []
    for name in columns:
        if not rows.sites or not is_number(rows.table.columns[name]):
            continue
        numbers = floats(rows.table.columns[name])
        of_sites = {}
        for number, site in enumerate(rows.sites):
            own = numbers[(rows.site == number) & ~np.isnan(numbers)]
            if len(own) >= FEWEST_ROWS_OF_A_UNIT:
                low, middle, high = np.quantile(own, (0.1, 0.5, 0.9))
                if middle != 0 and high > low:
                    of_sites[site] = (low, middle, high)
        for site, (low, middle, high) in of_sites.items():
            others = np.array([of for other, of in of_sites.items() if other != site])
            if not len(others) or (np.sign(others[:, 1]) != np.sign(middle)).any():
                continue
            sizes = np.abs(others[:, 1])
            factor = abs(middle) / np.median(sizes)
            spread = (high - low) / np.median(others[:, 2] - others[:, 0])
            is_apart = low > others[:, 2].max() or high < others[:, 0].min()
            if (
                is_apart
                and max(factor, 1 / factor) >= LEAST_FACTOR
                and sizes.max() <= SAME_UNIT * sizes.min()
                and 1 / SAME_UNIT <= spread / factor <= SAME_UNIT
                and (len(others) > 1 or factor > 1)  # of two sites one is named
            ):
                found.append(OtherUnit(name, site, float(factor)))
    return found


# All of them


class Doubts(NamedTuple):
    """What is said about a table: before training, and beside its results."""

    warnings: list[str]
    notes: list[str]


def doubts_of(
    tables: Sequence[DataTable], data: Dataset, info: TableInfo, are_numbered: bool = True
) -> Doubts:
    """The answers to the questions about the rows that are used.

    Args:
        tables: One, or train and test.
        data: Says by the number of a row which rows are train and test.
        info: The columns to predict, and those to learn from.
        are_numbered: Whether rows have the numbers that they have in the file.
    """
    features = [column.name for column in info.columns]
    rows = rows_of(tables, data, [*([info.text] if info.text else features), *info.targets])
    answers = Doubts([], [])
    for column in info.columns:
        if column.categories:
            for alike in spellings(column.name, rows):
                (answers.notes if alike.are_united else answers.warnings).append(alike.text)
    repeated = repeated_rows(rows, are_numbered and len(tables) == 1, bool(info.text))
    if repeated is not None:
        (answers.warnings if repeated.are_copies else answers.notes).append(repeated.text)
    answers.warnings.extend(giveaway.text for giveaway in giveaways(rows, features, info.targets))
    units = other_units(rows, features)
    in_other_units = {one.column for one in units}
    numbers = [c.name for c in info.columns if not c.categories and c.name not in in_other_units]
    far = far_numbers(DataTable({name: rows.table.columns[name] for name in numbers})) if numbers else []
    answers.warnings.extend([*(one.text for one in units), *(one.text for one in far)])
    return answers
