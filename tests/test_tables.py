from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest

from copfl import tables
from copfl.tables import RULE, Table, as_csv, as_markdown, as_text

TABLE = Table(
    "Title", ["", "accuracy", "which"], [["a|b", "65.0 ± 7.1", "x"], RULE, ["c", "-", "yy"]], ["A note."]
)


def test_text_by_hand() -> None:
    assert as_text(TABLE).splitlines() == [
        "Title",
        "",
        "       accuracy  which",
        "----------------------",
        "a|b  65.0 ± 7.1  x",
        "----------------------",
        "c             -  yy",
        "A note.",
    ]


def test_long_names_of_columns_are_wrapped_and_cells_never() -> None:
    table = Table("", ["", "left out: the others"], [["client 0", "+1.0 ± 0.1"]])
    assert as_text(table, 20).splitlines() == [
        "           left out:",
        "          the others",
        "--------------------",
        "client 0  +1.0 ± 0.1",
    ]
    assert "client 0  +1.0 ± 0.1" in as_text(table, 5)


def test_markdown_and_csv_by_hand() -> None:
    assert as_markdown(TABLE) == (
        "**Title**\n\n|  | accuracy | which |\n| --- | ---: | ---: |\n| a\\|b | 65.0 ± 7.1 | x |\n"
        "| c | - | yy |\n\nA note."
    )
    assert as_markdown(Table("", ["a"], [["b"]], numeric=False)) == "| a |\n| --- |\n| b |"
    assert as_csv(TABLE) == ",accuracy,which\na|b,65.0 ± 7.1,x\nc,-,yy\n"


@pytest.mark.parametrize(
    "name",
    [
        "=1+1",
        "@SUM(A1)",
        "+A1",
        "-2+3+cmd|' /C calc'!A0",
        "\t=1",
        "\r=1",
        "-HYPERLINK(1)",
        "=-1",
        "\n=1",
        "＝1+1",
        "＠SUM(A1)",
        "＋A1",
    ],
)
def test_no_cell_of_a_csv_is_a_formula(name: str) -> None:
    """Names of classes and of sites are another's, and people open such a file with a spreadsheet."""
    assert as_csv(Table("", [name], [[name]])).count("'" + name.replace('"', '""')) == 2


@pytest.mark.parametrize(
    "cell", ["-1.5", "+2.0 ± 0.3", "-", "-inf", "-1e-05", "a=b", "", "[-1.5, +2.0]", "−1"]
)
def test_numbers_with_a_sign_stay_in_a_csv(cell: str) -> None:
    assert tables.without_formula(cell) == cell


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (60_000, "60 kB"), (999_700, "1 MB"), (2.5e6, "2.5 MB")],
)
def test_sizes(count: float, text: str) -> None:
    assert tables.size(count) == text


def test_numbers() -> None:
    assert tables.percent(0.6504) == "65.0"
    assert tables.percent(None) == tables.number(math.nan) == "-"
    assert tables.with_spread(65.0, 7.07) == "65.0 ± 7.1"
    assert tables.with_spread(65.0, math.nan) == "65.0"
    assert tables.with_spread(1.0, 0.5, "+.2f") == "+1.00 ± 0.50"
    assert tables.interval(-1.5, 2.0) == "[-1.5, +2.0]"
    assert tables.interval(-math.inf, math.inf) == "-"
    assert (tables.seconds(0.456, 0.1), tables.seconds(12.34)) == ("0.46 ± 0.10", "12.3")


def test_json_has_no_number_that_is_not_finite() -> None:
    assert tables.plain({"a": np.array([[1.0, np.nan]]), "b": (math.inf, 2, None, "x")}) == {
        "a": [[1.0, None]],
        "b": [None, 2, None, "x"],
    }


def test_no_cell_is_a_formula_and_numbers_stay_numbers() -> None:
    """Names of columns and classes come from other machines, and people open the file in a spreadsheet."""
    cells = [
        "=1+1",
        "@SUM(A1)",
        "+cmd|' /C calc'!A0",
        "-HYPERLINK(1)",
        "\t=1",
        "-1.5",
        "+0.3",
        "-",
        "A-",
        "a=b",
    ]
    written = as_csv(Table("", cells, []))
    (row,) = csv.reader(io.StringIO(written))
    assert row == [f"'{cell}" for cell in cells[:5]] + cells[5:]


def test_no_part_of_a_cell_is_a_formula_where_lines_are_divided_at_a_semicolon() -> None:
    cell = 'ill;=HYPERLINK("http://x");-1,5;+cmd|x!A0;well'
    assert tables.without_formula(cell) == "ill;'=HYPERLINK(\"http://x\");-1,5;'+cmd|x!A0;well"


def test_a_list_says_how_many_names_are_left_out() -> None:
    assert tables.listed(["a", "b", "c"], 3) == "a, b, c"
    assert tables.listed(list("abcde"), 2) == "a, b and 3 more"
