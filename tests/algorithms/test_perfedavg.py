"""Per-FedAvg: the gradient is taken one step ahead, the step from where one stands."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import FedAvg, PerFedAvg
from copfl.core.batches import plan
from copfl.core.optim import Adam, Sgd
from copfl.core.tree import row
from copfl.testing import SIZES, small_federation
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples
from tests.algorithms.updates import output_of


def step(w: list[float], rate: float, x: float, y: int, at: list[float]) -> list[float]:
    """w after one step with the gradient taken at another point."""
    body, head = at
    miss = off(head * body * x, y)
    return [w[0] - rate * miss * head * x, w[1] - rate * miss * body * x]


def test_the_outer_gradient_is_taken_after_the_inner_step() -> None:
    task, data = chain(2.0, 0.5), samples((1.0, 1), (3.0, 0))
    output = output_of(PerFedAvg(PLAIN, inner_rate=0.2), task, data, one_at_a_time([0, 1], [1, 0]))
    w = first = [2.0, 0.5]
    for (x, y), (later_x, later_y) in (((1.0, 1), (3.0, 0)), ((3.0, 0), (1.0, 1))):
        w = step(w, LR, later_x, later_y, at=step(w, 0.2, x, y, at=w))
    assert output.upload.w.tolist() == numbers(*w)
    assert output.trained.tolist() == numbers(
        *step(first, 0.2, 1.0, 1, at=first)
    )  # the global model, adapted once


def test_a_client_may_adapt_by_more_steps() -> None:
    task, data = chain(2.0, 0.5), samples((1.0, 1), (3.0, 0))
    output = output_of(
        PerFedAvg(PLAIN, inner_rate=0.2, tune_steps=3), task, data, one_at_a_time([0, 1], [1, 0])
    )
    w = [2.0, 0.5]
    for x, y in ((1.0, 1), (3.0, 0), (1.0, 1)):
        w = step(w, 0.2, x, y, at=w)
    assert output.trained.tolist() == numbers(*w)


@pytest.mark.job
def test_without_an_inner_step_it_is_fedavg_on_every_second_pass() -> None:
    task, federation = small_federation("batch", SIZES)
    for optimizer in (Sgd(), Adam(keep=True)):
        both = plan(0, 0, list(range(4)), federation.train.sizes, batch=4, epochs=4, augment=True)
        for client in range(4):
            data, order = row(federation.train.rows(list(range(4))), client), row(both, client)
            ahead = output_of(PerFedAvg(optimizer, 2, inner_rate=0.0), task, data, order)
            plain = output_of(FedAvg(optimizer, 2), task, data, order[1::2])
            assert torch.equal(ahead.upload.w, plain.upload.w)
            assert torch.equal(ahead.client.personal, plain.client.personal)
            assert torch.equal(ahead.trained[: task.d], task.initial[: task.d])
