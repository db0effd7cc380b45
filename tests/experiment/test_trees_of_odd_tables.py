"""Trees on tables that are no good for training: one clear error, or a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.errors import DataError

Cells = tuple[Any, ...]
SETTINGS: dict[str, Any] = {
    "model": "trees",
    "model_options": {"trees": 2, "depth": 2},
    "rivals": False,
    "local_baseline": False,
}


def run(path: Path, columns: str, rows: list[Cells]) -> copfl.Result:
    lines = [columns, *(",".join(map(str, row)) for row in rows)]
    (path / "table.csv").write_text("\n".join(lines) + "\n")
    how = {"target": "y", "client": "site"}
    return copfl.run("trees", str(path / "table.csv"), data_options=how, **SETTINGS)


def numbers(row: Callable[[int, float], Cells], count: int) -> list[Cells]:
    drawn = np.random.default_rng(0).normal(size=count).round(4).tolist()
    return [row(n, number) for n, number in enumerate(drawn)]


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        (
            "site,a,y",
            numbers(lambda n, a: (f"s{n % 3}", a, 5.0), 60),
            "nothing to learn: is it the right target",
        ),
        ("site,a,y", numbers(lambda n, a: (f"s{n % 3}", a, "yes"), 60), "of one class, yes"),
        ("site,a,y", [("s0", 1.0, 2.5)], "too few samples for a test part"),
        (
            "site,c,y",
            numbers(lambda n, a: (f"s{n % 3}", f"c{n}", a), 10_000),
            'the column "c" has .* different texts, at most 1,000 categories are accepted',
        ),
        (
            "site,a,w,y",
            numbers(lambda n, a: (f"s{n % 3}", a, f"a cough since day {n}", a**2), 60),
            'the column "w" has 48 different sentences in 60 rows',
        ),
    ],
    ids=["a constant value", "one class", "one row", "10,000 categories", "a column of text"],
)
def test_one_error_says_what_is_wrong(columns: str, rows: list[Cells], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        run(tmp_path, columns, rows)


@pytest.mark.job
@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ("site,a,y", [("alone", 1.0, 2.5), *numbers(lambda n, a: (f"s{n % 3}", a, a**2), 60)]),
        ("site,a,b,y", numbers(lambda n, a: (f"s{n % 3}", a, 1, a**2), 60)),
    ],
    ids=["a site with one row", "a constant column"],
)
def test_it_works(columns: str, rows: list[Cells], tmp_path: Path) -> None:
    assert np.isfinite(run(tmp_path, columns, rows).final("rmse")[-3:]).all()
