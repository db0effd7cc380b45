"""FedBN: norms stay, with their statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from copfl.algorithms import FedAvg, FedBN
from copfl.core.task import task_of
from tests.algorithms.chain import LR, PLAIN, numbers, off
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import federation_of, rounds_of


class Scaled(nn.Module):
    """A head on a layer norm of two inputs: (2, 0) becomes about (1, -1), times the norm's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(2, eps=0.0), nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.head.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.norm(x))
        return torch.cat([torch.zeros_like(answer), answer], 1)


def test_scale_and_shift_are_each_clients_own_and_the_rest_is_the_mean() -> None:
    task = task_of(Scaled(), 2, dtype=torch.float64)  # w = [scale, scale, shift, shift, head, head]
    federation = federation_of(([[2.0, 0.0]], [1]), ([[0.0, 2.0]] * 3, [0] * 3))
    state, _ = rounds_of(FedBN(PLAIN), task, federation, 1, batch=3)
    one, two = off(0.0, 1), off(0.0, 0)  # the two normalised inputs cancel: s = 0
    head = [(1 * (0.5 - LR * one * sign) + 3 * (0.5 + LR * two * sign)) / 4 for sign in (1, -1)]
    assert state.server.w.tolist() == numbers(*head)
    own = state.clients.rows(torch.arange(2)).personal
    for row, miss, sign in zip(own, (one, two), (1, -1), strict=True):
        scales = [1 - LR * miss * 0.5 * sign, 1 + LR * miss * 0.5 * sign]
        assert row.tolist() == numbers(*scales, -LR * miss * 0.5, -LR * miss * 0.5)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_the_statistics_belong_to_the_norm(buffers: str) -> None:
    task, state, _ = three_rounds(FedBN(), buffers=buffers)
    assert state.server.w.numel() == task.d - int(task.where("norms").sum())
    assert clients_of(state).personal.shape[1] == int(task.where("norms", "buffers").sum())
    assert (clients_of(state).personal.std(0) > 0).all()


def test_a_model_without_norms_makes_it_fedavg() -> None:
    _, bn, _ = three_rounds(FedBN(), norm="none")
    _, avg, _ = three_rounds(FedAvg(), norm="none")
    assert torch.equal(bn.server.w, avg.server.w)
