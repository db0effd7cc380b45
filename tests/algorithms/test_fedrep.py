"""FedRep: head first, body second, never both."""

from __future__ import annotations

import torch

from copfl.algorithms import FedRep
from copfl.core.optim import Adam
from copfl.parts import Mamo
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples
from tests.algorithms.updates import clients_of, output_of, three_rounds


def test_the_body_steps_for_the_head_that_was_just_fitted() -> None:
    task, data = chain(2.0, 0.5), samples((1.0, 1), (3.0, 0))
    plan = one_at_a_time([0], [1], [0])
    output = output_of(FedRep(PLAIN, epochs=1, head_epochs=2), task, data, plan)
    head = 0.5
    for x, y in ((1.0, 1), (3.0, 0)):
        head -= LR * off(head * 2.0 * x, y) * 2.0 * x
    body = 2.0 - LR * off(head * 2.0 * 1.0, 1) * head * 1.0
    assert output.client.personal.tolist() == numbers(head)
    assert output.upload.w.tolist() == numbers(body)
    assert output.trained.tolist() == numbers(body, head)


def test_the_first_body_step_of_adam_is_a_first_step() -> None:
    """One step count for both phases would make it 3.2 times as long."""
    task, data = chain(2.0, 0.5), samples((1.0, 1))
    for optimizer in (Adam(lr=0.01), Adam(lr=0.01, keep=True), Mamo(lr=0.01)):
        output = output_of(FedRep(optimizer, head_epochs=12), task, data, one_at_a_time(*[[0]] * 13))
        torch.testing.assert_close(
            output.upload.w, torch.tensor([2.01], dtype=torch.float64), rtol=0, atol=1e-8
        )


def test_each_phase_keeps_moments_of_its_own() -> None:
    task, state, _ = three_rounds(FedRep(Adam(keep=True), head_epochs=1))
    clients, head = clients_of(state), task.where("head")[: task.d]
    assert clients.head_moments.u.shape == (4, int(head.sum()))
    assert clients.head_moments.u.any()
    assert not clients.body_moments.u[:, head].any()
    assert clients.body_moments.u[:, ~head].any()


def test_without_head_epochs_the_head_stays() -> None:
    task, state, _ = three_rounds(FedRep(head_epochs=0), norm="none")
    head = task.initial[task.where("head")]
    assert torch.equal(clients_of(state).personal, head.expand(4, -1))
