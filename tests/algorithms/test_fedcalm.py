"""FedCALM: conflicts are taken out layer by layer, and every client gains."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from copfl.algorithms import FedAvg
from copfl.algorithms.fedcalm import FedCALM, Server, resolved
from copfl.core import Task, tree
from copfl.parts.averaging import Upload, layers
from copfl.testing import small_federation
from tests.algorithms.chain import numbers, vector
from tests.toys import rounds_of, slopes


def coefficients(*updates: tuple[float, ...], margin: float = 0.0, limit: float = 0.0) -> Tensor:
    rows = torch.tensor(updates, dtype=torch.float64)
    return resolved((rows @ rows.T)[None], margin, limit)[0]


def test_a_conflict_is_projected_away_by_hand() -> None:
    """<u1, u2> = -1, |u1|^2 = 4, |u2|^2 = 1: u1 gains one u2, u2 gains a quarter of u1, and the mean is of both."""
    assert coefficients((2.0, 0.0), (-0.5, 0.75**0.5)).tolist() == numbers((1 + 0.25) / 2, (1 + 1) / 2)


def test_three_clients_one_after_the_other() -> None:
    """u1 = (1, 0), u2 = (-1, 1), u3 = (0, -1): what is left of u1 after u2 is held against u3, too."""
    one = (1.0, 0.0), (-1.0, 1.0), (0.0, -1.0)
    left = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    left[0] = vector(0.5, 0.5) - (-0.5 / 1) * vector(0.0, -1.0)  # u1 is off u2 now, but against u3
    left[1] = vector(0.0, 1.0) - (-1.0 / 1) * vector(0.0, -1.0)  # u2 is off u1, and against u3
    left[2] = vector(0.0, -1.0) - (-1.0 / 2) * vector(-1.0, 1.0)  # u3 is at peace with u1, against u2
    torch.testing.assert_close(coefficients(*one) @ torch.tensor(one, dtype=torch.float64), left.mean(0))


def test_without_conflict_it_is_the_mean() -> None:
    assert coefficients((1.0, 0.0), (0.5, 0.5), (2.0, 0.0), limit=1.0).tolist() == numbers(
        1 / 3, 1 / 3, 1 / 3
    )


@pytest.mark.parametrize(("limit", "step"), [(0.25, -0.25), (1.0, -0.75), (50.0, -0.75)])
def test_who_gains_when_not_everybody_can(limit: float, step: float) -> None:
    """u1 = 1 and u2 = -2 leave nothing of each other. Of 1/2 d^2 + limit * (0.75 - d)+ + limit * (1.5 + 2 d)+, the
    second slack weighs twice: the step follows u2, up to the limit, or until u2 has its gain of 1.5.
    """
    updates = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert float(coefficients((1.0,), (-2.0,)) @ updates) == 0
    found = coefficients((1.0,), (-2.0,), margin=0.5, limit=limit)
    assert float(found @ updates) == pytest.approx(step, abs=1e-9)


@given(st.integers(2, 6), st.integers(0, 2**31))
def test_everybody_gains_where_that_is_possible(clients: int, seed: int) -> None:
    """Independent updates leave room for all, if the limit does."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(clients, 40, dtype=torch.float64, generator=draw) - torch.randn(
        40, dtype=torch.float64, generator=draw
    )
    rows[0] *= -1
    step = resolved((rows @ rows.T)[None], 0.1, 1e6)[0] @ rows
    lengths = rows.norm(dim=1)
    assert (rows @ step >= 0.1 * lengths * lengths.mean() - 1e-6).all()


def server_after(algorithm: FedCALM, task: Task, ids: list[int], weights: list[Tensor]) -> Server:
    server = algorithm.server_init(task, 4)
    size = torch.ones((), dtype=torch.float64)
    parts = [
        algorithm.summand(task, server, torch.tensor(i), Upload(w, size))
        for i, w in zip(ids, weights, strict=True)
    ]
    return algorithm.server_update(task, server, reduce(tree.add, parts))[0]


def test_only_those_who_reported_count_and_by_their_own_row() -> None:
    task = slopes(1.0, 1.0)
    server = server_after(FedCALM(limit=0.0), task, [3, 1], [vector(3.0, 1.0), vector(0.5, 1 + 0.75**0.5)])
    u = vector(2.0, 0.0), vector(-0.5, 0.75**0.5)
    torch.testing.assert_close(server.w, vector(1.0, 1.0) + 0.625 * u[0] + 1.0 * u[1])
    assert server.weights.tolist() == numbers(0.0, 1.0, 0.0, 0.625)


def test_layers_are_judged_apart() -> None:
    """The updates agree in one layer and conflict in the other: only there is anything taken away."""
    task, _ = small_federation("none", (4, 4))
    (start, stop, _), (begin, end, _) = layers(task, ())[0], layers(task, ())[-1]
    first = FedCALM().server_init(task, 4).w
    u1, u2 = torch.zeros_like(first), torch.zeros_like(first)
    u1[start:stop], u2[start:stop] = 1.0, 3.0
    u1[begin:end], u2[begin:end] = 1.0, -1.0
    step = server_after(FedCALM(limit=0.0), task, [0, 1], [first + u1, first + u2]).w - first
    torch.testing.assert_close(step[start:stop], torch.full_like(step[start:stop], 2.0))
    torch.testing.assert_close(step[begin:end], torch.zeros_like(step[begin:end]))


def test_with_one_opinion_it_is_fedavg() -> None:
    task, federation = small_federation("none", (6,))
    calm, _ = rounds_of(FedCALM(), task, federation, 3, batch=4)
    mean, _ = rounds_of(FedAvg(), task, federation, 3, batch=4)
    torch.testing.assert_close(calm.server.w, mean.server.w, rtol=0, atol=1e-9)


def test_the_weights_of_the_clients_stay_with_the_server() -> None:
    server = Server(torch.zeros(3), torch.ones(2))
    assert FedCALM().downlink(server, torch.arange(2))._fields == ("w",)
