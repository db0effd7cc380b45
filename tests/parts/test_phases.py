"""Two phases of training, step by step by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from copfl.core import Adam, Data, Optimizer, Sgd, begin, faster, fresh, task_of, train, tree
from copfl.core.batches import plan
from copfl.parts.mamo import Mamo
from copfl.parts.phases import Phases, fresh_head, head_then_body
from copfl.testing import small_federation
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector

DATA = samples((1.0, 1), (2.0, 0))


def test_the_body_trains_for_the_new_head() -> None:
    task = chain(1.0, 2.0)
    done = head_then_body(
        task,
        (faster(PLAIN, 3.0), PLAIN),
        task.initial,
        ((), ()),
        DATA,
        one_at_a_time([0], [1]),
        head_epochs=1,
    )
    head = 2.0 - 3 * LR * off(2.0, 1) * 1.0
    body = 1.0 - LR * off(head * 2.0, 0) * head * 2.0
    assert done.w.tolist() == numbers(body, head)
    assert (done.head_moments, done.body_moments) == ((), ())


def test_each_phase_counts_its_own_steps() -> None:
    task, adam = chain(1.0, 2.0), Adam(keep=True)
    moments = adam.init(task.initial[1:]), adam.init(task.initial)
    order = one_at_a_time([0, 1], [1], [0])
    done = head_then_body(task, (adam, adam), task.initial, moments, DATA, order, head_epochs=2)
    assert (int(done.head_moments.t), int(done.body_moments.t)) == (3, 1)


@pytest.mark.parametrize("optimizer", [Sgd(), Adam(lr=1e-2), Adam(lr=1e-2, keep=True), Mamo(lr=1e-2)])
def test_the_head_alone_moves_as_it_does_within_the_whole(optimizer: Optimizer) -> None:
    """As if the whole model were trained with the body frozen, its statistics going on, over batches with filling."""
    task, federation = small_federation("batch", (3, 8), "cpu")
    data = tree.row(federation.train.rows([0, 1]), 0)
    order = tree.row(plan(0, 0, [0, 1], [3, 8], batch=4, epochs=3), 0)
    state = begin(optimizer, fresh(optimizer, task), task.initial[: task.d])
    head, body = (task.where(name)[: task.d] for name in ("head", "body"))
    w, _, _ = train(task, optimizer, task.initial, state, data, order[:2], active=head)
    w, _, loss = train(task, optimizer, w, state, data, order[2:], active=body)
    moments = fresh_head(optimizer, task), fresh(optimizer, task)
    done = head_then_body(task, (optimizer, optimizer), task.initial, moments, data, order, head_epochs=2)
    torch.testing.assert_close(done.w, w, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(done.loss, loss)


@pytest.mark.parametrize("state_per_phase", [True, False])
def test_with_a_state_per_phase_the_first_adam_step_of_the_shared_phase_is_the_rate(
    state_per_phase: bool,
) -> None:
    """With one state, the means of the entry's first gradient are divided by the corrections of a later step.

    After one step of the personal phase they are 1 - 0.9^2 and 1 - 0.999^2, which makes 0.744 of the rate.
    """
    task, mask, adam = chain(1.0, 2.0), torch.tensor([True, False]), Adam(lr=0.01)
    for epochs, step in ((1, 0.1 / 0.19 * math.sqrt(1.999)), (2, 0.1 / 0.271 * math.sqrt(2.997001))):
        order = one_at_a_time([0] * epochs, [1])
        phases = Phases(state_per_phase=state_per_phase)
        done = phases.train(task, adam, task.initial, (), DATA, order, mask)
        expected = 0.01 if state_per_phase else 0.01 * step
        assert abs(float(done.w[1]) - 2.0) == pytest.approx(expected, rel=1e-6)


def test_a_head_without_parameters_learns_nothing() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.Identity())
    task = task_of(model, 2, head="2")
    data = Data(torch.rand(3, 4), torch.tensor([0, 1, 0]), torch.tensor(3))
    order = tree.row(plan(0, 0, [0], [3], batch=3, epochs=2), 0)
    done = head_then_body(task, (PLAIN, PLAIN), task.initial, ((), ()), data, order, head_epochs=1)
    assert not torch.equal(done.w, task.initial)


def test_both_phases_start_from_the_same_point() -> None:
    """The body is personal: it trains first, and then the head with the initial body."""
    task, mask = chain(1.0, 2.0), torch.tensor([True, False])
    order, state = one_at_a_time([0], [1]), PLAIN.init(task.initial)
    done = Phases().train(task, PLAIN, task.initial, state, DATA, order, mask)
    body = 1.0 - LR * off(2.0, 1) * 2.0
    head = 2.0 - LR * off(2.0 * 1.0 * 2.0, 0) * 1.0 * 2.0
    assert done.w.tolist() == numbers(body, head)
    assert done.update.tolist() == (vector(1.0, 2.0) - done.w).tolist()
