"""Published tables: their data are those of their source, and the check finds a number that is outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from studies.published import __main__ as command
from studies.published import flamby_heart
from studies.published.table import Row, Table, outcome, run_row, run_table
from tests.slow import slow


def test_the_hospitals_are_those_of_flamby() -> None:
    hospitals = flamby_heart.federations(None)[""]
    sizes = [
        (len(train), len(test))
        for train, test in zip(hospitals.partition.train, hospitals.partition.test, strict=True)
    ]
    assert sizes == [(199, 104), (172, 89), (30, 16), (85, 45)]
    assert hospitals.dataset.train.x.shape == (740, 13)
    for rows in hospitals.partition.train:
        x = hospitals.dataset.train.x[rows]
        varies = np.ptp(x, axis=0) > 0
        np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(x[:, varies].std(0, ddof=1), 1, rtol=1e-4)


@pytest.mark.parametrize("row", [flamby_heart.TABLE.rows[n] for n in (2, 7)], ids=lambda row: row.name)
def test_a_row_of_heart_disease_is_inside(row: Row) -> None:
    """FedAvg and FedAdam with five seeds, as published; all rows with twenty: COPFL_SLOW=1."""
    table = flamby_heart.TABLE
    values = run_row(table, row, table.federations(None)[row.federation], range(5))
    assert outcome(row, values, table.seeds).agrees


@slow
def test_heart_disease_is_inside() -> None:
    assert all(one.agrees for one in run_table(flamby_heart.TABLE, seeds=20))


def test_the_range_by_hand() -> None:
    row = Row("any", 0.5, {}, "accuracy")
    one = outcome(row, np.array([0.4, 0.6]), published_seeds=2)
    spread = np.sqrt(0.02) * np.sqrt(1 / 2 + 1 / 2)
    assert one.low == pytest.approx(0.5 - 1.96 * spread)
    assert one.high == pytest.approx(0.5 + 1.96 * spread)


def test_a_number_that_is_outside_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = flamby_heart.TABLE.rows[2]._replace(published=0.99)
    quick: dict[str, dict[str, Any]] = {
        "run": {"rounds": 1, "steps": 2, "batch": 4},
        "model": {"name": "linear"},
    }
    quick["task"] = {"metrics": ["accuracy"]}
    table: Table = flamby_heart.TABLE._replace(rows=(wrong,), settings=quick)
    monkeypatch.setattr(flamby_heart, "TABLE", table)
    assert command.main(["flamby_heart", "--seeds", "2"]) == 1
    assert "**no**" in capsys.readouterr().out


def test_without_a_name_the_tables_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert "flamby_heart: FLamby" in capsys.readouterr().out
