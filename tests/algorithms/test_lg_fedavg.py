"""LG-FedAvg: the head travels, the rest stays."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import FedPer, LGFedAvg
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import federation_of, rounds_of


def test_the_head_is_the_mean_by_samples_and_every_body_is_its_own() -> None:
    task = chain(1.0, 0.5)
    federation = federation_of(([[1.0]], [1]), ([[2.0]] * 3, [0] * 3))
    state, _ = rounds_of(LGFedAvg(PLAIN), task, federation, 1, batch=3)
    first, second = off(0.5, 1), off(1.0, 0)  # s = 0.5 * 1 * x
    heads = 0.5 - LR * first * 1.0, 0.5 - LR * second * 2.0
    assert state.server.w.tolist() == numbers((1 * heads[0] + 3 * heads[1]) / 4)
    bodies = state.clients.rows(torch.arange(2)).personal[:, 0]
    assert bodies.tolist() == numbers(1.0 - LR * first * 0.5, 1.0 - LR * second * 0.5 * 2.0)


def test_lg_fedavg_shares_exactly_what_fedper_keeps() -> None:
    task, lg, _ = three_rounds(LGFedAvg())
    _, per, _ = three_rounds(FedPer())
    head = int(task.where("head").sum())
    assert (lg.server.w.numel(), per.server.w.numel()) == (head, task.d - head)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_the_statistics_stay_with_the_body(buffers: str) -> None:
    task, state, _ = three_rounds(LGFedAvg(), buffers=buffers)
    assert state.server.w.numel() == int(task.where("head").sum())
    assert clients_of(state).personal[:, -1].unique().numel() == 4
