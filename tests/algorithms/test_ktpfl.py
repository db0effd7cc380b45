"""KT-pFL: lessons, answers and coefficients by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import copfl
from copfl.algorithms import KTpFL, Local
from copfl.algorithms.ktpfl import Down, Server, Total
from copfl.core import Sgd, Task, UsageError
from copfl.core.payload import nbytes
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.testing import small_federation
from tests.algorithms.chain import numbers, one_at_a_time, samples, vector
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import rounds_of, sigma, slopes

PLAIN = Sgd(0.5, 0.0, 0.0)


def public(task: Task, *x: float) -> Task:
    return dataclasses.replace(task, public=vector(*x)[:, None])


def test_a_turn_by_hand() -> None:
    """The softened answer to x is sigma(a x / T); the distance to the teacher falls by (sigma(a x / T) - t) x / T."""
    task, algorithm = public(slopes(1.0), 2.0, -1.0), KTpFL(PLAIN, temperature=4.0, batch=1)
    teacher = torch.tensor([[0.2, 0.8], [0.5, 0.5]], dtype=torch.float64)
    down, data = Down(teacher, torch.tensor(True)), samples((3.0, 0))
    with torch.no_grad():
        output = algorithm.client_update(task, algorithm.client_init(task), down, data, one_at_a_time([0]))
    a = 1.0
    for x, t in ((2.0, 0.8), (-1.0, 0.5)):
        a -= 0.5 * (sigma(a * x / 4) - t) * x / 4
    a -= 0.5 * sigma(a * 3.0) * 3.0
    assert output.client.w.tolist() == numbers(a)
    assert output.upload.answers[:, 1].tolist() == numbers(sigma(a * 2.0 / 4), sigma(-a / 4))


def test_without_a_teacher_it_is_local_training() -> None:
    task, federation = small_federation("batch", (5, 9, 3))
    first, _ = rounds_of(KTpFL(Sgd(lr=0.1)), task, federation, 1, batch=4)
    alone, _ = rounds_of(Local(Sgd(lr=0.1)), task, federation, 1, batch=4)
    everybody = torch.arange(3)
    torch.testing.assert_close(
        first.clients.rows(everybody).w, alone.clients.rows(everybody).personal, rtol=0, atol=1e-12
    )
    second, _ = rounds_of(KTpFL(Sgd(lr=0.1)), task, federation, 2, batch=4)
    alone, _ = rounds_of(Local(Sgd(lr=0.1)), task, federation, 2, batch=4)
    assert not torch.allclose(second.clients.rows(everybody).w, alone.clients.rows(everybody).personal)


def test_the_coefficients_take_one_step_by_hand() -> None:
    """Two clients whose answers differ by u in every entry: the loss of c_1 is 2 u^2 c_12^2 and a penalty."""
    task, algorithm = public(slopes(0.0), 1.0), KTpFL(penalty=0.1)
    answers = torch.tensor([[[0.4, 0.6]], [[0.7, 0.3]]], dtype=torch.float64)  # u = 0.3
    server, metrics = algorithm.server_update(
        task, algorithm.server_init(task, 2), Total(answers, vector(1.0, 1.0))
    )
    # The slope of row 1 at (1/2, 1/2) is (-u^2, u^2), its steepest change 2 u^2 + 2 * penalty / 2.
    step = 0.3**2 / (2 * 0.3**2 + 0.1)
    first = min(1.0, 0.5 + step)
    torch.testing.assert_close(
        server.coefficients, torch.tensor([[first, 1 - first], [1 - first, first]], dtype=torch.float64)
    )
    torch.testing.assert_close(server.teachers[0], first * answers[0] + (1 - first) * answers[1])
    assert float(metrics["own_weight"]) == pytest.approx(first)


def test_at_its_defaults_the_coefficients_move() -> None:
    """Ten clients of which each is certain of its own class, softened: N c_nn becomes 1.45, all others 0.95."""
    task, algorithm = public(slopes(0.0), 1.0), KTpFL()
    logits = 5 * torch.eye(10, dtype=torch.float64)[:, None]  # [N, 1, C]
    answers = (logits / algorithm.temperature).softmax(2)
    server = algorithm.server_init(task, 10)._replace(answers=torch.zeros_like(answers))
    server, _ = algorithm.server_update(task, server, Total(answers, torch.ones(10, dtype=torch.float64)))
    # Two answers differ by +-u in two of the classes, so G = u^2 (1 - 1/N) is every curvature but that of the
    # sum. The slope of c_n at 1/N is -2 u^2 (e_n - 1/N), its curvature 2 u^2 + 2 rho / N.
    u = (math.exp(0.5) - 1) / (math.exp(0.5) + 9)
    own = 1 + 9 * u**2 / (u**2 + 0.7 / 10)
    assert (10 * server.coefficients.diagonal()).tolist() == pytest.approx([own] * 10)
    assert own == pytest.approx(1.453, abs=1e-3)


def test_in_a_run_the_coefficients_move() -> None:
    """The spread of N c is about that of the released rule, 0.12 to 0.23; 0 would switch the method off."""
    server = copfl.run(
        "ktpfl", "digits", rounds=5, optimizer="sgd", lr=0.1, batch=8, algorithm_options={"public": 50}
    ).state.server
    assert 0.1 < float((10 * server.coefficients).std()) < 0.3
    assert float(10 * server.coefficients.diagonal().min()) > 1.1


@pytest.mark.parametrize(("penalty", "start", "end"), [(1e6, 1.0, 0.25), (0.0, 0.25, 1.0)])
def test_the_penalty_decides_between_the_others_and_oneself(penalty: float, start: float, end: float) -> None:
    task, algorithm = public(slopes(0.0), 1.0, 2.0, 3.0, 4.0), KTpFL(penalty=penalty)
    draw = torch.Generator().manual_seed(0)
    answers = torch.rand(4, 4, 2, dtype=torch.float64, generator=draw).softmax(2)
    eye = torch.eye(4, dtype=torch.float64)
    server = algorithm.server_init(task, 4)._replace(coefficients=eye * start + (1 - eye) * (1 - start) / 3)
    for _ in range(200):
        server, _ = algorithm.server_update(task, server, Total(answers, torch.ones(4, dtype=torch.float64)))
    torch.testing.assert_close(server.coefficients, eye * end + (1 - eye) * (1 - end) / 3, atol=1e-3, rtol=0)


def test_rows_add_up_to_one_and_only_the_known_are_quoted() -> None:
    _, state, _ = three_rounds(KTpFL(penalty=0.01, temperature=1.0), participation=0.5)
    server: Server = state.server
    torch.testing.assert_close(server.coefficients.sum(1), torch.ones(4, dtype=torch.float64))
    assert (server.coefficients >= 0).all()
    assert not server.coefficients[:, ~server.known].any()
    torch.testing.assert_close(server.teachers.sum(2), torch.ones_like(server.teachers[..., 0]))


def test_who_did_not_take_part_is_quoted_with_the_last_answers() -> None:
    task, algorithm = public(slopes(0.0), 1.0), KTpFL()
    first = torch.tensor([[[0.4, 0.6]], [[0.7, 0.3]]], dtype=torch.float64)
    server, _ = algorithm.server_update(task, algorithm.server_init(task, 2), Total(first, vector(1.0, 1.0)))
    new = torch.tensor([[[0.1, 0.9]], [[0.0, 0.0]]], dtype=torch.float64)
    server, _ = algorithm.server_update(task, server, Total(new, vector(1.0, 0.0)))
    assert server.answers.tolist() == [[[0.1, 0.9]], [[0.7, 0.3]]]


def test_no_weight_ever_travels() -> None:
    task, state, shown = three_rounds(KTpFL())
    answers = torch.zeros(6, 4, dtype=torch.float64)  # six public samples, four classes
    assert shown[0].clients["bytes_up"].tolist() == [float(nbytes(answers))] * 4
    assert clients_of(state).w.shape == (4, task.layout.size)


def test_public_samples_are_those_that_no_client_holds() -> None:
    samples = Samples(np.arange(6.0)[:, None], np.array([0, 1, 0, 1, 0, 1]))
    held = np.array([0, 1]), np.array([3])
    federation = FederatedData(Dataset("toy", samples, samples, ("a", "b")), Partition(held, held, "by hand"))
    assert federation.unassigned(9).tolist() == [[2.0], [4.0], [5.0]]
    assert federation.unassigned(2).tolist() == [[2.0], [5.0]]
    validated = Partition(held, (np.array([4]), np.array([5])), "by hand", test_from="train")
    assert FederatedData(federation.dataset, validated).unassigned(9).tolist() == [[2.0]]


def test_a_run_sets_public_samples_aside() -> None:
    result = copfl.run("ktpfl", "digits", rounds=1, algorithm_options={"public": 20})
    assert result.state.server.answers.shape == (10, 20, 10)


def test_it_says_what_is_missing_without_public_samples() -> None:
    with pytest.raises(UsageError, match="public samples that no client holds"):
        KTpFL().server_init(slopes(0.0), 2)
