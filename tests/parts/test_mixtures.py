"""Mixtures of models: values by hand, and derivatives against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from copfl.core import Batch, Experts, Sgd, Task, descend
from copfl.parts.mixtures import MIXTURES, Logs, even, fallen, losses, losses_of_halves, mixture, shares
from tests.algorithms.chain import chain, samples, vector

DATA = samples((1.0, 1), (-2.0, 0), (0.5, 0))
ALL = Batch(torch.arange(3), None, None, None)
V, W, SHARE = vector(1.0, 0.5), vector(-0.5, 2.0), torch.tensor(0.3, dtype=torch.float64)


def loss_of(task: Task, kind: str, v: Tensor, share: Tensor) -> float:
    return float(task.evaluate(MIXTURES[kind].personal_model(task, v, W, share), DATA)[0])


def test_what_predicts() -> None:
    task = chain(1.0, 1.0)
    both = MIXTURES["predictions"].personal_model(task, V, W, SHARE)
    assert isinstance(both, Experts)
    assert both.w.tolist() == [V.tolist(), W.tolist()]
    assert both.share.tolist() == pytest.approx([0.3, 0.7])
    one = MIXTURES["weights"].personal_model(task, V, W, SHARE)
    assert isinstance(one, Tensor)
    assert one.tolist() == pytest.approx([0.3 - 0.35, 0.15 + 1.4])


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_slope_is_the_derivative_by_the_share(kind: str) -> None:
    task, step = chain(1.0, 1.0), 1e-5
    slope = float(MIXTURES[kind].slope(task, V, W, SHARE, DATA, ALL))
    rise = loss_of(task, kind, V, SHARE + step) - loss_of(task, kind, V, SHARE - step)
    assert slope == pytest.approx(rise / (2 * step), rel=1e-6)


@pytest.mark.parametrize("kind", MIXTURES)
def test_v_descends_the_mixtures_loss(kind: str) -> None:
    task, step = chain(1.0, 1.0), 1e-5
    how = MIXTURES[kind].options(task, W, SHARE, DATA, ALL)
    optimizer = Sgd(lr=1.0, momentum=0.0, weight_decay=0.0)
    moved, _, _ = descend(task, optimizer, V, optimizer.init(V), DATA, (ALL,), **how)
    for entry in range(2):
        nudge = torch.zeros_like(V)
        nudge[entry] = step
        rise = loss_of(task, kind, V + nudge, SHARE) - loss_of(task, kind, V - nudge, SHARE)
        assert float((V - moved)[entry]) == pytest.approx(rise / (2 * step), rel=1e-6)


def test_a_mixture_by_hand() -> None:
    """Probabilities 1/2 and 1/4 with weights 0.8 and 0.2."""
    of_v, of_w = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    mixed = mixture(chain(1.0, 1.0), of_v, of_w, torch.tensor(0.8).double()).exp()
    assert mixed.tolist() == [pytest.approx([0.8 * 0.5 + 0.2 * 0.25, 0.8 * 0.5 + 0.2 * 0.75])]


# -- weights that fall with the loss

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
