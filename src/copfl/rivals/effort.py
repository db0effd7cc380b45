"""How many trees the rivals have, and how long they take: by a formula, so that the same run has the same trees.

A run asks before it trains rivals, and says the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FOLDS = 5  # of the cross-validation
PENALTIES = (0.01, 0.1, 1.0, 10.0)  # C of a logistic regression, chosen by the cross-validation
ONE_PENALTY = (1.0,)
MOST_TREES, FEWEST_TREES = 100, 20
MOST_SITES = 300  # of more sites than these, evenly chosen ones have rivals
BAG = 5_000  # rows that a tree of a forest is grown on at most
VALIDATED_ROWS = 5_000  # on which a linear model is cross-validated at most; it is trained on all rows
RIDGES = (
    0.1,
    1.0,
    10.0,
    100.0,
    1000.0,
)  # of Cox's model, for columns of deviation 1; chosen by cross-validation
LEAF = 20  # rows of a leaf of boosted trees, scikit-learn's default: fewer than two leaves are a constant
LEAVES = 31  # of a boosted tree, scikit-learn's default

# Seconds of one core. Measured on tables of 20 to 1,000 rows; docs/report.md says how long runs take.
LINEAR_SECONDS, FOREST_SECONDS, BOOSTED_SECONDS = 5.0, 6.0, 5.0  # for all sites together, at most
MOST_LINEAR_SECONDS = 20.0  # with one penalty: a linear model is the last that is left out
FIT, FIT_NUMBER = 2e-3, 5e-7  # of a linear model, and per row, column and class
COX, COX_NUMBER, COX_STEPS = 2e-3, 3e-9, 10  # of Cox's model, and per step, row and squared column
TREE, TREE_NUMBER = 2e-3, 4e-8  # of a forest, and per row, column that is tried, and level
BOOST, BOOST_NUMBER = 3e-4, 5e-6  # of a boosted tree, and per leaf and column


class Effort(NamedTuple):
    """What the rivals of every site are trained with."""

    penalties: tuple[float, ...]  # () where there is no linear model
    forest: int  # trees; 0: no forest
    boosted: int  # trees of each class; 0: none
    seconds: float  # that all sites take, about
    boosting: float = 0.0  # of them, those of boosted trees

    def without_boosting(self) -> Effort:
        """The same, without boosted trees."""
        return self._replace(boosted=0, seconds=self.seconds - self.boosting, boosting=0.0)


def effort_of(rows: Sequence[int], columns: int, outputs: int, *, values: bool, trees: bool) -> Effort:
    """The numbers of trees for which the rivals take some seconds at most.

    Args:
        rows: Training rows of each site that has rivals.
        columns: Of a row.
        outputs: Numbers that are predicted: classes, labels or values; 1 of two classes.
        values: Whether they are values, and not classes.
        trees: Whether there are rivals of trees.
    """
    sizes = np.maximum(np.asarray(rows, np.float64), 2)
    validated = np.minimum(sizes, VALIDATED_ROWS)

    def linear(penalties: int) -> float:
        fits = FOLDS * (1 if values else penalties)  # a ridge regression tries all of its own at once
        known = (
            columns if values else np.minimum(columns, sizes)
        )  # of more columns than rows, as many as rows
        return float(np.sum((fits + 1) * FIT + FIT_NUMBER * known * outputs * (fits * validated + sizes)))

    penalties: tuple[float, ...] = ()
    if linear(len(PENALTIES)) <= LINEAR_SECONDS:
        penalties = PENALTIES
    elif linear(len(ONE_PENALTY)) <= MOST_LINEAR_SECONDS:
        penalties = ONE_PENALTY
    seconds = linear(len(penalties)) if penalties else 0.0
    if not trees:
        return Effort(penalties, 0, 0, seconds)
    bag = np.minimum(sizes, BAG)
    tried = columns if values else math.sqrt(columns)
    tree = float(np.sum(TREE + TREE_NUMBER * bag * tried * np.log2(bag)))
    tree *= outputs if values else 1
    leaves = np.minimum(sizes // LEAF, LEAVES)
    boost = float(np.sum(np.where(leaves < 2, 0, BOOST + BOOST_NUMBER * leaves * columns))) * outputs
    boost *= FOLDS + 1
    forest, boosted = _trees(FOREST_SECONDS, tree), _trees(BOOSTED_SECONDS, boost)
    total = seconds + forest * tree + boosted * boost
    return Effort(penalties, forest, boosted, total, boosted * boost)


def effort_of_survival(rows: Sequence[int], columns: int) -> Effort:
    """The ridges of which Cox's model has the best; none where it would take long.

    Args:
        rows: Training rows of each site that has rivals.
        columns: Of a row.
    """
    fits = 1 + FOLDS * len(RIDGES)
    numbers = COX_STEPS * fits * float(np.sum(np.minimum(rows, VALIDATED_ROWS))) * columns**2
    seconds = fits * len(rows) * COX + numbers * COX_NUMBER
    return Effort(RIDGES if seconds <= MOST_LINEAR_SECONDS else (), 0, 0, seconds)


def _trees(seconds: float, of_one: float) -> int:
    """As many trees as the time allows; 0 where that is too few for a model."""
    count = MOST_TREES if of_one * MOST_TREES <= seconds else int(seconds / of_one)
    return count if count >= FEWEST_TREES else 0
