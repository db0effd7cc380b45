"""Where a curve still rises at its end: the value after more rounds would be another one."""

from collections.abc import Sequence

import numpy as np

from copfl.core.metrics import MetricInfo
from copfl.stats import averaged

RELEVANT = 0.01  # of a fraction: a point; of another metric, this part of its value


def gained(curve: Sequence[float], metric: MetricInfo) -> float:
    """What the last third of the evaluations gained, positive where it is better; nan of one evaluation.

    The mean of the evaluations that a value is the mean of, against as many before the last third.
    """
    count, third = averaged(len(curve)), max(1, len(curve) // 3)
    before = curve[max(0, len(curve) - third - count) : len(curve) - third]
    if not before:
        return float("nan")
    return float(metric.gain(np.mean(curve[-count:]), np.mean(before)))


def relevant(metric: MetricInfo, value: float) -> float:
    """The smallest difference to this value that matters."""
    return RELEVANT if metric.fraction else RELEVANT * abs(value)


def rises(curves: Sequence[Sequence[float]], metric: MetricInfo) -> float:
    """The mean gain of these curves in their last third, if it is a relevant one; otherwise 0."""
    mean = float(np.mean([gained(curve, metric) for curve in curves]))
    least = relevant(metric, float(np.mean([curve[-1] for curve in curves])))
    return mean if mean >= least else 0.0  # of one evaluation nothing is known, and nan is not above
