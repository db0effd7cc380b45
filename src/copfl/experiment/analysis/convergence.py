"""Where a curve still rises at its end, and after how many rounds it reaches a value."""

from collections.abc import Mapping, Sequence

import numpy as np

from copfl.core.metrics import MetricInfo
from copfl.stats import Numbers, averaged, mean_of_known
from copfl.tables import listed

RELEVANT = 0.01  # of a fraction: a point; of another metric, this part of its value
NAMED = 5  # curves that a sentence names


def relevant(metric: MetricInfo, value: float) -> float:
    """The smallest difference to this value that matters."""
    return RELEVANT if metric.fraction else RELEVANT * abs(value)


def gained(curve: Sequence[float], metric: MetricInfo) -> float:
    """What the last third of the evaluations gained, positive where it is better; nan of one evaluation.

    The mean of the evaluations that a value is the mean of, against as many before the last third.
    """
    count, third = averaged(len(curve)), max(1, len(curve) // 3)
    before = curve[max(0, len(curve) - third - count) : len(curve) - third]
    if not before:
        return float("nan")
    return metric.score(float(np.mean(curve[-count:]))) - metric.score(float(np.mean(before)))


def rises(curves: Sequence[Sequence[float]], metric: MetricInfo) -> float:
    """The mean gain of these curves in their last third, if it is a relevant one; otherwise 0."""
    mean = float(np.mean([gained(curve, metric) for curve in curves]))
    least = relevant(metric, float(np.mean([curve[-1] for curve in curves])))
    return mean if mean >= least else 0.0  # of one evaluation nothing is known, and nan is not above


def still_rises(values: Numbers, metric: MetricInfo) -> str:
    """A sentence about a run whose mean over clients still rises, of values [rounds, clients]; else ""."""
    curve = mean_of_known(values, axis=1)
    known = curve[~np.isnan(curve)].tolist()
    rise = rises([known], metric) if known else 0.0
    if not rise:
        return ""
    return f"{rising_text({'the mean over clients': rise}, metric)}, so more rounds may do better"


def rising_text(rises: Mapping[str, float], metric: MetricInfo) -> str:
    """Such as "in the last third of the evaluations fedavg still gained 3.2 points"."""
    unit = " points" if metric.fraction else f" of {metric.title}"
    named = [f"{label} still gained {metric.text(rise)}{unit}" for label, rise in rises.items()]
    return f"in the last third of the evaluations {listed(named, NAMED)}"


def common_value(curves: Sequence[Sequence[float]], metric: MetricInfo) -> float:
    """The best value that every curve reaches."""
    bests = [metric.best(curve) for curve in curves]
    return min(bests) if metric.higher_is_better else max(bests)


def rounds_to(value: float, rounds: Sequence[int], curve: Sequence[float], metric: MetricInfo) -> int | None:
    """The first of these rounds in which the curve is as good as the value; None if it never is."""
    pairs = zip(rounds, curve, strict=True)
    return next((number for number, own in pairs if metric.score(own) >= metric.score(value)), None)
