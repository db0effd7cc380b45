from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from copfl.stats import Interval, difference, over_clients, over_seeds, spread_of, t_quantile


def test_mean_and_spread_by_hand() -> None:
    # (1 + 2 + 6) / 3 = 3; squares 4 + 1 + 9 = 14, over 2 is 7
    assert spread_of([1, 2, 6]) == pytest.approx((3, math.sqrt(7)))


def test_one_value_has_no_spread() -> None:
    mean, spread = spread_of([0.5])
    assert mean == 0.5
    assert math.isnan(spread)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 31, 100])
def test_t_quantiles_are_scipys(freedom: int, level: float) -> None:
    assert t_quantile(freedom, level) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-9)


def test_t_quantiles_that_one_knows() -> None:
    assert t_quantile(1, 0.5) == pytest.approx(1)  # the quartile of Cauchy's distribution
    assert t_quantile(2) == pytest.approx(4.302653, abs=1e-6)  # as printed in every table


def test_interval_over_seeds_by_hand() -> None:
    # mean 2, s = 1, three seeds: 2 ± 4.3027 / √3 = 2 ± 2.4841
    assert over_seeds(np.array([1.0, 2.0, 3.0])) == pytest.approx((-0.484138, 4.484138), abs=1e-6)


def test_of_one_seed_everything_is_possible() -> None:
    interval = over_seeds(np.array([3.0]))
    assert interval == (-math.inf, math.inf)
    assert not interval.without_zero


def test_difference_pairs_the_same_client_of_the_same_seed() -> None:
    reference = [np.array([0.1, 0.9]), np.array([0.2, 0.4])]
    row = [np.array([0.3, 1.0]), np.array([0.3, 0.4])]
    # gains: (0.2, 0.1) and (0.1, 0): 0.15 and 0.05, mean 0.1, s = 0.0707, half = 12.706 * 0.05
    gain = difference(row, reference)
    assert gain.mean == pytest.approx(0.1)
    assert gain.seeds == pytest.approx((0.1 - 0.635310, 0.1 + 0.635310), abs=1e-5)
    assert gain.verdict == "not distinguishable"
    # drawn again, seed 0 gives 0.1, 0.15 or 0.2 and seed 1 gives 0, 0.05 or 0.1, both ends one time in four
    assert gain.clients == pytest.approx((0.05, 0.15), abs=1e-9)


def test_a_client_that_never_took_part_says_nothing() -> None:
    row, reference = np.array([0.5, np.nan, 0.7]), np.array([0.4, np.nan, 0.4])
    assert difference([row, row], [reference, reference]).mean == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.1, "higher"), (-0.1, "lower"), (0.0, "not distinguishable")]
)
def test_verdicts(shift: float, verdict: str) -> None:
    reference = [np.array([0.5, 0.6]), np.array([0.4, 0.5]), np.array([0.3, 0.4])]
    assert difference([values + shift for values in reference], reference).verdict == verdict


def test_interval_over_clients_is_the_normal_one_for_many_clients() -> None:
    gains = [np.random.default_rng(seed).normal(0.1 * seed, 1, 2000) for seed in range(2)]
    error = math.sqrt(sum(gain.var() / len(gain) for gain in gains)) / 2
    mean = np.mean([gain.mean() for gain in gains])
    assert over_clients(gains) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)
    assert over_clients(gains) == over_clients(gains)


@pytest.mark.parametrize(("low", "high", "clear"), [(0.1, 0.2, True), (-0.2, -0.1, True), (-0.1, 0.1, False)])
def test_zero_inside_or_not(low: float, high: float, clear: bool) -> None:
    assert Interval(low, high).without_zero is clear
