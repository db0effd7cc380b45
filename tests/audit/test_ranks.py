from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copfl.audit import ranks
from copfl.audit.ranks import agreement, correlation, from_one_to_the_next, kendall, ranked, spearman


def of(*values: float) -> ranks.Numbers:
    return np.array(values, np.float64)


def test_equal_values_share_their_ranks() -> None:
    assert ranked(of(30, 10, 20, 20)).tolist() == [4, 1, 2.5, 2.5]


def test_by_hand() -> None:
    # Ranks 1 2 3 against 2 1 3: 1 - 6 (1 + 1) / (3 · 8) = 0.5; of three pairs two stand in the same order: 1 / 3.
    assert spearman(of(1, 2, 3), of(20, 10, 30)) == pytest.approx(0.5)
    assert kendall(of(1, 2, 3), of(20, 10, 30)) == pytest.approx(1 / 3)
    for measure in (spearman, kendall):
        assert measure(of(1, 2, 9), of(4, 5, 6)) == pytest.approx(1)
        assert measure(of(1, 2, 9), of(6, 5, 4)) == pytest.approx(-1)
        assert np.isnan(measure(of(1, 1, 1), of(4, 5, 6)))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=12))
def test_as_scipy_does_it(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn")
    a, b = np.array(pairs, np.float64).T
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return
    assert float(spearman(a, b)) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert float(kendall(a, b)) == pytest.approx(stats.kendalltau(a, b).statistic)


def test_the_interval_holds_the_value_and_is_the_same_every_time() -> None:
    rng = np.random.default_rng(3)
    a = [rng.normal(size=10) for _ in range(2)]
    b = [x + rng.normal(size=10) for x in a]
    found = correlation(spearman, a, b)
    assert found.low < found.value < found.high
    assert found == correlation(spearman, a, b)
    assert found.value == pytest.approx(np.mean([spearman(x, y) for x, y in zip(a, b, strict=True)]))
    more = correlation(spearman, [np.tile(x, 5) for x in a], [np.tile(y, 5) for y in b])
    assert more.high - more.low < (found.high - found.low) / 1.5


def test_where_there_is_nothing_to_rank() -> None:
    assert all(math.isnan(number) for number in correlation(spearman, [of(1, 1)], [of(1, 2)]))
    assert math.isnan(agreement(of(1, 2, 3)[None]))
    assert math.isnan(from_one_to_the_next(of(1, 2, 3)[None]))


def test_how_alike_rows_are() -> None:
    rows = np.array([[1, 2, 3], [1, 2, 3], [3, 2, 1]], np.float64)
    assert agreement(rows) == pytest.approx((1 - 1 - 1) / 3)
    missing = np.concatenate([rows, [[math.nan], [9], [9]]], 1)  # a client that took no part in the first
    assert from_one_to_the_next(missing) == pytest.approx(
        (1 + 0.2) / 2
    )  # 1 2 3 4 and 3 2 1 4: 1 - 6 · 8 / 60
    assert from_one_to_the_next(rows) == pytest.approx((1 - 1) / 2)
