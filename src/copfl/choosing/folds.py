"""The rows that are held out: the same for every candidate, and the rivals' own folds at each site."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from copfl.data.clients.partition import Partition, hold_out
from copfl.data.samples import Dataset
from copfl.rivals.effort import FOLDS
from copfl.rivals.estimators import folds_of, seed_of_site
from copfl.rivals.records import Array
from copfl.settings.schema import SELECTION

MANY_ROWS = 5_000  # of the federation: from here on one fold tells enough
# Held-out rows from which one fold tells the rounds of a network; with fewer, the loss is a mean over several folds.
ENOUGH = 500
MOST_BY_STEPS = 3  # folds at first of what trains by steps, which takes longest
NOWHERE = -1  # the fold of a row that nothing is trained on, nor held out


class Folds(NamedTuple):
    whole: Partition
    of: tuple[Array, ...]  # the fold of each of a client's training rows
    number: int  # folds that are held out, from the first; the others are always trained on

    @property
    def by_steps(self) -> int:
        """The folds at first of what trains by steps."""
        rows = sum(map(len, self.of)) / FOLDS
        return min(self.number, MOST_BY_STEPS, max(1, math.ceil(ENOUGH / max(rows, 1))))

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
        trained = [~mask & (of_client != NOWHERE) for mask, of_client in zip(masks, self.of, strict=True)]
        rows = self.whole.train
        return dataclasses.replace(
            self.whole,
            train=tuple(own[mask] for own, mask in zip(rows, trained, strict=True)),
            test=tuple(own[mask] for own, mask in zip(rows, masks, strict=True)),
            validation=(),
            test_from="train",
        )


def folds(whole: Partition, samples: Dataset, seed: int) -> Folds:
    """The folds of a federation: within sites; what belongs together is in one fold; by time where rows have one.

    Args:
        whole: Whose training rows are divided.
        samples: The rows.
        seed: Of the run.
    """
    units, y, rows = samples.train.unit, np.asarray(samples.train.y), whole.train
    number = FOLDS if sum(map(len, rows)) < MANY_ROWS else 1
    if samples.train.time is not None:  # what is held out is later than the rest, so there is one fold
        parts = hold_out(whole, SELECTION, samples, seed)
        of = tuple(
            np.where(np.isin(own, test), 0, np.where(np.isin(own, train), 1, NOWHERE))
            for own, train, test in zip(rows, parts.train, parts.test, strict=True)
        )
        return Folds(whole, of, 1)
    everything = np.concatenate(rows)
    if len(np.unique(everything)) < len(
        everything
    ):  # what several sites have is in the same fold at all of them
        known = np.unique(everything)
        of_known = folds_of(len(known), seed, None if units is None else units[known])
        return Folds(whole, tuple(of_known[np.searchsorted(known, own)] for own in rows), number)
    of = tuple(folds_of_site(y[own], seed, None if units is None else units[own]) for own in rows)
    return Folds(whole, of, number)


def folds_of_site(y: Array, seed: int, unit: Array | None) -> Array:
    """The fold of each of a site's training rows, which it draws by itself.

    Args:
        y: Their targets.
        seed: Of the run.
        unit: What belongs together; None: each row is alone.
    """
    return folds_of(len(y), seed_of_site(seed, y), unit)
