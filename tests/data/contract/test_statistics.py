"""Encoders from the sums of sites: those of the pooled table, and nothing of few rows in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.data.contract.agreed_encoders import Encoders
from copfl.data.contract.contract import Column, Contract
from copfl.data.contract.statistics import (
    ContractQuestion,
    SiteValues,
    centres_of,
    frozen,
    may_leave,
    names_of,
    site_of,
    sums_of,
)
from copfl.data.sets.datasets import load
from copfl.errors import DataError
from tests.data.sites import CANDIDATES, CONTRACT, NUMBERS, rows_of, write_pooled, write_rows, write_sites


def agreed(contract: Contract, sites: list[SiteValues], smallest: int = 5) -> Contract:
    """What these sites agree on."""
    question = ContractQuestion.of(contract)
    first = np.sum([sums_of(question, site, smallest) for site in sites], axis=0)
    centres = centres_of(question, first)
    second = np.sum([sums_of(question, site, smallest, centres) for site in sites], axis=0)
    return frozen(contract, first, second, [names_of(question, site, smallest) for site in sites])


def pooled(folder: Path, **options: str) -> Encoders:
    train, test = write_pooled(folder)
    settings: dict[str, Any] = {
        "target": "outcome",
        "drop": "note",
        "missing": "fill",
        "test": str(test),
    } | options
    return Encoders.of(load(train, **settings).table)


@pytest.mark.parametrize("missing", ["fill", "drop"])
@pytest.mark.parametrize("contract", [CONTRACT, CANDIDATES], ids=["free", "listed"])
def test_they_are_those_of_the_pooled_table(contract: Contract, missing: str, tmp_path: Path) -> None:
    """Means and deviations to 1e-9, also of values near 1e9 that differ by 1; categories exactly."""
    terms = Contract(**{**vars(contract), "missing": missing})
    sites = [site_of(terms, files) for files in write_sites(tmp_path).values()]
    ours, theirs = agreed(terms, sites).encoders, pooled(tmp_path, missing=missing)
    assert [e.name for e in ours.columns] == [e.name for e in theirs.columns]
    for a, b in zip(ours.columns, theirs.columns, strict=True):
        assert a.categories == b.categories
        assert a.mean == pytest.approx(b.mean, rel=1e-9)
        assert a.std == pytest.approx(b.std, rel=1e-9)
    assert agreed(terms, sites).outputs == ("ill", "well")


def test_a_target_of_a_regression(tmp_path: Path) -> None:
    """Its scale is that of the samples, which are single precision."""
    target = Column(name="sodium", type="number")
    terms = Contract(task="regression", columns=CONTRACT.columns[:1], targets=(target,), missing="drop")
    sites = [site_of(terms, files) for files in write_sites(tmp_path).values()]
    train, test = write_pooled(tmp_path)
    whole = load(train, target="sodium", drop="note,ward,outcome,income", missing="drop", test=str(test))
    ours, theirs = agreed(terms, sites).scale, whole.target_scale
    assert ours[0][0] == pytest.approx(theirs[0][0], rel=1e-9)
    assert ours[1][0] == pytest.approx(theirs[1][0], rel=1e-9)


def test_a_mean_out_of_the_range_is_not_agreed(tmp_path: Path) -> None:
    """One of three sites has ages in thousandths of years: the encoders would be wrong for all."""
    sites = [site_of(CONTRACT, files) for files in write_sites(tmp_path).values()]
    wrong = sites[0]._replace(values=sites[0].values | {"age": 1000 * sites[0].values["age"]})
    with pytest.raises(
        DataError, match=r'the mean of "age" over all sites is .* not in 0 to 120: a site has it'
    ):
        agreed(CONTRACT, [wrong, *sites[1:]])
    lowest = CONTRACT.replaced({"sodium": {"minimum": 0.1, "maximum": None}})
    equal = [site._replace(values=site.values | {"sodium": np.full(7, 0.1)}) for site in sites]
    assert agreed(lowest, equal).columns[1].mean == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["age", "ward", "outcome"])
def test_nested_cells_are_one_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "site.jsonl"
    rows = [row | {name: [1, 2]} for row in rows_of("north")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=f'the column "{name}" has .* a cell is one number or text'):
        site_of(CONTRACT, [path])


def test_without_a_test_file_they_are_of_the_train_rows_alone(tmp_path: Path) -> None:
    path = write_sites(tmp_path)["north"][0]
    ours = agreed(CONTRACT, [site_of(CONTRACT, [path])]).encoders
    theirs = Encoders.of(load(path, target="outcome", drop="note", missing="fill").table)
    assert ours.columns[0].mean == pytest.approx(theirs.columns[0].mean, rel=1e-12)
    whole = np.mean([float(str(row["age"])) for row in rows_of("north")])
    assert ours.columns[0].mean != pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("smallest", [1, 3, 5, 10])
def test_nothing_of_few_rows_is_given(smallest: int) -> None:
    """For any table: a category has enough rows, and so have the values of a sum and those that differ in it."""
    draw = np.random.default_rng(smallest)
    number = Column(name="x", type="number")
    for _ in range(300):
        size, ones = int(draw.integers(0, 25)), int(draw.integers(0, 12))
        values = np.zeros(size)
        values[: min(ones, size)] = 1.0
        counts = {name: int(draw.integers(0, 12)) for name in ("a", "b", "c")}
        listed = Column(name="l", type="category", candidates=("a", "b", "z"))
        question = ContractQuestion((number,), (listed,), (Column(name="f", type="category"),))
        site = SiteValues({"x": values}, {"l": counts, "f": counts}, {})
        count, total, *given = sums_of(question, site, smallest)
        common = min(ones, size), size - min(ones, size)
        may = size >= smallest and (min(common) == 0 or min(common) >= smallest)
        assert (count, total) == ((size, common[0]) if may else (0, 0))
        assert given == [float(counts.get(name, 0) >= smallest) for name in ("a", "b", "z")]
        assert names_of(question, site, smallest) == {"f": [n for n in "abc" if counts[n] >= smallest]}
        second = sums_of(question, site, smallest, np.array([0.25]))
        assert may or second.tolist() == [0.0, 0.0]


def test_one_row_that_differs_keeps_the_sum_back() -> None:
    """All patients have 0, and one has 1: the sum would say that there is one."""
    assert not may_leave(np.array([0.0] * 99 + [1.0]), 5)
    assert may_leave(np.array([0.0] * 95 + [1.0] * 5), 5)
    assert may_leave(np.zeros(100), 5)
    assert not may_leave(np.arange(4.0), 5)


@pytest.mark.parametrize("centre", [0.0, 4.0, -1e17])
@pytest.mark.parametrize("half", [1.0, 6.5 / 1.6e-162, 1.5e308, 6.5 / 1.7e308])
def test_neither_range_nor_centre_tells_which_values_are_large(half: float, centre: float) -> None:
    """Two columns with the same sum and sum of squares get the same answers, though one has larger values.

    The squares of differences over 1e163 are 0, but for the large ones: their sum was that of single rows.
    """
    column = Column(name="x", type="number", minimum=-half, maximum=half)
    question = ContractQuestion((column,), (), ())
    answers = []
    for triple in ([1.0, 5.0, 6.0], [2.0, 3.0, 7.0]):
        site = SiteValues({"x": np.array(triple * 5)}, {}, {})
        first, second = sums_of(question, site, 5), sums_of(question, site, 5, np.array([centre]))
        answers.append([*first, *second])
    assert answers[0] == answers[1]


def test_a_site_with_few_rows_changes_nothing(tmp_path: Path) -> None:
    files = write_sites(tmp_path)
    sites = [site_of(CONTRACT, paths) for paths in files.values()]
    small = write_rows(tmp_path / "small.csv", [{**row, "ward": "secret"} for row in rows_of("north")[:4]])
    few = site_of(CONTRACT, [small, small])
    assert sums_of(ContractQuestion.of(CONTRACT), few, 5).tolist() == [0.0] * 6
    assert agreed(CONTRACT, [*sites, few]) == agreed(CONTRACT, sites)


def test_what_no_site_has_is_one_error(tmp_path: Path) -> None:
    site = site_of(CONTRACT, write_sites(tmp_path)["north"])
    with pytest.raises(DataError, match='no site has enough values of "age"'):
        agreed(CONTRACT, [site], smallest=1000)
    given = {name: {"mean": 1.0, "deviation": 1.0} for name in NUMBERS}
    with pytest.raises(DataError, match='no site has a category of "ward" in enough rows'):
        agreed(CONTRACT.replaced(given), [site], smallest=1000)
