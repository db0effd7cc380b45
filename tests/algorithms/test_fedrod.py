"""FedRoD: two heads on one body, by hand on the chain h * b * x, and its laws."""

from __future__ import annotations

import math

import pytest
import torch

from copfl.algorithms import FedPer, FedRoD
from copfl.algorithms.fedrod import balanced_softmax
from copfl.core import UsageError
from copfl.testing import other_federation
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector
from tests.algorithms.updates import clients_of, output_of, three_rounds
from tests.toys import slopes


def test_two_steps_by_hand() -> None:
    """Two samples of class 1, one of class 0: the shared logit of class 1 gets log 2 more than class 0's log 1."""
    task, pairs = chain(1.0, 0.5), ((1.5, 1), (-0.5, 0), (1.0, 1))
    output = output_of(FedRoD(PLAIN), task, samples(*pairs), one_at_a_time([0, 1]))
    body, head, personal = 1.0, 0.5, 0.0
    for x, y in pairs[:2]:
        shared_miss = off(head * body * x + math.log(2), y)
        personal_miss = off((head + personal) * body * x, y)
        step = personal_miss * body * x  # of the personal head alone: the body knows nothing of it
        body, head, personal = (
            body - LR * shared_miss * head * x,
            head - LR * shared_miss * body * x,
            personal - LR * step,
        )
    assert output.upload.w.tolist() == numbers(body, head)
    assert output.client.head.tolist() == numbers(personal)
    assert output.trained.tolist() == numbers(body, head + personal)


def test_a_new_client_predicts_with_the_shared_head() -> None:
    task, algorithm = chain(1.0, 0.5), FedRoD(PLAIN)
    down = algorithm.downlink(algorithm.server_init(task, 1), torch.tensor([0]))
    model = algorithm.personal_model(task, algorithm.client_init(task), type(down)(down.w[0]))
    assert torch.equal(model, vector(1.0, 0.5))


def test_balanced_softmax_by_hand() -> None:
    """Three samples of class 0, one of class 1: -log(3 e^a / (3 e^a + e^b)); class 1 is 3 times as rare."""
    task = chain(1.0, 1.0)
    objective = balanced_softmax(task, samples((1.0, 0), (1.0, 0), (1.0, 0), (1.0, 1)))
    logits = torch.tensor([[0.2, 0.7]], dtype=torch.float64)
    expected = -math.log(math.exp(0.7) / (3 * math.exp(0.2) + math.exp(0.7)))
    assert objective(logits, logits, torch.tensor([1]), None).item() == pytest.approx(expected)


def test_a_class_without_samples_has_no_gradient() -> None:
    task = chain(1.0, 1.0)
    objective = balanced_softmax(task, samples((1.0, 0), (2.0, 0)))
    logits = torch.tensor([[0.2, 0.7]], dtype=torch.float64, requires_grad=True)
    objective(logits, logits, torch.tensor([0]), None).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-8


def test_the_personal_heads_stay_and_differ() -> None:
    task, state, _ = three_rounds(FedRoD())
    heads = clients_of(state).head
    assert state.server.w.shape == task.initial[: task.d].shape  # the shared head is averaged too
    assert all(not torch.equal(heads[0], other) for other in heads[1:])
    assert clients_of(three_rounds(FedPer())[1]).personal.shape[1] > heads.shape[1]  # statistics, and a head


def test_a_task_without_classes_is_refused() -> None:
    with pytest.raises(UsageError, match="fedrod balances the loss over classes"):
        FedRoD().server_init(other_federation("regression")[0], 2)
    assert FedRoD().server_init(slopes(1.0), 2).w.shape == (1,)
