"""The interval of a gain over a rival, paired: both models answer the same test rows of one site.

A run asks for each site and the rival that it has.
"""

import numpy as np

from copfl.measures.metrics import Metric
from copfl.rivals.records import Array
from copfl.stats import LEVEL, SAMPLE_DRAWS, Interval, Numbers, over_samples

NUMBERS = 4_000_000  # drawn at a time


def is_fast(metric: Metric, targets: Array) -> bool:
    """Whether the interval takes milliseconds, and not seconds: all draws are computed at once.

    Args:
        metric: What is compared.
        targets: Of the test rows.
    """
    # Of several targets, the RMSE is a mean of roots.
    return metric.of_rows is not None and (metric.of_mean is None or targets[:1].size == 1)


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
    if metric.of_rows is None or not is_fast(metric, targets) or count < 2:

        def gain(drawn: Array) -> float:
            values = (np.asarray(metric.of(answers[drawn], targets[drawn])) for answers in (ours, theirs))
            return float(metric.gain(*values))

        return over_samples(gain, count)
    both = np.stack([metric.of_rows(answers, targets) for answers in (ours, theirs)])  # [2, rows]
    rng, gains, at_once = np.random.default_rng(0), list[Numbers](), max(1, NUMBERS // count)
    for begin in range(0, SAMPLE_DRAWS, at_once):
        drawn = rng.integers(0, count, (min(at_once, SAMPLE_DRAWS - begin), count))
        means = both[:, drawn].mean(-1)
        gains.append(metric.gain(*(means if metric.of_mean is None else metric.of_mean(means))))
    low, high = np.quantile(np.concatenate(gains), ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(float(low), float(high))
