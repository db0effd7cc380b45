"""Whether a site's data fit the data contract, in the words of the data's owner. Nothing leaves the site.

`copfl site check` shows it, and a node refuses data that do not fit.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl import foreign
from copfl.data.contract.contract import ARRAYS, BOOLEAN, CATEGORY, DATE, NUMBER, Column, Contract
from copfl.data.contract.statistics import counts_of
from copfl.data.samples import CLASSIFICATION, SURVIVAL, shape_of
from copfl.data.sets.datasets import load
from copfl.data.tables.columns import NUMBER as NUMERAL
from copfl.data.tables.columns import Column as Cells
from copfl.data.tables.columns import DataTable, as_numbers, check_plain, floats, is_number, times_of, words
from copfl.data.tables.dates import DATES
from copfl.data.tables.encoders import Encoder
from copfl.data.tables.files import READERS, read_table
from copfl.data.targets import LARGEST_NUMBER
from copfl.errors import DataError
from copfl.tables import listed

FACTORS = (10, 100, 1000)  # and their inverses: units that are often confused
NEAR = 0.15  # of log10: how far a ratio may be from a factor
MOST = 0.5  # of the values out of the range: then the unit may be another one
SHOWN = 5  # values in a sentence
MOST_MISSING = 20  # columns that are missing, each in a sentence of its own
MOST_COMPARED = (
    5_000  # pairs of a missing column and one of the file, by their names and values; 2,000 a second
)
COMMA = re.compile(r"[+-]?\d*,\d+")


class ContractDifference(NamedTuple):
    """One thing in which a site's data differ from the contract."""

    column: str  # of the contract; empty: of the whole file
    what: str  # for programs: missing_column, type, unit, range, categories, classes, dates, ...
    text: str  # for the owner of the data, printable: it has names of the contract, which another may have written
    is_note: bool = False  # true: the data fit nevertheless


class ContractCheck(NamedTuple):
    """What a check found."""

    rows: int
    differences: tuple[ContractDifference, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """In which the data do not fit, for their owner."""
        return [difference.text for difference in self.differences if not difference.is_note]

    def as_table(self) -> dict[str, Any]:
        """Plain values, for programs."""
        return {
            "fits": self.fits,
            "rows": self.rows,
            "differences": [d._asdict() for d in self.differences if not d.is_note],
            "notes": [d._asdict() for d in self.differences if d.is_note],
        }


def check(contract: Contract, path: Path) -> ContractCheck:
    """How the data in a file or folder differ from the contract; DataError if they cannot be read.

    Args:
        contract: What the federation has agreed on.
        path: A table, or for a contract of arrays an .npz file or a folder of images.
    """
    if contract.data == ARRAYS:
        return _check_arrays(contract, path)
    if path.suffix.lower() not in READERS:
        raise DataError(
            f"{path} is no table ({', '.join(READERS)}), and the contract is of one; name this site's table"
        )
    return check_table(contract, read_table(path))


def check_table(contract: Contract, table: DataTable) -> ContractCheck:
    """How a table differs from the contract of a table or of texts.

    Args:
        contract: What the members agreed on.
        table: A site's rows.
    """
    differences = _table_differences(contract, table)
    printable = tuple(one._replace(text=foreign.printable(one.text)) for one in differences)
    return ContractCheck(len(table), printable)


def _check_arrays(contract: Contract, path: Path) -> ContractCheck:
    is_survival = contract.task == SURVIVAL and path.suffix == ".npz"  # which arrays alone do not tell
    dataset = load(path, kind=SURVIVAL) if is_survival else load(path)
    shape, differences = shape_of(dataset.train.x), []
    if tuple(shape) != contract.shape:
        text = f"a sample has shape {list(shape)}, and {list(contract.shape)} in the contract"
        differences.append(ContractDifference("", "shape", text))
    if dataset.kind != contract.task:
        differences.append(
            ContractDifference("", "task", f"the targets are for {dataset.kind}, not {contract.task}")
        )
    elif contract.task == CLASSIFICATION:
        known = contract.outputs
        numbers = {str(number) for number in range(len(known))}  # of classes
        counts = {name: int((dataset.train.y == n).sum()) for n, name in enumerate(dataset.classes)}
        unknown = {name: count for name, count in counts.items() if name not in (*known, *numbers)}
        differences += _unknown(contract.targets[0], "classes", unknown, known, len(dataset.train))
    printable = tuple(one._replace(text=foreign.printable(one.text)) for one in differences)
    return ContractCheck(len(dataset.train), printable)


def _table_differences(contract: Contract, table: DataTable) -> Iterator[ContractDifference]:
    every = (*contract.columns, *contract.targets)
    used = {contract.group, contract.time, *(column.name for column in every)}
    spare = [name for name in table.columns if name not in used]
    for note in table.notes:
        yield ContractDifference("", "decimal_commas", note, is_note=True)
    missing = [column.name for column in every if column.name not in table.columns]
    are_compared = len(missing) * len(spare) <= MOST_COMPARED
    named, names = {_plain(name): name for name in reversed(spare)}, listed(list(table.columns), 8)
    for column in every:
        if column.name in table.columns:
            yield from _column_differences(contract, column, table.columns[column.name])
        elif column.name in missing[:MOST_MISSING]:
            text, near = f'the column "{column.name}" is missing', named.get(_plain(column.name), "")
            if not near and are_compared:
                near = _near_column(contract, column, {name: table.columns[name] for name in spare})
            if near:
                text = f'{text}; is it your "{near}"? Rename it in the file'
                yield ContractDifference(column.name, "renamed_column", text)
            else:
                yield ContractDifference(column.name, "missing_column", f"{text}; the file has {names}")
    if others := missing[MOST_MISSING:]:
        text = f"{len(others):,} more columns of the contract are missing: {listed(others, SHOWN)}"
        yield ContractDifference("", "missing_columns", f"{text}; is it the right file?")
    for name, what in ((contract.group, "what belongs together"), (contract.time, "when a row was")):
        if name and name not in table.columns:
            text = f'the column "{name}" is missing, which says {what}; the file has {listed(list(table.columns), 8)}'
            yield ContractDifference(name, "missing_column", text)
        elif name and (count := table.columns[name].null_count):
            yield ContractDifference(
                name, "missing_values", f'"{name}", which says {what}, lacks {count:,} values'
            )
        elif name and name == contract.time:
            try:
                times_of(name, table.columns[name])
            except DataError as error:
                yield ContractDifference(name, "dates", str(error))
    if spare:
        text = f"columns that the contract does not have are not read: {listed(spare, SHOWN)}"
        yield ContractDifference("", "spare_columns", text, is_note=True)


def _column_differences(contract: Contract, column: Column, cells: Cells) -> Iterator[ContractDifference]:
    is_target = column in contract.targets
    try:
        check_plain(column.name, cells)
    except DataError as error:
        yield ContractDifference(column.name, "type", str(error))
        return
    yield from _missing_values(column, cells, is_target)
    if column.type == NUMBER:
        yield from _number_differences(column, cells)
    elif column.type in (CATEGORY, BOOLEAN):
        yield from _category_differences(column, cells, is_target and contract.task == CLASSIFICATION)
    elif column.type == DATE:
        yield from _date_differences(column, cells)


def _near_column(contract: Contract, column: Column, spare: dict[str, Cells]) -> str:
    """The column of a file that may be meant by one that is missing, by its name or alone by its values; or empty.

    Args:
        contract: What the members agreed on.
        column: The one that is missing.
        spare: The columns of the file that the contract does not have.
    """
    named = {_plain(name): name for name in reversed(spare)}
    if alike := difflib.get_close_matches(_plain(column.name), named, n=1):
        return named[alike[0]]
    fitting = [name for name, cells in spare.items() if _has_values_of(contract, column, cells)]
    return fitting[0] if len(fitting) == 1 else ""


def _has_values_of(contract: Contract, column: Column, cells: Cells) -> bool:
    """Whether a column of another name has the values that the contract describes."""
    is_described = column.type in (BOOLEAN, DATE) or any(
        (column.categories, column.candidates, column.minimum is not None and column.maximum is not None)
    )
    return is_described and all(
        difference.is_note for difference in _column_differences(contract, column, cells)
    )


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).casefold()


def _missing_values(column: Column, cells: Cells, is_target: bool) -> Iterator[ContractDifference]:
    if cells.null_count and (is_target or not column.missing):
        why = "a row needs its target" if is_target else "the contract allows none"
        text = f'"{column.name}" lacks {cells.null_count:,} of {len(cells):,} values; {why}'
        yield ContractDifference(column.name, "missing_values", text)


def _number_differences(column: Column, cells: Cells) -> Iterator[ContractDifference]:
    name = column.name
    numbers = cells if is_number(cells) else as_numbers(cells)
    if numbers is None:
        texts = [text for text in words(cells) if text is not None and not re.match(NUMERAL, text)]
        example = f"{len(texts):,} of {len(cells):,} values are texts such as {texts[0][:40]!r}"
        if all(COMMA.fullmatch(text) for text in texts):
            text = f'"{name}" has decimal commas: {example}; write 1.5, not 1,5'
            yield ContractDifference(name, "decimal_commas", text)
        elif all(DATES.fullmatch(text) for text in texts):
            text = f'"{name}" has dates as text, and numbers in the contract: {example}'
            yield ContractDifference(name, "dates", text)
        else:
            yield ContractDifference(name, "type", f'"{name}" has numbers in the contract; {example}')
        return
    values = floats(numbers)
    values = values[~np.isnan(values)]
    if not len(values):
        return
    if (is_huge := np.abs(values) > LARGEST_NUMBER).any():
        shown = f"{int(is_huge.sum()):,} of {len(values):,} values above {LARGEST_NUMBER:g}"
        yield ContractDifference(
            name, "range", f'"{name}" has {shown}, such as {values[is_huge][0]:g}; they cannot be used'
        )
        return
    unit = f" (the contract's unit: {column.unit})" if column.unit else ""
    if factor := _factor(column, values):
        own = f"Yours has mean {values.mean():.4g} and deviation {values.std():.4g}"
        if column.mean is not None and column.deviation is not None:
            compared = "in mean and deviation"
            agreed = f"the contract {column.mean:.4g} and {column.deviation:.4g}"
        else:
            compared, agreed = "by its range", f"the contract {column.minimum:g} to {column.maximum:g}"
        text = (
            f'"{name}" is {factor} in the contract, {compared}: is it in another unit?{unit} {own}; {agreed}'
        )
        yield ContractDifference(name, "unit", text)
    low, high = column.minimum, column.maximum
    is_out = (values < (-math.inf if low is None else low)) | (values > (math.inf if high is None else high))
    if is_out.any():
        bounds = f"{'...' if low is None else f'{low:g}'} to {'...' if high is None else f'{high:g}'}"
        text = (
            f'"{name}" has {int(is_out.sum()):,} of {len(values):,} values outside {bounds}{unit}, such as '
        )
        yield ContractDifference(name, "range", text + ", ".join(f"{v:g}" for v in values[is_out][:3]))


def _factor(column: Column, values: NDArray[np.float64]) -> str:
    """How the site's numbers differ from the contract's, if by a power of ten; empty if not."""
    exponents = [sign * round(math.log10(factor)) for factor in FACTORS for sign in (1, -1)]
    exponent_of_site = 0
    if column.mean is not None and column.deviation is not None:
        exponent_of_site = next((e for e in exponents if _is_scaled(column, values, e)), 0)
    elif (low := column.minimum) is not None and (high := column.maximum) is not None:

        def within(scaled: NDArray[np.float64], low: float = low, high: float = high) -> float:
            return float(((scaled >= low) & (scaled <= high)).mean())

        if within(values) < 1 - MOST:
            exponent_of_site = next((e for e in exponents if within(values / 10.0**e) > 1 - MOST / 10), 0)
    if not exponent_of_site:
        return ""
    power, is_exact = 10 ** abs(exponent_of_site), column.mean is not None and column.deviation is not None
    if exponent_of_site > 0:
        return f"{'' if is_exact else 'at least '}{power:,} times what it is"
    return f"{'' if is_exact else 'at most '}1/{power:,} of what it is"


def _is_scaled(column: Column, values: NDArray[np.float64], exponent: int) -> bool:
    """Whether mean and deviation are those of the contract times this power of ten, nearly."""
    mean, deviation = column.mean or 0.0, column.deviation or 1.0
    spread, factor = float(values.std()), 10.0**exponent
    if spread <= 0 or abs(math.log10(spread / deviation) - exponent) > NEAR:
        return False
    # The mean in units of the deviation does not depend on the unit; near zero only the deviation says
    # something.
    return abs(float(values.mean()) - mean * factor) <= max(deviation * factor, 0.4 * abs(mean) * factor)


def _category_differences(column: Column, cells: Cells, is_class: bool) -> Iterator[ContractDifference]:
    known = column.categories or column.candidates
    counts = counts_of(cells, is_class)
    if not known:
        return
    if column.type == CATEGORY and counts and all(map(DATES.fullmatch, counts)):
        dates = f'dates as text such as "{next(iter(counts))}"'
        text = f'"{column.name}" has {dates}, and categories in the contract'
        yield ContractDifference(column.name, "dates", text)
        return
    places = Encoder(column.name, categories=known).places(list(counts))
    unknown = {name: count for (name, count), place in zip(counts.items(), places, strict=True) if place < 0}
    yield from _unknown(column, "classes" if is_class else "categories", unknown, known, len(cells))
    if absent := [name for name in known if name not in counts and not unknown] if is_class else []:
        text = f'no row of "{column.name}" is {listed(absent, SHOWN)}'
        yield ContractDifference(column.name, "absent_classes", text, is_note=True)


def _unknown(
    column: Column, what: str, unknown: Mapping[str, int], known: Sequence[str], rows: int
) -> Iterator[ContractDifference]:
    """Values that the contract does not have, with the name that may be meant."""
    if not unknown:
        return
    plain = {_plain(name): name for name in reversed(known)}

    def shown(name: str, count: int) -> str:
        near = plain.get(_plain(name)) or next(
            (plain[n] for n in difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.75)), ""
        )
        return f'"{name[:40]}" ({count:,} rows{f", meant {near}?" if near else ""})'

    common = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))
    few = ", ".join(shown(name, count) for name, count in common[:SHOWN])
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    effect = "these rows cannot be used" if what == "classes" else "they would count as none"
    text = (
        f'"{column.name}" has {what} that the contract does not have, in {sum(unknown.values()):,} of '
        f"{rows:,} rows: {few}{more}; {effect}. The contract has {listed(list(known), 8)}"
    )
    yield ContractDifference(column.name, what, text)


def _date_differences(column: Column, cells: Cells) -> Iterator[ContractDifference]:
    texts = [text for text in words(cells) if text is not None]
    wrong = [text for text in texts if not DATES.fullmatch(text)]
    if wrong:
        text = f'"{column.name}" has {len(wrong):,} of {len(texts):,} values such as "{wrong[0][:40]}"'
        yield ContractDifference(
            column.name,
            "dates",
            f"{text}; the contract has dates there, such as 2021-03-31 or 31.3.2021, and no model learns from them",
        )
