"""Encoders: how the columns of a table become numbers, learned from its train rows.

`tables` learns them from a table; a contract has them agreed; a bundle stores them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data.tables.columns import Column, DataTable, coded, floats, is_number, text_of
from copfl.errors import PartError, how_to_set

Rows = slice | NDArray[np.int64]

MOST_CATEGORIES = 1000
MOST_SHOWN = 5  # values in a note
WITH_POINT = re.compile(r"([+-]?(?:0|[1-9]\d*))\.0*")  # 1.0, a spelling of the whole number 1
FRACTION = re.compile(r"[+-]?\d*\.0*[1-9]\d*")


@dataclass(frozen=True)
class Encoder:
    """How a column becomes numbers, learned from the train rows.

    Plain values, so that it is written to and read from JSON field by field.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] = ()  # none: the column has numbers
    # Whether a number has a second feature: 1 where it is missing. A missing category is all zeros already.
    indicator: bool = False

    @property
    def width(self) -> int:
        """The number of features of the column."""
        return len(self.categories) or 1 + self.indicator

    def write(self, column: Column, rows: Rows, features: NDArray[np.float32]) -> None:
        """Writes the features of these rows to an array of zeros [n, width].

        A missing value and a category that no train row has stay 0.

        Args:
            column: The cells of a table.
            rows: Those that are written.
            features: Zeros, which get the features.
        """
        if self.categories:
            values, codes = coded(column)
            category = np.append(self.places(values), -1)[codes[rows]]
            known = np.flatnonzero(category >= 0)
            features[known, category[known]] = 1
        else:
            with np.errstate(over="ignore"):  # of a tiny deviation that others agreed on
                numbers = floats(column)[rows]
                features[:, 0] = np.nan_to_num((numbers - self.mean) / self.std, nan=0.0)
            if self.indicator:
                features[:, 1] = np.isnan(numbers)

    def places(self, values: Sequence[Any]) -> NDArray[np.int64]:
        """The index of the category of each value, -1 for one that is none.

        A number is the category of any of its spellings: a data frame has 1.0 for 1 beside missing values,
        and true for the text True. So is the text 1.0, unless the column has fractions, as versions do.
        """
        index = {category: number for number, category in enumerate(self.categories)}
        has_fractions = any(map(FRACTION.fullmatch, self.categories))

        def of(value: Any) -> int:
            is_whole = not isinstance(value, str) and float(value).is_integer()
            if is_whole:
                spellings: tuple[str, ...] = (str(value), str(int(value)), str(float(value)))
            else:
                text = str(value)
                whole = whole_number(text)
                spellings = (text,) if has_fractions else (text, whole, f"{whole}.0")
            return next((index[text] for text in spellings if text in index), -1)

        return np.array([of(value) for value in values], np.int64)


@dataclass(frozen=True)
class TableInfo:
    """What a model needs to know about the table that it was trained on, to take further rows."""

    targets: tuple[str, ...]  # columns to predict
    columns: tuple[Encoder, ...] = ()  # features; none of a table of texts
    missing: str = "refuse"
    text: str | None = None  # the column of the texts
    group: str = ""  # the column that says what belongs together; "": none
    time: str = ""  # the column that says when; "": none
    split: int = 0  # the seed of the draw of the test rows


def encoded(encoders: Sequence[Encoder], table: DataTable, rows: Rows = slice(None)) -> NDArray[np.float32]:
    """The features of a table.

    Args:
        encoders: One for each column that is used.
        table: With the columns of all encoders; numbers as `columns.as_numbers` returns them, or
            numbers.
        rows: The rows to encode; by default all of them.

    Returns:
        An array [rows, features] in the order of the encoders.
    """
    count = len(np.arange(len(table))[rows])
    features = np.zeros((count, sum(encoder.width for encoder in encoders)), np.float32)
    first = 0
    for encoder in encoders:
        columns_of_encoder = features[:, first : first + encoder.width]
        encoder.write(table.columns[encoder.name], rows, columns_of_encoder)
        first += encoder.width
    return features


def unknown_categories(
    encoders: Sequence[Encoder], table: DataTable, who: str = "no train row has"
) -> list[str]:
    """A note for each column with categories that the encoders do not have: how many cells, and which.

    Args:
        encoders: Of the columns.
        table: Its rows.
        who: Lacks them, in the note.
    """
    notes = []
    for encoder in encoders:
        if not encoder.categories:
            continue
        values, codes = coded(table.columns[encoder.name])
        cells = np.bincount(codes[codes >= 0], minlength=len(values)).tolist()
        numbers = encoder.places(values)
        new = Counter({text_of(values[n]): cells[n] for n in np.flatnonzero(numbers < 0).tolist()})
        if new:
            few = ", ".join(f'"{value[:40]}"' for value, _ in new.most_common(MOST_SHOWN))
            more = f" and {len(new) - MOST_SHOWN} more" if len(new) > MOST_SHOWN else ""
            notes.append(
                f'column "{encoder.name}": {new.total():,} of {len(table):,} values are categories '
                f"that {who}, and count as none: {few}{more}"
            )
    return notes


def whole_number(text: str) -> str:
    """The text "1" of "1.0"; any other text as it is."""
    number = WITH_POINT.fullmatch(text)
    return text if number is None else number[1]


def one_spelling(texts: Iterable[str]) -> list[str]:
    """The different texts, sorted, without 1.0 beside 1 in a column whose numbers are all whole."""
    different = set(texts)
    if not any(map(FRACTION.fullmatch, different)):
        different = {
            text for text in different if (whole := whole_number(text)) == text or whole not in different
        }
    return sorted(different)


def encoder(
    name: str, columns: Sequence[Column], rows: NDArray[np.int64], is_category: bool, indicator: bool = False
) -> Encoder:
    """The encoder of a column.

    Args:
        name: Of the column.
        columns: The column in each table; numbers only if it is a column of numbers in all of them.
        rows: The train rows of the first table.
        is_category: Whether numbers are categories.
        indicator: Whether a feature says where a number is missing, if one is in a train row.
    """
    if not is_category and all(is_number(column) for column in columns):
        numbers = floats(columns[0])[rows]
        is_missing = np.isnan(numbers)
        numbers = numbers[~is_missing]
        std = float(numbers.std()) if len(numbers) else 0.0
        mean = float(numbers.mean()) if len(numbers) else 0.0
        return Encoder(name, mean, std if std > 1e-12 else 1.0, (), indicator and bool(is_missing.any()))
    values, codes = coded(columns[0])
    in_train = np.unique(codes[rows])
    different = tuple(one_spelling(text_of(values[code]) for code in in_train[in_train >= 0].tolist()))
    if len(different) > MOST_CATEGORIES:
        raise PartError(
            f'the column "{name}" has {len(different):,} different texts, at most {MOST_CATEGORIES:,} '
            f"categories are accepted; leave it out with {how_to_set('data.drop', name)}, or if it is the "
            f"text to learn from, or the client, name it with {how_to_set('data.text', name, '--text')} or "
            f"{how_to_set('data.client', name, '--client')}",
            drop=name,
        )
    return Encoder(name, categories=different or ("",))
