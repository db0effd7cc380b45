"""Encoders that sites agree on: the same numbers from another order of columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from copfl.data.contract.agreed_encoders import Encoders
from copfl.data.sets.datasets import load
from copfl.errors import DataError


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "a.csv"
    rows = [f"{n / 7},{'xyz'[n % 3]},{n % 2},{n}" for n in range(20)]
    path.write_text("\n".join(["size,kind,y,id", *rows]) + "\n")
    return path


def test_a_site_with_few_categories_has_the_same_columns(table: Path, tmp_path: Path) -> None:
    """Its columns are in another order, it has one more, and a category that nobody else has."""
    encoders = Encoders.of(load(table, target="y", drop="id").table)
    site = tmp_path / "site.csv"
    site.write_text("more,y,kind,size\n" + "1,0,z,0.5\n1,1,new,1.0\n" * 10)
    made = encoders.dataset(site, test=site, kind="classification")
    expected = [(0.5 - encoders.columns[0].mean) / encoders.columns[0].std, 0, 0, 1]
    assert made.test.x[0].tolist() == np.array(expected, np.float32).tolist()
    assert made.test.x[1, 1:].tolist() == [0, 0, 0]
    assert 'column "kind": 10 of 20 values are categories' in made.note


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("size,y\n1,0\n2,1\n", 'lacks the column "kind"'),
        ("size,kind,y\nlarge,x,0\nsmall,y,1\n", 'the column "size" has texts, and numbers in the federation'),
    ],
)
def test_a_table_that_does_not_fit_is_one_error(
    content: str, error: str, table: Path, tmp_path: Path
) -> None:
    encoders = Encoders.of(load(table, target="y", drop="id").table)
    site = tmp_path / "site.csv"
    site.write_text(content)
    with pytest.raises(DataError, match=error):
        encoders.dataset(site, test=site, kind="classification")
