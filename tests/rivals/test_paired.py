"""The interval over a site's test rows: the fast form is the bootstrap of `copfl.stats`, paired."""

from typing import Any

import numpy as np
import pytest

from copfl.measures.metrics import METRICS
from copfl.rivals.paired import gain_interval, is_fast
from copfl.stats import over_samples

LOG_LOSS = METRICS["log_loss"]


@pytest.mark.job
@pytest.mark.parametrize("name", ["accuracy", "rmse", "mae"])
def test_the_fast_form_is_the_plain_bootstrap(name: str) -> None:
    metric, rng = METRICS[name], np.random.default_rng(0)
    y: Any
    if name == "accuracy":
        y = rng.integers(0, 3, 200)
        ours, theirs = (rng.dirichlet([1, 1, 1], 200) + 0.4 * k * np.eye(3)[y] for k in (2, 1))
    else:
        y = rng.normal(size=200)
        ours, theirs = (y + k * rng.normal(size=200) for k in (1, 2))
    assert is_fast(metric, y)

    def gain(drawn: np.ndarray) -> float:
        values = [np.asarray(metric.of(answers[drawn], y[drawn])) for answers in (ours, theirs)]
        return float(metric.gain(*values))

    found, plain = gain_interval(metric, ours, theirs, y), over_samples(gain, 200)
    assert found == pytest.approx(plain, abs=0.03)
    assert found.low > 0
    if y.dtype.kind == "f":  # a network answers [rows, 1]
        assert gain_interval(metric, ours[:, None], theirs, y) == found


def test_equal_answers_gain_nothing_for_certain() -> None:
    answers, y = np.eye(2)[[0, 1, 1, 0]], np.array([0, 1, 0, 0])
    assert gain_interval(METRICS["accuracy"], answers, answers, y) == (0, 0)


def test_one_row_has_no_interval() -> None:
    bounds = gain_interval(METRICS["accuracy"], np.eye(2)[:1], np.eye(2)[1:], np.array([0]))
    assert not np.isfinite(bounds).any()


def test_other_metrics_have_the_plain_bootstrap() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    ours = np.stack([1 - y + 2 * rng.random(40), y + 2 * rng.random(40)], 1) / 6  # they overlap
    assert not is_fast(METRICS["auc"], y)
    assert not is_fast(LOG_LOSS, y) or "log_loss" in METRICS
    assert not is_fast(METRICS["rmse"], np.zeros((3, 2)))  # a mean of roots
    bounds = gain_interval(METRICS["auc"], ours, np.full((40, 2), 0.5), y)
    assert 0 < bounds.low < bounds.high < 0.5
