"""Published tables: their data are those of their source, and the check finds a number that is outside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.errors import UsageError
from studies.published import __main__ as command
from studies.published import flamby_heart, flamby_tcga
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


def test_the_regions_are_those_of_the_files(tmp_path: Path) -> None:
    """Two made files: columns in the order of the source, parts by their names, a time of 0 kept."""
    with pytest.raises(UsageError, match=r"name the folder that has brca\.csv and split\.csv"):
        flamby_tcga.federations(tmp_path)
    people = range(24)
    lines = [f"p{n},{n},{n % 2},{int(n % 3 > 0)},{float(n)}" for n in people]
    (tmp_path / "brca.csv").write_text("\n".join(["pid,age,stage,E,T", *lines]))
    parts = [f"p{n},{side},{side}_{n % 6}" for n in people for side in ["test" if n < 6 else "train"]]
    (tmp_path / "split.csv").write_text("\n".join(["pid,fold,fold2", *reversed(parts)]))
    regions = flamby_tcga.federations(tmp_path)[""]
    assert [len(rows) for rows in regions.partition.train] == [3] * 6
    assert [len(rows) for rows in regions.partition.test] == [1] * 6
    (first,) = regions.partition.test[0]
    np.testing.assert_array_equal(regions.dataset.test.x[first], [0, 0])
    np.testing.assert_array_equal(regions.dataset.test.y[first], [0, 0])
    np.testing.assert_array_equal(regions.dataset.train.x[:, 0], regions.dataset.train.y[:, 0])


@slow
@pytest.mark.skipif(
    "COPFL_TCGA" not in os.environ, reason="COPFL_TCGA names the folder of FLamby's two files"
)
def test_survival_with_breast_cancer_is_inside() -> None:
    folder = Path(os.environ["COPFL_TCGA"])
    regions = flamby_tcga.federations(folder)[""]
    assert [len(rows) for rows in regions.partition.train] == [248, 156, 164, 129, 129, 40]
    assert all(one.agrees for one in run_table(flamby_tcga.TABLE, seeds=20, data_dir=folder))


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
