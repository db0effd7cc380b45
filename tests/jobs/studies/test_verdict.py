"""Intervals have the truth in them, and sites are seldom called better or worse by chance: by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from studies.verdict.__main__ import PAGE, RECORDS, page_of
from studies.verdict.folds import of_folds
from studies.verdict.losses import ALONE, NAMES, TOGETHER, federation, halves
from studies.verdict.rates import CASES, COMMON, LEVELS, MIXED, ROWS, rates
from studies.verdict.study import judged
from tests.slow import slow


def test_the_page_is_that_of_its_records() -> None:
    assert PAGE.read_text("utf-8") == page_of(RECORDS)


def test_a_division_is_judged_by_its_other_half() -> None:
    data = federation(NAMES[0], None)
    losses = halves(data, 0, (TOGETHER[0], *ALONE))
    sizes = [sum(map(len, table[ALONE[0]])) for table in (losses.study, losses.pairs, losses.truth)]
    assert sizes[0] == sizes[1]
    assert sizes[0] + sizes[2] == len(data.y)
    assert all(np.isfinite(rows).all() for table in losses[:3] for of in table.values() for rows in of)
    found = judged(losses, data.is_rmse, draws=50)
    assert found.interval.low < found.gain < found.interval.high
    assert abs(found.gain - found.truth) < 0.2


@pytest.mark.parametrize(("kind", "deviation", "rows"), [(LEVELS, 0.3, 8), (COMMON, 1.0, 20)])
def test_intervals_and_names_are_right_in_simulated_federations(
    kind: str, deviation: float, rows: int
) -> None:
    found = rates(rows, kind, deviation, 25)
    assert found.sites >= 0.9
    assert found.mean >= 0.88
    assert found.wrong <= 0.12


def test_folds_promise_too_much_and_their_rows_too_little_error() -> None:
    by_folds, carried_on = of_folds(30, 20, 3, 0.2, 40)
    assert by_folds.bias > 0.7
    assert abs(carried_on.bias) < 0.7
    assert by_folds.variance > 1.3
    assert by_folds.covered < carried_on.covered
    assert carried_on.covered >= 85


@slow
@pytest.mark.parametrize("rows", [*ROWS[1:], MIXED])
@pytest.mark.parametrize(("kind", "deviation"), CASES)
def test_intervals_and_names_are_right_whatever_the_rows(kind: str, deviation: float, rows: int) -> None:
    found = rates(rows, kind, deviation)
    # docs/verdict.md says where these are below 0.93, and why.
    assert found.sites >= 0.87
    assert found.mean >= (0.82 if rows == MIXED else 0.88)
    assert found.wrong <= 0.05 + 0.035
