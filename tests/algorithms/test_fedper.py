"""FedPer: the head stays, the rest is FedAvg."""

from __future__ import annotations

import torch

from copfl.algorithms import FedAvg, FedPer
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import federation_of, rounds_of


def test_the_body_is_the_mean_by_samples_and_every_head_is_its_own() -> None:
    task = chain(1.0, 0.5)
    federation = federation_of(([[1.0]], [1]), ([[2.0]] * 3, [0] * 3))
    state, _ = rounds_of(FedPer(PLAIN), task, federation, 1, batch=3)
    first, second = off(0.5, 1), off(1.0, 0)
    bodies = 1.0 - LR * first * 0.5, 1.0 - LR * second * 0.5 * 2.0
    assert state.server.w.tolist() == numbers((1 * bodies[0] + 3 * bodies[1]) / 4)
    heads = state.clients.rows(torch.arange(2)).personal[:, 0]
    assert heads.tolist() == numbers(0.5 - LR * first * 1.0, 0.5 - LR * second * 2.0)


def test_a_head_lives_on_from_round_to_round() -> None:
    task = chain(1.0, 0.5)
    state, _ = rounds_of(FedPer(PLAIN), task, federation_of(([[1.0]], [1])), 2, batch=1)
    body, head = 1.0, 0.5
    for _ in range(2):
        miss = off(head * body, 1)
        body, head = body - LR * miss * head, head - LR * miss * body
    assert [*state.server.w.tolist(), *state.clients.rows(torch.arange(1)).personal[0].tolist()] == numbers(
        body, head
    )


def test_with_nothing_kept_it_is_fedavg() -> None:
    _, per, _ = three_rounds(FedPer(personal=()))
    _, avg, _ = three_rounds(FedAvg())
    assert torch.equal(per.server.w, avg.server.w)
    assert torch.equal(clients_of(per).personal, clients_of(avg).personal)


def test_more_layers_can_be_personal() -> None:
    task, state, _ = three_rounds(FedPer(personal=("head", "body.9")))
    assert state.server.w.numel() == task.d - int(task.where("head", "body.9").sum())
