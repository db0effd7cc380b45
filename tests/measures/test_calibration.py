"""Calibration bins, class frequencies and temperatures: by hand, and laws."""

import math

import numpy as np
import pytest

from copfl.measures.calibration import calibration_bins, fitted_temperature, frequencies, pooled, tempered
from copfl.measures.metrics import METRICS


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def test_frequencies_by_hand() -> None:
    # Three samples and one more of all classes alike: (2 + 1/2) / 4 and (1 + 1/2) / 4.
    assert frequencies(np.array([0, 0, 1]), 2).tolist() == [0.625, 0.375]
    unseen = frequencies(np.array([0, 0, 0]), 3)
    assert unseen.tolist() == pytest.approx([10 / 12, 1 / 12, 1 / 12])


def test_temperature_is_softmax_of_scaled_logits() -> None:
    logits = np.random.default_rng(0).normal(size=(20, 4))
    assert tempered(softmax(logits), 2.5) == pytest.approx(softmax(logits / 2.5))
    assert tempered(softmax(logits), 1.0) == pytest.approx(softmax(logits))


def test_temperature_keeps_the_order_of_classes() -> None:
    p = softmax(np.random.default_rng(1).normal(size=(50, 5)))
    assert (tempered(p, 3.0).argmax(1) == p.argmax(1)).all()


@pytest.mark.parametrize("right", [0.5, 1.0, 2.5])
def test_the_temperature_of_many_samples_is_that_of_the_logits(right: float) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(20_000, 3))
    p = softmax(logits)
    y = (p.cumsum(1) > rng.random((len(p), 1))).argmax(1)  # drawn from p: they mean what they say
    assert fitted_temperature(softmax(logits * right), y) == pytest.approx(right, rel=0.05)


def test_few_samples_leave_the_temperature_near_one() -> None:
    p, y = np.array([[0.9, 0.1]]), np.array([0])
    # Alone, one right sample would have the temperature 0. Its prior keeps it.
    assert 0.7 < fitted_temperature(p, y) < 1.0
    assert 1.0 < fitted_temperature(p, np.array([1])) < 2.0
    assert fitted_temperature(np.zeros((0, 2)), np.zeros(0, np.int64)) == 1.0


def test_temperature_of_certain_answers_is_finite() -> None:
    p = np.array([[1.0, 0.0]] * 9)
    found = fitted_temperature(p, np.array([0] * 8 + [1]))
    assert math.isfinite(found)
    assert found > 1
    assert METRICS["log_loss"].of(tempered(p, found), np.array([0] * 8 + [1])) > 0


def test_bins_of_two_clients_together() -> None:
    first = np.array([[0.95, 0.05], [0.6, 0.4]]), np.array([0, 1])
    second = np.array([[0.05, 0.95]]), np.array([0])
    bins = pooled([first, second])
    assert [(one.samples, one.accuracy) for one in bins] == [(1, 0.0), (2, 0.5)]
    assert bins == calibration_bins(np.concatenate([first[0], second[0]]), np.array([0, 1, 0]))
    assert pooled([]) == ()
