"""Means, spreads, and paired differences with intervals: arithmetic that one can do by hand.

The primary interval is over seeds: each seed gives one difference, the mean over its clients of what the same client
got from the two algorithms; a t interval over those. It answers "on a new draw of clients, weights and batches, is
there a difference?", and with three seeds it is wide, as it should be. The second one is over clients: the seeds are
taken as given and each one's clients are drawn again (a bootstrap within seeds). It answers "in these very runs, is
the difference carried by many clients or by a few?", and is too narrow for the first question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

LEVEL = 0.95
DRAWS = 10_000


class Spread(NamedTuple):
    """A mean and the standard deviation (n - 1) of what it is of; nan of one value alone."""

    mean: float
    spread: float


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def without_zero(self) -> bool:
        return self.low > 0 or self.high < 0


class Difference(NamedTuple):
    """A row's gain over the reference."""

    mean: float
    seeds: Interval  # primary
    clients: Interval

    @property
    def verdict(self) -> str:
        """What may be said of it."""
        if not self.seeds.without_zero:
            return "not distinguishable"
        return "higher" if self.mean > 0 else "lower"


def spread_of(values: Sequence[float]) -> Spread:
    """The mean and spread over seeds."""
    array = np.asarray(values, np.float64)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else math.nan)


def difference(row: Sequence[Numbers], reference: Sequence[Numbers], level: float = LEVEL) -> Difference:
    """The paired difference of two rows, each given as the values of its clients, an array per seed."""
    gains = [a - b for a, b in zip(row, reference, strict=True)]
    gains = [gain[~np.isnan(gain)] for gain in gains]  # a client that never took part says nothing
    means = np.array([gain.mean() for gain in gains])
    return Difference(float(means.mean()), over_seeds(means, level), over_clients(gains, level))


def over_seeds(means: Numbers, level: float = LEVEL) -> Interval:
    """mean ± t(n - 1) · s / √n over the seeds' differences; of one seed, everything."""
    count = len(means)
    if count < 2:
        return Interval(-math.inf, math.inf)
    half = t_quantile(count - 1, level) * float(means.std(ddof=1)) / math.sqrt(count)
    return Interval(float(means.mean()) - half, float(means.mean()) + half)


def over_clients(gains: Sequence[Numbers], level: float = LEVEL, draws: int = DRAWS) -> Interval:
    """The middle of the means that come out when each seed's clients are drawn again, with replacement."""
    rng = np.random.default_rng(0)  # the same table has the same interval
    means = np.zeros(draws)
    for gain in gains:
        for start in range(0, draws, 1000):  # in portions: thousands of clients times thousands of draws
            portion = min(1000, draws - start)
            means[start : start + portion] += gain[rng.integers(0, len(gain), (portion, len(gain)))].mean(1)
    low, high = np.quantile(means / len(gains), ((1 - level) / 2, (1 + level) / 2))
    return Interval(float(low), float(high))


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t with P(-t < T < t) = level, for Student's T with this many degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # by bisection in the angle of t / √freedom
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _central(angle: float, freedom: int) -> float:
    """P(|T| < √freedom · tan angle), by the finite series for a whole number of degrees of freedom."""
    cosine, sine = math.cos(angle), math.sin(angle)
    even = freedom % 2 == 0
    total, term = (0.0, 1.0) if even else (0.0, cosine)
    for power in range(2 if even else 3, freedom + 1, 2):
        total += term
        term *= cosine**2 * (power - 1) / power
    return sine * total if even else 2 / math.pi * (angle + sine * total)
