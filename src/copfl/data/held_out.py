"""Which samples are test, where a user's data do not say it."""

import numpy as np
from numpy.typing import NDArray

from copfl.data.samples import Samples
from copfl.errors import DataError, how_to_set

FEWEST = 5  # samples of which one is for testing


def split_off(samples: Samples) -> tuple[Samples, Samples, str]:
    """Train and test, a fifth, and a note: of each class, or of each group's own samples, class by class."""
    if samples.group is None:
        is_test, how = held_out(samples.strata, 1, 5), "every fifth sample of a class is test"
    else:
        is_test = held_out_of_groups(samples.group, samples.strata)
        how = "a fifth of each group's samples is test"
    if not is_test.any():
        if len(np.unique(samples.strata)) == len(samples) >= FEWEST:
            numbers = how_to_set("kind", "regression", "--task")
            raise DataError(
                f"each of the {len(samples):,} samples has a class of its own, so none can be learned and "
                f"tested: is it the right target? To predict numbers: {numbers}"
            )
        raise DataError(
            "too few samples for a test part: five of one class or client, or test samples, are needed"
        )
    return samples.take(~is_test), samples.take(is_test), f"{how}: {int(is_test.sum()):,}"


def held_out_of_groups(group: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A mask of the test samples: a fifth of each group, evenly over its classes, and one of two or more.

    A class keeps at least one train sample in some group.
    """
    order = np.lexsort((y, group))
    size = np.bincount(group)[group]
    first = np.searchsorted(group[order], group)
    rank = np.empty(len(group), np.int64)
    rank[order] = np.arange(len(group))
    rank -= first
    count = np.where(size > 1, np.maximum(size // 5, 1), 0)
    shift = size // 2  # so that small groups do not always lose their last class
    position = (rank + shift) % size
    is_test: NDArray[np.bool_] = (position + 1) * count // size > position * count // size
    is_test[np.isin(y, np.setdiff1d(y[is_test], y[~is_test]))] = False
    return is_test


def held_out(y: NDArray[np.int64], part: int, whole: int) -> NDArray[np.bool_]:
    """A mask of the test samples: `part` of every `whole` successive samples of a class, evenly spaced."""
    rank = rank_within_class(y)
    is_test: NDArray[np.bool_] = (rank + 1) * part // whole > rank * part // whole
    return is_test


def rank_within_class(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every sample, the number of samples of its class before it."""
    order = np.argsort(y, kind="stable")
    rank = np.empty(len(y), dtype=np.int64)
    rank[order] = np.arange(len(y)) - np.searchsorted(y[order], y[order])
    return rank
