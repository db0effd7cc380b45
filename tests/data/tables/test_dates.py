"""Dates as people write them: read where they can be one day only, refused otherwise."""

from datetime import UTC, datetime

import pytest

from copfl.data.tables.dates import DATES, seconds_of
from copfl.errors import DataError


def read(*texts: str) -> list[str]:
    return [f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S}" for second in seconds_of("day", texts)]


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("2024-12-31", "2024-12-31 00:00:00"),
        ("2024-12-31T14:05", "2024-12-31 14:05:00"),
        ("2024-12-31 14:05:06", "2024-12-31 14:05:06"),
        ("2024-12-31T14:05+01:00", "2024-12-31 13:05:00"),
        ("31.12.2024", "2024-12-31 00:00:00"),
        ("1.2.2024", "2024-02-01 00:00:00"),
        ("31.12.24", "2024-12-31 00:00:00"),
        ("31.12.2024 14:05", "2024-12-31 14:05:00"),
        ("31.12.2024, 4:05:06", "2024-12-31 04:05:06"),
        ("31/12/2024", "2024-12-31 00:00:00"),
        ("12/31/2024 14:05", "2024-12-31 14:05:00"),
        ("31-12-2024", "2024-12-31 00:00:00"),
    ],
)
def test_what_can_be_one_day_only_is_read(text: str, day: str) -> None:
    assert DATES.fullmatch(text)
    assert read(text) == [day]


def test_one_date_of_a_column_says_how_the_others_are_written() -> None:
    assert read("01/02/2024", "31/12/2024") == ["2024-02-01 00:00:00", "2024-12-31 00:00:00"]
    assert read("01/02/2024", "12/31/2024") == ["2024-01-02 00:00:00", "2024-12-31 00:00:00"]
    assert read("01.02.2024", "12/31/2024") == [
        "2024-02-01 00:00:00",
        "2024-12-31 00:00:00",
    ]  # points: the day first


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (
            ["01/02/2024", "12/12/2024"],
            "no number above 12 says whether the day or the month comes first; write dates",
        ),
        (["01-02-24"], "such as 01-02-24, and no number above 12"),
        (
            ["31/12/2024", "12/31/2024"],
            "31/12/2024, with the day first, and 12/31/2024, with the month first",
        ),
        (["31.02.2024"], "has '31.02.2024'; write dates as 2024-03-31"),
        (["12.31.2024"], "has '12.31.2024'; write dates"),
        (["1.2.2024", "soon"], "has 'soon'; write dates"),
        (
            ["1.2.24", "24.12.45"],
            "has 24.12.45, whose year may be 1945 or 2045; write years with four digits",
        ),
    ],
)
def test_what_may_be_another_day_is_refused(texts: list[str], problem: str) -> None:
    with pytest.raises(DataError) as error:
        seconds_of("day", texts)
    assert str(error.value).startswith('the column "day" ')
    assert problem in str(error.value)


@pytest.mark.parametrize("text", ["1.5", "1.2.3", "10.0.0.1", "3.11.203", "12:30", "2024", "1.2/2024"])
def test_other_texts_are_no_dates(text: str) -> None:
    assert not DATES.fullmatch(text)
