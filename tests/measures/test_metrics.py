"""Metrics: by hand, equal to scikit-learn's, and missing where the samples do not define them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import calibration, metrics

from copfl.errors import UsageError
from copfl.measures.metrics import METRICS, MetricInfo, metric

Floats = NDArray[np.float64]


def probabilities(rng: np.random.Generator, n: int, k: int) -> Floats:
    raw = rng.exponential(size=(n, k))
    made: Floats = raw / raw.sum(axis=1, keepdims=True)
    return made


@pytest.mark.parametrize("k", [2, 3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_classification_equals_scikit_learn(k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, y = probabilities(rng, 200, k), rng.integers(0, k, 200)
    guess, confidence = p.argmax(1), p.max(1)
    whole = {"multi_class": "ovr", "average": "macro"} if k > 2 else {}
    true, mean = calibration.calibration_curve(guess == y, confidence, n_bins=15)
    bins = np.histogram(confidence, np.linspace(0, 1, 16))[0]
    expected = {
        "accuracy": metrics.accuracy_score(y, guess),
        "balanced_accuracy": metrics.balanced_accuracy_score(y, guess),
        "macro_f1": metrics.f1_score(y, guess, average="macro"),
        "auc": metrics.roc_auc_score(y, p if k > 2 else p[:, 1], **whole),
        "calibration_error": (np.abs(true - mean) * bins[bins > 0]).sum() / 200,
        "log_loss": metrics.log_loss(y, p, labels=list(range(k))),
    }
    for name, value in expected.items():
        assert metric(name, "classification").of(p, y) == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("labels", [4, 1])
def test_multilabel_equals_scikit_learn(labels: int) -> None:
    rng = np.random.default_rng(0)
    p, y = rng.random((100, labels)), rng.integers(0, 2, (100, labels)).astype(float)
    guess = p > 0.5
    expected = {
        "accuracy": 1 - metrics.hamming_loss(y, guess),
        "macro_f1": np.mean([metrics.f1_score(y[:, k], guess[:, k]) for k in range(labels)]),
        "auc": metrics.roc_auc_score(y, p, average="macro"),
        "log_loss": np.mean([metrics.log_loss(y[:, k], p[:, k]) for k in range(labels)]),
    }
    for name, value in expected.items():
        assert metric(name, "multilabel").of(p, y) == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 3)])
def test_regression_equals_scikit_learn(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    y, given = rng.normal(size=shape), rng.normal(size=shape)
    expected = {
        "rmse": metrics.root_mean_squared_error(y, given),
        "mae": metrics.mean_absolute_error(y, given),
        "r2": metrics.r2_score(y, given),
    }
    for name, value in expected.items():
        assert metric(name, "regression").of(given, y) == pytest.approx(value, abs=1e-12), name


def test_next_token_by_hand() -> None:
    p = np.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], [[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]])
    y = np.array([[0, 1], [0, -100]])  # the last is padding
    with np.errstate(divide="ignore"):
        logs = np.log(p)
    expected = (0.5 * 0.8 * 0.25) ** (-1 / 3)
    assert metric("perplexity", "next_token").of(logs, y) == pytest.approx(expected, abs=1e-12)
    right = np.log(np.array([[0.5, 0.8], [0.25, 1.0]]))
    assert metric("perplexity", "next_token").of(right, y) == pytest.approx(expected, abs=1e-12)
    assert metric("accuracy", "next_token").of(logs, y) == (1 + 0) / 2  # the mean over samples
    blank = np.array([[0, 1], [-100, -100]])  # without a target token there is nothing to be right about
    assert metric("accuracy", "next_token").of(logs, blank) == 1
    assert metric("perplexity", "next_token").of(logs, blank) == pytest.approx((0.5 * 0.8) ** -0.5)
    for name in ("accuracy", "perplexity"):
        assert math.isnan(metric(name, "next_token").of(logs, np.full((2, 2), -100)))


def test_auc_is_over_the_classes_that_the_client_has() -> None:
    rng = np.random.default_rng(0)
    p, y = probabilities(rng, 60, 5), rng.choice([1, 3], 60)
    expected = np.mean([metrics.roc_auc_score(y == k, p[:, k]) for k in (1, 3)])
    assert metric("auc", "classification").of(p, y) == pytest.approx(expected, abs=1e-12)
    ties = p.round(1)  # equal scores count half
    expected = np.mean([metrics.roc_auc_score(y == k, ties[:, k]) for k in (1, 3)])
    assert metric("auc", "classification").of(ties, y) == pytest.approx(expected, abs=1e-12)


def test_what_the_samples_do_not_define_is_missing() -> None:
    p, one = np.full((4, 2), 0.5), np.zeros(4, np.int64)
    assert math.isnan(METRICS["auc"].of(p, one))
    assert math.isnan(METRICS["auc"].of(p, np.zeros((4, 2))))
    assert math.isnan(METRICS["macro_f1"].of(p, np.zeros((4, 2))))  # no label, and none predicted
    assert math.isnan(METRICS["r2"].of(np.arange(4.0), np.ones(4)))
    assert math.isnan(METRICS["r2"].of(np.ones(4), np.ones(4)))
    assert math.isnan(METRICS["r2"].of(np.ones(1), np.ones(1)))
    assert math.isnan(METRICS["perplexity"].of(np.zeros((2, 3)), np.full((2, 3), -100)))
    for found in METRICS.values():
        assert math.isnan(found.of(p[:0], one[:0])), found.name
        assert math.isnan(found.of(np.full((4, 2), np.nan), one)), found.name


def test_a_metric_of_another_task_is_refused() -> None:
    with pytest.raises(UsageError, match="not defined for regression; defined are rmse, mae, r2"):
        metric("accuracy", "regression")
    with pytest.raises(UsageError, match='did you mean "rmse"'):
        metric("rmsee", "regression")


def test_log_loss_by_hand() -> None:
    p = np.array([[0.5, 0.5], [0.25, 0.75]])
    assert metric("log_loss", "classification").of(p, np.array([0, 1])) == pytest.approx(
        (math.log(2) + math.log(4 / 3)) / 2
    )


def test_log_loss_of_a_certain_error_is_finite() -> None:
    certain = metric("log_loss", "classification").of(np.array([[1.0, 0.0]]), np.array([1]))
    assert certain == pytest.approx(-math.log(np.finfo(np.float32).eps))  # networks answer in float32


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.of_rows])
def test_a_metric_with_numbers_of_rows_is_what_it_makes_of_their_mean(name: str) -> None:
    metric, rng = METRICS[name], np.random.default_rng(0)
    classes, labels = rng.dirichlet(np.ones(3), 40), rng.random((40, 2))
    cases = {
        "classification": (classes, rng.integers(0, 3, 40)),
        "multilabel": (labels, np.round(rng.random((40, 2)))),
        "regression": (rng.normal(size=(40, 1)), rng.normal(size=40)),
    }
    for kind in cases.keys() & {*metric.kinds}:
        mean = metric.of_rows(*cases[kind]).mean()  # type: ignore[misc]
        assert metric.of(*cases[kind]) == pytest.approx(
            float(metric.of_mean(mean) if metric.of_mean else mean)
        )


def test_titles() -> None:
    titles = [METRICS[name].title for name in ("macro_f1", "auc", "r2", "c_index", "log_loss")]
    assert titles == ["macro F1", "AUC", "R²", "C-index", "log loss"]
    assert [MetricInfo(name).title for name in ("weighted_f1", "my_auc", "r2")] == [
        "weighted F1",
        "my AUC",
        "R²",
    ]


def test_an_interval_that_says_nothing_is_words() -> None:
    accuracy = MetricInfo()
    assert accuracy.interval(-1.209, 1.238) == "[too few to say]"
    assert accuracy.interval(-0.5, 0.9) == "[-50.0, +90.0]"
