"""The interval of a gain over a rival, paired: both models answer the same test rows of one site.

A run asks for each site and the rival that it has.
"""

from collections.abc import Callable

import numpy as np

from copfl.core.metrics import METRICS, Metric, surprises
from copfl.rivals.records import Array
from copfl.stats import LEVEL, SAMPLE_DRAWS, Interval, Numbers, over_samples

NUMBERS = 4_000_000  # drawn at a time


def _right(predictions: Array, targets: Array) -> Numbers:
    if targets.ndim == 1:
        return np.asarray(predictions.argmax(-1) == targets, np.float64)
    return np.asarray(((predictions > 0.5) == (targets > 0.5)).mean(1), np.float64)


def _errors(predictions: Array, targets: Array) -> Numbers:
    return np.asarray(np.abs(_residuals(predictions, targets)).mean(1))


def _residuals(predictions: Array, targets: Array) -> Numbers:
    """[rows, values]; the predictions of one value may be [rows, 1], and its targets [rows]."""
    count = len(targets)
    return np.asarray(predictions.reshape(count, -1) - targets.reshape(count, -1), np.float64)


# Metrics that are means over rows, of which all draws are computed at once.
OF_ROWS: dict[str, Callable[[Array, Array], Numbers]] = {
    "accuracy": _right,
    "mae": _errors,
    "log_loss": surprises,
}


def is_fast(metric: Metric, targets: Array) -> bool:
    """Whether the interval takes milliseconds, and not seconds.

    Args:
        metric: What is compared.
        targets: Of the test rows.
    """
    return METRICS.get(metric.name) == metric and (metric.name in OF_ROWS or _is_rmse(metric, targets))


def _is_rmse(metric: Metric, targets: Array) -> bool:
    return metric.name == "rmse" and targets[:1].size == 1  # of several targets it is a mean of roots


def gain_interval(metric: Metric, ours: Array, theirs: Array, targets: Array) -> Interval:
    """The bootstrap interval of our gain over their answers, when the test rows are drawn again.

    Unbounded of fewer than two rows.

    Args:
        metric: What is compared.
        ours: Answers to the rows, as the metric takes predictions.
        theirs: Other answers to the same rows.
        targets: Of the rows.
    """
    count = len(targets)
    if not is_fast(metric, targets) or count < 2:

        def gain(drawn: Array) -> float:
            values = (np.asarray(metric.of(answers[drawn], targets[drawn])) for answers in (ours, theirs))
            return float(metric.gain(*values))

        return over_samples(gain, count)
    both = np.stack([_of_rows(metric, answers, targets) for answers in (ours, theirs)])  # [2, rows]
    rng, gains, at_once = np.random.default_rng(0), list[Numbers](), max(1, NUMBERS // count)
    for begin in range(0, SAMPLE_DRAWS, at_once):
        drawn = rng.integers(0, count, (min(at_once, SAMPLE_DRAWS - begin), count))
        means = both[:, drawn].mean(-1)
        gains.append(metric.gain(*(np.sqrt(means) if metric.name == "rmse" else means)))
    low, high = np.quantile(np.concatenate(gains), ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(float(low), float(high))


def _of_rows(metric: Metric, answers: Array, targets: Array) -> Numbers:
    if metric.name == "rmse":
        return _residuals(answers, targets)[:, 0] ** 2
    return OF_ROWS[metric.name](answers, targets)
