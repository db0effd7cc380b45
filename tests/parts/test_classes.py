"""Class statistics by hand, and without the samples that only fill up space."""

from __future__ import annotations

import torch

from copfl.parts.classes import class_sums
from copfl.task import Data
from tests.algorithms.chain import chain, samples


def test_sums_by_hand() -> None:
    """The features are twice the samples: 2 and 6 in class 0, 4 in class 1."""
    task = chain(2.0, 0.5)
    sums = class_sums(task, task.first, samples((1.0, 0), (3.0, 0), (2.0, 1)))
    assert sums.features.tolist() == [[8.0], [4.0]]
    assert sums.counts.tolist() == [2.0, 1.0]
    assert float(sums.squares) == 4 + 36 + 16


def test_what_is_not_real_does_not_count() -> None:
    task, (x, y, _) = chain(2.0, 0.5), samples((1.0, 0), (3.0, 0), (2.0, 1))
    sums = class_sums(task, task.first, Data(x, y, torch.tensor(1)))
    assert sums.features.tolist() == [[2.0], [0.0]]
    assert sums.counts.tolist() == [1.0, 0.0]
    assert float(sums.squares) == 4
