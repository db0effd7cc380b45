"""Two phases of training, step by step by hand."""

from __future__ import annotations

import pytest
import torch

from copfl.optim import Adam, faster
from copfl.parts.phases import head_then_body, personal_then_shared
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector

DATA = samples((1.0, 1), (2.0, 0))


def test_the_body_trains_for_the_new_head() -> None:
    task = chain(1.0, 2.0)
    done = head_then_body(
        task, (faster(PLAIN, 3.0), PLAIN), task.first, ((), ()), DATA, one_at_a_time([0], [1]), head_epochs=1
    )
    head = 2.0 - 3 * LR * off(2.0, 1) * 1.0
    body = 1.0 - LR * off(head * 2.0, 0) * head * 2.0
    assert done.w.tolist() == numbers(body, head)
    assert (done.head_moments, done.body_moments) == ((), ())


def test_each_phase_counts_its_own_steps() -> None:
    task, adam = chain(1.0, 2.0), Adam(keep=True)
    moments = adam.init(task.first), adam.init(task.first)
    plan = one_at_a_time([0, 1], [1], [0])
    done = head_then_body(task, (adam, adam), task.first, moments, DATA, plan, head_epochs=2)
    assert (int(done.head_moments.t), int(done.body_moments.t)) == (3, 1)


@pytest.mark.parametrize("restart", [True, False])
def test_halves_from_one_start_or_one_after_the_other(restart: bool) -> None:
    """The body is personal: it trains first, and the head with the body as it was, or as it is now."""
    task, mask = chain(1.0, 2.0), torch.tensor([True, False])
    done = personal_then_shared(
        task, PLAIN, task.first, PLAIN.init(task.first), DATA, one_at_a_time([0], [1]), mask, restart
    )
    body = 1.0 - LR * off(2.0, 1) * 2.0
    seen = 1.0 if restart else body
    head = 2.0 - LR * off(2.0 * seen * 2.0, 0) * seen * 2.0
    assert done.w.tolist() == numbers(body, head)
    assert done.update.tolist() == (vector(1.0, 2.0) - done.w).tolist()
