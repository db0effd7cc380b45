"""FedCE: contributions by hand, exact leave-one-out, and equal contributions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from copfl.algorithms import FedAvg, FedCE
from copfl.algorithms.fedce import Upload
from copfl.core import Sgd, UsageError, tree
from copfl.parts.cowa import cosine
from copfl.testing import small_federation
from tests.algorithms.chain import numbers, vector
from tests.toys import Vector, dot, federation_of, loss, rounds_of, slopes

# The model answers [0, a.x]; one step with lr 1 on a sample x with label 1 goes from a to a + x sigma(-a.x),
# and the loss is log(1 + exp(-a.x)).
A, B = (2.0, 1.0), (-0.5, 0.75)
PLAIN = Sgd(1.0, 0.0, 0.0)


def stepped(a: Vector, x: Vector) -> Vector:
    push = 1 / (1 + math.exp(dot(a, x)))
    return tuple(p + q * push for p, q in zip(a, x, strict=True))


def after(rounds: int, **how: Any) -> tuple[Any, Any]:
    task, federation = slopes(0.0, 0.0), federation_of(([A], [1]), ([B], [1]))
    state, _ = rounds_of(FedCE(PLAIN, **how), task, federation, rounds)
    return state.server, state.clients.rows(torch.arange(2))


def test_two_rounds_by_hand() -> None:
    """Without one of two clients, the model is the other's, and the step is the other's update."""
    a, b = stepped((0.0, 0.0), A), stepped((0.0, 0.0), B)
    mean = tuple((p + q) / 2 for p, q in zip(a, b, strict=True))
    server, clients = after(1, error="loss")
    assert server.w.tolist() == numbers(*mean), "the first round's weights are equal"
    assert not clients.measured.any()
    cosine_of_updates = dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))
    errors = loss(b, A), loss(a, B)
    server, clients = after(2, error="loss")
    assert clients.closeness.tolist() == numbers(cosine_of_updates, cosine_of_updates)
    assert clients.error.tolist() == numbers(*errors)
    weights = [(1 - cosine_of_updates) * error for error in errors]
    assert clients.weight[:, 0].tolist() == numbers(*weights)
    a, b = stepped(mean, A), stepped(mean, B)
    total = sum(weights)
    assert server.w.tolist() == numbers(
        *((weights[0] * p + weights[1] * q) / total for p, q in zip(a, b, strict=True))
    )


def test_the_error_is_what_accuracy_lacks() -> None:
    """B's model is wrong about A's sample: its error is 1. A's is wrong about B's."""
    _, clients = after(2)
    a, b = stepped((0.0, 0.0), A), stepped((0.0, 0.0), B)
    assert clients.error.tolist() == [float(dot(b, A) <= 0), float(dot(a, B) <= 0)]


def test_plus_normalises_each_score_before_it_adds() -> None:
    task, algorithm = slopes(0.0), FedCE(combine="plus")
    server = algorithm.server_init(task, 2)
    uploads = Upload(vector(1.0), vector(1.0, 6.0)), Upload(vector(5.0), vector(3.0, 2.0))
    parts = [algorithm.summand(task, server, torch.tensor(i), u) for i, u in enumerate(uploads)]
    server, _ = algorithm.server_update(task, server, tree.add(*parts))
    shares = (1 / 4 + 6 / 8) / 2, (3 / 4 + 2 / 8) / 2
    assert server.w.tolist() == numbers(shares[0] * 1.0 + shares[1] * 5.0)


@pytest.mark.parametrize("combine", ["times", "plus"])
def test_the_cosine_is_with_the_weighted_mean_of_the_others(combine: str) -> None:
    """In the third round three clients with unequal weights each find the rest of the step exactly."""
    task, federation = small_federation("none", (5, 9, 3))
    algorithm, everybody = FedCE(combine=combine, error="loss"), torch.arange(3)
    before, _ = rounds_of(algorithm, task, federation, 2, batch=4)
    clients = before.clients.rows(everybody)
    share = (clients.weight / clients.weight.sum(0)).mean(1)
    assert float(share.max() - share.min()) > 0.01
    updates = clients.seen - clients.sent
    then, _ = rounds_of(algorithm, task, federation, 3, batch=4)
    now = then.clients.rows(everybody)
    for n in range(3):
        others = [m for m in range(3) if m != n]
        step = (share[others, None] * updates[others]).sum(0)
        expected = (clients.closeness[n] + cosine(updates[n], step)) / 2  # the mean of two rounds
        torch.testing.assert_close(now.closeness[n], expected)
    assert now.measured.tolist() == [2.0, 2.0, 2.0]


def test_with_equal_contributions_it_is_the_plain_mean() -> None:
    task, federation = small_federation("batch", (6, 6, 6))
    equal, _ = rounds_of(FedCE(combine="equal"), task, federation, 3, batch=4)
    plain, _ = rounds_of(FedAvg(), task, federation, 3, batch=4)
    torch.testing.assert_close(equal.server.w, plain.server.w, rtol=0, atol=1e-12)


def test_one_client_alone_counts() -> None:
    task, federation = small_federation("none", (6,))
    alone, _ = rounds_of(FedCE(), task, federation, 3, batch=4)
    plain, _ = rounds_of(FedAvg(), task, federation, 3, batch=4)
    torch.testing.assert_close(alone.server.w, plain.server.w, rtol=0, atol=1e-12)


def test_unknown_readings_are_refused() -> None:
    with pytest.raises(UsageError, match='did you mean "times"'):
        FedCE(combine="time")
    with pytest.raises(UsageError, match="accuracy, loss"):
        FedCE(error="dice")
