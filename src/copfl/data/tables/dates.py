"""Dates as people and spreadsheets write them: 2024-12-31, 31.12.2024, 31/12/2024 14:05.

Between points the day comes first. Between slashes or hyphens it may be the month, so one number above 12 in the
column has to say which. Where nothing says it, the column is refused: no date is guessed.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from copfl.errors import DataError

ISO = r"\d{4}-\d{2}-\d{2}(?:[T ].*)?"
WRITTEN = re.compile(
    r"(\d{1,2})([./-])(\d{1,2})\2(\d{4}|\d{2})(?:(?:,? +|T)(\d{1,2}):(\d{2})(?::(\d{2})(?:\.\d+)?)?)?"
)
DATES = re.compile(f"{ISO}|{WRITTEN.pattern}")
PLAIN = "write dates as 2024-03-31 or 2024-03-31T12:00, or use numbers"


def seconds_of(name: str, texts: Sequence[str]) -> NDArray[np.float64]:
    """The dates as numbers, later is larger; a DataError if one is no date, or may be another one.

    Args:
        name: Of their column, for the error.
        texts: All different values of the column.
    """
    written = [WRITTEN.fullmatch(text) for text in texts]
    loose = [match for match in written if match and match[2] != "."]
    day_first, month_first = ([m[0] for m in loose if int(m[place]) > 12] for place in (1, 3))
    if day_first and month_first:
        raise DataError(
            f'the column "{name}" has {day_first[0]}, with the day first, and {month_first[0]}, with the month first; '
            f"{PLAIN}"
        )
    if loose and not day_first and not month_first:
        raise DataError(
            f'the column "{name}" has dates such as {loose[0][0]}, and no number above 12 says whether the day or the '
            f"month comes first; {PLAIN}"
        )
    this_year = datetime.now(UTC).year
    seconds = np.empty(len(texts))
    for place, (text, match) in enumerate(zip(texts, written, strict=True)):
        try:
            moment = datetime.fromisoformat(text) if match is None else _moment(match, bool(month_first))
        except ValueError as error:
            raise DataError(f'the column "{name}" says when, and has {text[:40]!r}; {PLAIN}') from error
        if match is not None and len(match[4]) == 2 and moment.year > this_year:
            raise DataError(
                f'the column "{name}" has {text}, whose year may be {moment.year - 100} or {moment.year}; write years '
                "with four digits"
            )
        seconds[place] = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    return seconds


def _moment(match: re.Match[str], month_first: bool) -> datetime:
    """What is written; ValueError if there is no such day. Two digits of a year are those of this century."""
    first, mark, second, year, *time = match.groups()
    day, month = (second, first) if month_first and mark != "." else (first, second)
    hour, minute, seconds = (int(part or 0) for part in time)
    return datetime(int(year) + 2000 * (len(year) == 2), int(month), int(day), hour, minute, seconds)
