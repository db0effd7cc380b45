"""At which sites another candidate is better: by hand, and how often by chance."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from copfl.verdict import drawn
from copfl.verdict.drawn import FEWEST_ROWS, site_gains

NAN = np.nan
Rows = list[np.ndarray]


def federation(means: list[float], rows: int, seed: int = 0, noise: float = 0.3) -> tuple[Rows, Rows]:
    """Our losses and theirs: at each site theirs are higher by a mean, with noise."""
    rng = np.random.default_rng(seed)
    theirs = [1 + noise * rng.normal(size=rows) for _ in means]
    return [
        own - mean - noise * rng.normal(size=rows) for own, mean in zip(theirs, means, strict=True)
    ], theirs


def are_better(ours: Rows, theirs: Rows) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = drawn._are_better(
        drawn.SiteGains(*(values[None] for values in site_gains(ours, theirs)))
    )[0]
    return found


def test_a_gain_is_a_fraction_of_both_losses_and_has_at_least_the_pooled_variance() -> None:
    ours, theirs = (
        [np.array([1.0, 1.0, NAN]), np.array([1.0, 3.0])],
        [np.array([3.0, 3.0, 9.0]), np.array([2.0, 2.0])],
    )
    found = site_gains(ours, theirs)
    assert found.mean == pytest.approx([0.5, 0.0])
    # Rows of the second site: 1/4 and -1/4, a variance of 1/8 with one degree of freedom; of the first site: none.
    assert found.variance == pytest.approx([1 / 16 / 2, 1 / 8 / 2])
    assert found.rows.tolist() == [2, 2]


def test_by_hand() -> None:
    """Two sites with gains of 1/2 and -1/2, and 64 rows each of which the variance is 1/16."""
    signs = np.tile([1.0, -1.0], 32) * np.sqrt(63 / 64) / 4
    low, high = 0.5 + signs, 0.5 - signs  # losses whose means are 1/2
    one = (np.full(64, 0.25), 0.25 + 0.5 + signs)  # a sum of 1: gains are differences
    other = (one[1], one[0])
    found = site_gains([one[0], other[0]], [one[1], other[1]])
    assert found.mean == pytest.approx([0.5, -0.5])
    assert found.variance == pytest.approx([1 / 16 / 64] * 2)
    # τ² is the variance of the gains, 1/2, less that of a mean over rows: the sites count for themselves.
    assert are_better([one[0], other[0]], [one[1], other[1]]).tolist() == [True, False]
    assert not are_better([low, low], [high, high]).any()


def test_a_site_of_its_own_kind_departs_and_the_others_do_not() -> None:
    ours, theirs = federation([-0.3, -0.3, -0.3, 0.3], rows=60)
    assert are_better(ours, theirs).tolist() == [False, False, False, True]


def test_few_rows_are_never_enough() -> None:
    ours, theirs = federation([-0.3, -0.3, -0.3, 0.5], rows=FEWEST_ROWS - 1, noise=0.1)
    assert not are_better(ours, theirs).any()


def test_rows_of_one_class_do_not_look_certain() -> None:
    """All gains of a site are the same, but those of others vary."""
    ours, theirs = federation([-0.1] * 30, rows=FEWEST_ROWS, noise=0.5)
    ours[0], theirs[0] = np.full(FEWEST_ROWS, 0.9), np.full(FEWEST_ROWS, 1.0)
    assert not are_better(ours, theirs)[0]


def test_of_many_sites_none_departs_by_chance() -> None:
    """By two standard errors of its own rows, one site of 44 would."""
    departing = [are_better(*federation([-0.02] * 50, rows=30, seed=seed)).sum() for seed in range(40)]
    assert np.sum(departing) <= 2


def test_where_nothing_is_known_nobody_departs() -> None:
    assert not are_better([np.array([NAN])], [np.array([1.0])]).any()
    assert not are_better([np.array([1.0]), np.array([1.0])], [np.array([2.0]), np.array([2.0])]).any()
    assert not are_better([np.zeros(30)], [np.zeros(30)]).any()


def test_a_loss_that_is_not_finite_is_not_better() -> None:
    ours, theirs = federation([0.3, 0.3], rows=40)
    ours[0] = np.full(40, np.inf)
    assert not are_better(ours, theirs)[0]
