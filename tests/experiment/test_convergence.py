"""Whether a run is past its best: by hand, and how often noise alone is taken for it."""

import math

import numpy as np
import pytest

from copfl.experiment.analysis.convergence import change, got_worse, still_falls
from copfl.measures.metrics import ACCURACY


def test_change_by_hand() -> None:
    before, after = np.array([[1.0, 2.0], [3.0, 2.0]]), np.array([[4.0, 4.0]])  # means 2, 2; then 4, 4
    assert change(before, after) == pytest.approx((math.log(2), math.log(2)))
    assert change(after, before) == pytest.approx((-math.log(2), -math.log(2)))
    assert change(before[:, :1], after[:, :1]) == (-math.inf, math.inf)  # one client has no interval
    assert change(before[:0], after) == (-math.inf, math.inf)
    assert change(np.zeros((1, 2)), np.zeros((1, 2))) == (0.0, 0.0)


def test_a_run_past_its_best_says_so() -> None:
    rounds = np.arange(10)
    losses = np.stack([0.5 + 0.1 * np.abs(rounds - 3), 0.6 + 0.12 * np.abs(rounds - 3)], 1)
    values = np.stack([0.9 - 0.02 * np.abs(rounds - 3), 0.8 - 0.02 * np.abs(rounds - 3)], 1)
    text = got_worse(values, losses, ACCURACY)
    assert text.startswith("the loss on test samples was lowest in rounds 3 to 4 and is 1.")
    assert text.endswith("accuracy was 84.0 % and is 74.0 %, so fewer rounds are better here")
    assert got_worse(values, losses[::-1] * 0 + losses[:1], ACCURACY) == ""
    assert got_worse(values[:1], losses[:1], ACCURACY) == ""
    assert got_worse(values[:, :1], losses[:, :1], ACCURACY) == ""  # one client: no noise is known


def test_rounds_without_an_evaluation_are_left_out() -> None:
    losses = np.full((10, 3), np.nan)
    losses[1::2] = np.array([1.0, 0.5, 1.0, 1.5, 2.0])[:, None] * [1.0, 1.01, 1.02]
    assert "lowest in rounds 4 to 4 and is 4.00 times as high" in got_worse(losses * 0, losses, ACCURACY)


def test_noise_is_seldom_taken_for_it() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        losses = np.exp(rng.normal(size=(5, 4)))  # five evaluations of four clients
        found += bool(got_worse(losses, losses, ACCURACY))
    assert found <= 0.06 * 300


def test_the_loss_falls_where_all_clients_agree() -> None:
    assert still_falls(np.array([[1.0, 1.0], [0.9, 0.91], [0.7, 0.71]]))
    assert not still_falls(np.array([[1.0, 1.0], [0.9, 0.9], [0.5, 1.2]]))
    assert not still_falls(np.array([[1.0, 1.0], [0.7, 0.71], [0.9, 0.91]]))
    assert not still_falls(np.full((3, 2), np.nan))
