"""MR-MTL: own models, regularised towards their mean."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import MRMTL, Local
from copfl.core import Adam, Optimizer, Sgd
from tests.algorithms.chain import PLAIN, chain, numbers, one_at_a_time, samples, steps, vector
from tests.algorithms.updates import clients_of, down_of, output_of, three_rounds
from tests.toys import federation_of, rounds_of, sigma, slopes

PAIRS = ((1.0, 1), (3.0, 0))


def test_the_own_model_is_pulled_towards_the_mean_and_uploaded() -> None:
    task, data = chain(0.0, 0.0), samples(*PAIRS)
    client = MRMTL(PLAIN).client_init(task)._replace(w=vector(1.0, -1.0), started=torch.tensor(True))
    output = output_of(MRMTL(PLAIN, lam=0.3), task, data, one_at_a_time([0, 1]), client, w=vector(2.0, 0.5))
    pulled = steps((1.0, -1.0), PAIRS, lam=0.3, anchor=(2.0, 0.5))
    for found in (output.trained, output.client.w, output.upload.w):
        assert found.tolist() == numbers(*pulled)


def test_two_rounds_by_hand() -> None:
    """The model answers [0, a x]; a step with lr 1 from a ends in a + x sigma(-a x) - lam (a - mean)."""
    x, lam = (1.0, -3.0), 0.25
    federation = federation_of(([[x[0]]], [1]), ([[x[1]]] * 3, [1] * 3))  # unequal, and yet a plain mean
    state, _ = rounds_of(MRMTL(Sgd(1.0, 0.0, 0.0), lam=lam), slopes(0.0), federation, 2, batch=3)
    first = [a / 2 for a in x]  # from 0, which is the mean
    mean = sum(first) / 2
    second = [a + b * sigma(-a * b) - lam * (a - mean) for a, b in zip(first, x, strict=True)]
    assert state.clients.rows(torch.arange(2)).w[:, 0].tolist() == pytest.approx(second)
    assert float(state.server.w) == pytest.approx(sum(second) / 2)


@pytest.mark.parametrize("optimizer", [Sgd(), Adam(keep=True)])
def test_without_regularisation_it_is_local_training(optimizer: Optimizer) -> None:
    _, both, _ = three_rounds(MRMTL(optimizer, lam=0.0))
    _, alone, _ = three_rounds(Local(optimizer))
    assert torch.equal(clients_of(both).w, clients_of(alone).personal)


def test_the_clients_are_the_nearer_the_stronger_they_are_regularised() -> None:
    federation = federation_of(([[1.0]], [1]), ([[-3.0]], [1]))
    gaps = []
    for lam in (0.0, 0.1, 0.5):
        state, _ = rounds_of(MRMTL(Sgd(1.0, 0.0, 0.0), lam=lam), slopes(0.0), federation, 20)
        gaps.append(float(state.clients.rows(torch.arange(2)).w.diff(dim=0).abs()))
    assert gaps[0] > 1.5 * gaps[1] > 1.5 * gaps[2]


def test_a_new_client_predicts_with_the_mean() -> None:
    task, algorithm = chain(1.0, 1.0), MRMTL()
    down, client = down_of(algorithm, task, vector(5.0, 6.0)), algorithm.client_init(task)
    assert algorithm.personal_model(task, client, down).tolist() == [5.0, 6.0]
    trained = client._replace(started=torch.tensor(True))
    assert algorithm.personal_model(task, trained, down).tolist() == [1.0, 1.0]
