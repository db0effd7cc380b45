"""Exponential weights, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from copfl.parts.experts import Logs, even, fallen, losses, losses_of_halves, shares
from tests.algorithms.chain import chain, samples, vector

THERE = torch.tensor([True, False])


def test_at_first_everybody_counts_the_same_but_empty_places() -> None:
    logs = even(vector(1.0), 2)
    assert shares(logs, torch.tensor([True, True])).tolist() == pytest.approx([1 / 4] * 4)
    assert shares(logs, THERE).tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 2, 0])


def test_weights_fall_with_the_loss() -> None:
    logs = fallen(even(vector(1.0), 2), vector(1.0, 2.0, 3.0, 0.0), vector(4.0, 0.0), rate=0.5)
    assert [part.tolist() for part in logs] == [[-0.5, -1.0], [-1.5, 0.0], [-2.0, 0.0]]
    c, a = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-0.5))
    assert shares(logs, THERE).tolist() == pytest.approx([c * a, c * (1 - a), 1 - c, 0])


def test_losses_of_each_and_of_both_halves() -> None:
    """On one sample (1, class 1) the models' probabilities are sigma(h b)."""
    task, w = chain(1.0, 1.0), torch.stack([vector(1.0, s) for s in (0.0, 2.0, -1.0, 5.0)])
    logs = Logs(vector(math.log(3), 0.0), vector(0.0, 0.0), vector(0.0, 0.0))
    data = samples((1.0, 1))
    right = [1 / (1 + math.exp(-s)) for s in (0.0, 2.0, -1.0, 5.0)]
    assert losses(task, w, data).tolist() == pytest.approx([-math.log(p) for p in right])
    assert losses_of_halves(task, w, logs, THERE, data).tolist() == pytest.approx(
        [-math.log(0.75 * right[0] + 0.25 * right[1]), -math.log(right[2])]
    )
