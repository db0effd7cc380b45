"""Where a curve still rises at its end or is past its best, and after how many rounds it reaches a value.

Warnings of a run and tables of comparisons ask the same question here.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from copfl.measures.metrics import MetricInfo
from copfl.stats import LEVEL, Interval, Numbers, averaged, mean_of_known, over_clients
from copfl.tables import listed

RELEVANT = 0.01  # of a fraction: a point; of another metric, this part of its value
NAMED = 5  # curves that a sentence names
PARTS = 5  # of a run, whose losses are compared
WORSE = 0.05  # of a loss, beyond which a curve is past its best
TINY = 1e-12  # a loss of 0 has no logarithm


def relevant(metric: MetricInfo, value: float) -> float:
    """The smallest difference to this value that matters.

    Args:
        metric: What was measured.
        value: Of the metric.
    """
    return RELEVANT if metric.fraction else RELEVANT * abs(value)


def gained(curve: Sequence[float], metric: MetricInfo) -> float:
    """What the last third of the evaluations gained, positive where it is better; nan of one evaluation.

    The mean of the evaluations that a value is the mean of, against as many before the last third.

    Args:
        curve: A value per evaluation.
        metric: What was measured.
    """
    count, third = averaged(len(curve)), max(1, len(curve) // 3)
    before = curve[max(0, len(curve) - third - count) : len(curve) - third]
    if not before:
        return float("nan")
    return metric.score(float(np.mean(curve[-count:]))) - metric.score(float(np.mean(before)))


def rises(curves: Sequence[Sequence[float]], metric: MetricInfo) -> float:
    """The mean gain of these curves in their last third, if it is a relevant one; otherwise 0.

    Args:
        curves: One of each seed, a value per evaluation.
        metric: What was measured.
    """
    mean = float(np.mean([gained(curve, metric) for curve in curves]))
    least = relevant(metric, float(np.mean([curve[-1] for curve in curves])))
    return mean if mean >= least else 0.0  # of one evaluation nothing is known, and nan is not above


def still_rises(values: Numbers, losses: Numbers, metric: MetricInfo) -> str:
    """A sentence about a run that is not finished; else "".

    The mean over clients still rises, and the loss falls by more than the noise between clients: an accuracy may
    rise while the probabilities behind it get worse.

    Args:
        values: The metric, [rounds, clients].
        losses: On the same samples.
        metric: The metric.
    """
    curve = mean_of_known(values, axis=1)
    known = curve[~np.isnan(curve)].tolist()
    rise = rises([known], metric) if known else 0.0
    if not rise or not still_falls(losses):
        return ""
    return f"{rising_text({'the mean over sites': rise}, metric)}, so more rounds may do better"


def still_falls(losses: Numbers) -> bool:
    """Whether losses [rounds, clients] fall in the last third of the evaluations, by more than noise."""
    evaluated = losses[~np.isnan(losses).all(1)]
    third = max(1, len(evaluated) // 3)
    return change(evaluated[-2 * third : -third], evaluated[-third:]).high < 0


def change(before: Numbers, after: Numbers, level: float = LEVEL) -> Interval:
    """Of the logarithm of the ratio of losses, over clients; unbounded where nothing is known.

    Args:
        before: Losses of the clients in some evaluations, [evaluations, clients].
        after: In others.
        level: Of confidence.
    """
    if not len(before) or not len(after):
        return Interval(-np.inf, np.inf)
    ratios = np.log(np.maximum(mean_of_known(after), TINY) / np.maximum(mean_of_known(before), TINY))
    finite = ratios[np.isfinite(ratios)]
    return over_clients(finite, level) if len(finite) > 1 else Interval(-np.inf, np.inf)


def got_worse(values: Numbers, losses: Numbers, metric: MetricInfo) -> str:
    """A sentence about a run whose last fifth has a higher loss than an earlier one by more than noise; else "".

    The earlier fifth is the one with the lowest loss. So that chance alone does not find one, the level of the
    interval is divided by the number of earlier fifths (Bonferroni).

    Args:
        values: The metric, [rounds, clients].
        losses: On the same samples.
        metric: The metric.
    """
    rounds = np.flatnonzero(~np.isnan(losses).all(1))
    stretches = [stretch for stretch in np.array_split(rounds, PARTS) if len(stretch)]
    if len(stretches) < 2:
        return ""
    *earlier, last = stretches
    means = [float(np.nanmean(np.log(np.maximum(losses[stretch], TINY)))) for stretch in earlier]
    best = earlier[int(np.argmin(means))]
    bounds = change(losses[best], losses[last], 1 - (1 - LEVEL) / len(earlier))
    if not bounds.low > np.log1p(RELEVANT):
        return ""
    then, now = (metric.text(float(mean_of_known(values[stretch].ravel()))) for stretch in (best, last))
    ratio = np.exp((bounds.low + bounds.high) / 2)
    interval = f"{np.exp(bounds.low):.2f}, {np.exp(bounds.high):.2f}"
    return (
        f"the loss on test samples was lowest in rounds {best[0] + 1} to {best[-1] + 1} and is {ratio:.2f} times as "
        f"high [{interval}] in the last ones; {metric.title} was {then}{metric.unit} and is {now}{metric.unit}, so "
        "fewer rounds are better here"
    )


def past_its_best(values: Numbers, losses: Numbers, rounds: Sequence[int], metric: MetricInfo) -> str:
    """Such as "accuracy 84.1 % in rounds 1 to 20, 78.2 % in the last ones"; "" where the last ones are as good.

    The loss and the metric are both worse in the last fifth than in the fifth with the lowest loss, by what matters.

    Args:
        values: The mean over clients and seeds of each evaluation.
        losses: On the same samples.
        rounds: Of the evaluations.
        metric: The metric.
    """
    *earlier, last = [part for part in np.array_split(np.arange(len(values)), PARTS) if len(part)]
    if not earlier or not np.isfinite(losses).all():
        return ""
    best = min(earlier, key=lambda part: float(np.mean(losses[part])))
    is_higher = float(np.mean(losses[last])) > (1 + WORSE) * float(np.mean(losses[best]))
    then, now = (float(np.mean(values[part])) for part in (best, last))
    if not is_higher or metric.score(then) - metric.score(now) < relevant(metric, then):
        return ""
    shown = [
        f"{metric.title} {metric.text(then)}{metric.unit} in rounds {rounds[best[0]]} to {rounds[best[-1]]}"
    ]
    return ", ".join([*shown, f"{metric.text(now)}{metric.unit} in the last ones"])


def rising_text(rises: Mapping[str, float], metric: MetricInfo) -> str:
    """Such as "in the last third of the evaluations fedavg still gained 3.2 points".

    Args:
        rises: What each row gained, by its label.
        metric: What was measured.
    """
    unit = " points" if metric.fraction else f" of {metric.title}"
    named = [f"{label} still gained {metric.text(rise)}{unit}" for label, rise in rises.items()]
    return f"in the last third of the evaluations {listed(named, NAMED)}"


def common_value(curves: Sequence[Sequence[float]], metric: MetricInfo) -> float:
    """The best value that every curve reaches.

    Args:
        curves: One of each row.
        metric: What was measured.
    """
    bests = [metric.best(curve) for curve in curves]
    return min(bests) if metric.higher_is_better else max(bests)


def rounds_to(value: float, rounds: Sequence[int], curve: Sequence[float], metric: MetricInfo) -> int | None:
    """The first of these rounds in which the curve is as good as the value; None if it never is.

    Args:
        value: That is to be reached.
        rounds: Of the evaluations.
        curve: A value per evaluation.
        metric: What was measured.
    """
    pairs = zip(rounds, curve, strict=True)
    return next((number for number, reached in pairs if metric.score(reached) >= metric.score(value)), None)
