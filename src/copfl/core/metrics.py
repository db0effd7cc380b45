"""Metrics of a model on one client's test samples, as named values; scikit-learn computes them.

Predictions are probabilities [n, k] (classification, multilabel), values [n] or [n, k] (regression), or the
log-probabilities of every token [n, T, k], or of the right token [n, T] (next_token). Targets are as in
`copfl.data.samples.Samples.y`. A metric that these samples do not define, such as the AUC of one class, is
nan: missing, and not 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.core.criteria import PADDING
from copfl.errors import UsageError, unknown

Array = NDArray[Any]

CALIBRATION_BINS = 15


@dataclass(frozen=True)
class Metric:
    """A number that judges predictions."""

    name: str
    higher_is_better: bool
    kinds: tuple[str, ...]  # of tasks that it is defined for
    function: Callable[[Array, Array], float]  # of predictions and targets; it may raise a ValueError
    adds_up: bool = False  # a mean over samples: the mean over batches, weighted by their sizes, is equal

    def of(self, predictions: Array, targets: Array) -> float:
        """The metric of these samples; nan if they do not define it."""
        if not len(targets) or np.isnan(predictions).any():
            return float("nan")
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # the result reports it: nan
            try:
                value = float(self.function(predictions, targets))
            except ValueError:
                return float("nan")
        return value if np.isfinite(value) else float("nan")


def metric(name: str, kind: str) -> Metric:
    """The metric of this name; UsageError if there is none, or if a task of this kind does not define it."""
    if name not in METRICS:
        raise unknown("metric", name, METRICS)
    found = METRICS[name]
    if kind not in found.kinds:
        known = ", ".join(other.name for other in METRICS.values() if kind in other.kinds)
        raise UsageError(f'the metric "{name}" is not defined for {kind}; defined are {known}')
    return found


def _accuracy(predictions: Array, targets: Array) -> float:
    """The fraction that is right: of the samples, of their labels, or of the tokens of each sample."""
    if targets.dtype.kind == "f":
        return float((_labels(predictions) == targets).mean())
    counts = targets != PADDING
    right = (predictions.argmax(axis=-1) == targets) & counts
    if targets.ndim == 1:
        return float(right.mean())
    return float(np.mean(right.sum(axis=1) / counts.sum(axis=1)))


def _balanced_accuracy(predictions: Array, targets: Array) -> float:
    """The mean over the classes of the fraction that is right."""
    from sklearn.metrics import balanced_accuracy_score

    return float(balanced_accuracy_score(targets, predictions.argmax(axis=1)))


def _macro_f1(predictions: Array, targets: Array) -> float:
    """The mean F1 over the classes or labels that appear in the targets or the predictions."""
    from sklearn.metrics import f1_score

    guesses = _labels(predictions) if targets.ndim > 1 else predictions.argmax(axis=1)
    return float(f1_score(targets, guesses, average="macro", zero_division=np.nan))


def _auc(predictions: Array, targets: Array) -> float:
    """The mean area under the ROC curves of each class against the rest; of two classes, the second's."""
    from sklearn.metrics import roc_auc_score

    columns = np.arange(predictions.shape[1])
    if targets.ndim == 1:
        columns = columns[1:] if len(columns) == 2 else columns
        targets = targets[:, None] == np.arange(predictions.shape[1])
    defined = [k for k in columns if 0 < targets[:, k].sum() < len(targets)]
    return float(np.mean([roc_auc_score(targets[:, k], predictions[:, k]) for k in defined]))


def _calibration_error(predictions: Array, targets: Array) -> float:
    """The mean distance of confidence and accuracy over bins of equal width, weighted by their samples."""
    if targets.ndim == 1:
        confidence, right = predictions.max(axis=1), predictions.argmax(axis=1) == targets
    else:
        confidence, right = predictions.ravel(), targets.ravel()
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    bins = np.searchsorted(edges[1:-1], confidence)
    gaps = np.bincount(bins, weights=confidence - right, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def _rmse(predictions: Array, targets: Array) -> float:
    """The root of the mean squared error; the mean over several targets."""
    from sklearn.metrics import root_mean_squared_error

    return float(root_mean_squared_error(*_values(predictions, targets)))


def _mae(predictions: Array, targets: Array) -> float:
    """The mean absolute error."""
    from sklearn.metrics import mean_absolute_error

    return float(mean_absolute_error(*_values(predictions, targets)))


def _r2(predictions: Array, targets: Array) -> float:
    """The fraction of the targets' variance that is explained; the mean over several targets."""
    from sklearn.metrics import r2_score

    return float(r2_score(*_values(predictions, targets), force_finite=False))


def _perplexity(predictions: Array, targets: Array) -> float:
    """The exponential of the mean negative log-probability of the right token."""
    counts = targets != PADDING
    if predictions.ndim > targets.ndim:
        predictions = np.take_along_axis(predictions, np.where(counts, targets, 0)[..., None], -1)[..., 0]
    return float(np.exp(-predictions[counts].mean())) if counts.any() else float("nan")


def _labels(predictions: Array) -> Array:
    """Probabilities of labels as 0 and 1."""
    return (predictions > 0.5).astype(np.float64)


def _values(predictions: Array, targets: Array) -> tuple[Array, Array]:
    """Targets and predictions [n, k]."""
    return targets.reshape(len(targets), -1), predictions.reshape(len(predictions), -1)


def _by_name(metrics: Iterable[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS = _by_name(
    (
        Metric("accuracy", True, ("classification", "multilabel", "next_token"), _accuracy, adds_up=True),
        Metric("balanced_accuracy", True, ("classification",), _balanced_accuracy),
        Metric("macro_f1", True, ("classification", "multilabel"), _macro_f1),
        Metric("auc", True, ("classification", "multilabel"), _auc),
        Metric("calibration_error", False, ("classification", "multilabel"), _calibration_error),
        Metric("rmse", False, ("regression",), _rmse),
        Metric("mae", False, ("regression",), _mae, adds_up=True),
        Metric("r2", True, ("regression",), _r2),
        Metric("perplexity", False, ("next_token",), _perplexity),
    )
)
