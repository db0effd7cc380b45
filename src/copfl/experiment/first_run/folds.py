"""The rows that are held out: the same for every candidate, and the rivals' own folds at each site."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset
from copfl.rivals.effort import FOLDS
from copfl.rivals.estimators import folds_of, seed_of_site
from copfl.rivals.records import Array

MANY_ROWS = 5_000  # of the federation: from here on one fold tells enough


class Folds(NamedTuple):
    whole: Partition
    of: tuple[Array, ...]  # the fold of each of a client's training rows
    number: int  # folds that are held out, from the first; the others are always trained on

    def held_out(self, fold: int, client: int) -> Array:
        """[rows] bool: the rows of a client that this fold holds out; one row at least is left.

        Args:
            fold: Its number.
            client: Its number.
        """
        is_held = self.of[client] == fold
        return np.zeros_like(is_held) if is_held.all() else is_held

    def partition(self, fold: int) -> Partition:
        """The partition that tests on the rows of a fold.

        Args:
            fold: From 0.
        """
        masks = [self.held_out(fold, client) for client in range(len(self.of))]
        rows = self.whole.train
        return dataclasses.replace(
            self.whole,
            train=tuple(own[~mask] for own, mask in zip(rows, masks, strict=True)),
            test=tuple(own[mask] for own, mask in zip(rows, masks, strict=True)),
            validation=(),
            test_from="train",
        )


def folds(whole: Partition, samples: Dataset, seed: int) -> Folds:
    """The folds of a federation.

    Args:
        whole: Whose training rows are divided; no row is at two clients.
        samples: The rows.
        seed: Of the run.
    """
    units, y = samples.train.unit, np.asarray(samples.train.y)
    of = tuple(
        folds_of(len(rows), seed_of_site(seed, y[rows]), None if units is None else units[rows])
        for rows in whole.train
    )
    return Folds(whole, of, FOLDS if sum(map(len, whole.train)) < MANY_ROWS else 1)
