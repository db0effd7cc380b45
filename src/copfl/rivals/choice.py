"""The best rival, by what is cross-validated within training rows. Test rows have no say.

Runs choose among their rivals here, and comparisons over their seeds.
"""

from collections.abc import Mapping

import numpy as np

from copfl.measures.metrics import MetricInfo
from copfl.stats import Numbers

EQUAL = 1e-9  # differences that are rounding


def best_of(validated: Mapping[str, float], metric: MetricInfo) -> str:
    """The name of the best one; of equals, and where nothing is known, the first, which is the simplest.

    Args:
        validated: The cross-validated metric by name, the simplest first.
        metric: What was measured.
    """
    best = next(iter(validated))
    for name, value in validated.items():
        if metric.score(value) > metric.score(validated[best]) + EQUAL:
            best = name
    return best


def best_of_sites(validated: Mapping[str, Numbers], metric: MetricInfo) -> str:
    """The best one by its mean over the sites at which all have a value.

    Args:
        validated: The cross-validated metric at each site, [sites], by name, the simplest first.
        metric: What was measured.
    """
    known = ~np.isnan(np.stack(list(validated.values()))).any(0)
    means = {name: float(v[known].mean()) if known.any() else np.nan for name, v in validated.items()}
    return best_of(means, metric)
