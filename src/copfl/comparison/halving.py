"""Successive halving: all that is tried trains for a few rounds, the best third for more, and so on.

A grid and a search with Optuna promote alike. A grid has one rung, all rounds; a search has three. `choose` takes as
many to the next fold.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from copfl.measures.metrics import MetricInfo

C = TypeVar("C")

PROMOTED = 3  # one of so many goes on
SEARCH = (1 / 9, 1 / 3, 1.0)  # of the rounds, at each rung of a search
GRID = (1.0,)


def promoted(count: int) -> int:
    """How many of so many go on to the next rung."""
    return math.ceil(count / PROMOTED)


def halving(
    groups: Sequence[Sequence[C]],
    measure: Callable[[list[C], float], list[float]],
    metric: MetricInfo,
    fractions: Sequence[float] = SEARCH,
) -> list[list[tuple[C, float, float]]]:
    """Of each group, every candidate with its value and the fraction of the rounds it was measured after.

    The best of each group are measured again with more rounds; of equals, the first are.

    Args:
        groups: The candidates of each row.
        measure: The values of candidates after a fraction of the rounds.
        metric: Which value is better.
        fractions: Of the rounds, at each rung.
    """
    left = [dict(enumerate(group)) for group in groups]
    results: list[dict[int, tuple[C, float, float]]] = [{} for _ in groups]
    for fraction in fractions:
        values = iter(measure([candidate for group in left for candidate in group.values()], fraction))
        for of_group, group in zip(results, left, strict=True):
            of_group |= {number: (candidate, next(values), fraction) for number, candidate in group.items()}
            ranked = sorted((-metric.score(of_group[number][1]), number) for number in group)
            for _, number in ranked[promoted(len(group)) :]:
                del group[number]
    return [list(of_group.values()) for of_group in results]


def whole_runs(count: int, fractions: Sequence[float] = SEARCH) -> float:
    """What the halving of so many candidates costs, in runs of all rounds.

    Args:
        count: The candidates of the first rung.
        fractions: Of the rounds, at each rung.
    """
    cost = 0.0
    for fraction in fractions:
        cost, count = cost + count * fraction, promoted(count)
    return cost
