"""Ditto: two models a client, one pulled towards the global model of the other."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import Ditto, FedAvg, Local
from copfl.core.optim import Sgd
from tests.algorithms.chain import PLAIN, chain, numbers, one_at_a_time, samples, steps, vector
from tests.algorithms.updates import clients_of, down_of, output_of, three_rounds

PAIRS = ((1.0, 1), (3.0, 0))


def test_the_personal_model_is_pulled_towards_the_broadcast_and_not_towards_the_trained_global_one() -> None:
    task, data = chain(0.0, 0.0), samples(*PAIRS)
    client = Ditto(PLAIN).client_init(task)._replace(v=vector(1.0, -1.0), started=torch.tensor(True))
    output = output_of(Ditto(PLAIN, lam=0.3), task, data, one_at_a_time([0, 1]), client, w=vector(2.0, 0.5))
    pulled = steps((1.0, -1.0), PAIRS, lam=0.3, anchor=(2.0, 0.5))
    assert output.trained.tolist() == numbers(*pulled)
    assert output.client.v.tolist() == numbers(*pulled)
    assert output.upload.w.tolist() == numbers(*steps((2.0, 0.5), PAIRS))  # same batches, no penalty


@pytest.mark.parametrize(("keep", "epochs", "personal_epochs"), [(False, 1, 2), (True, 2, 1)])
def test_without_a_pull_it_is_local_training_beside_fedavg(
    keep: bool, epochs: int, personal_epochs: int
) -> None:
    optimizer = Sgd(keep=keep)
    _, both, _ = three_rounds(Ditto(optimizer, epochs, lam=0.0, personal_epochs=personal_epochs))
    _, alone, _ = three_rounds(Local(optimizer, personal_epochs))
    _, together, _ = three_rounds(FedAvg(optimizer, epochs))
    assert torch.equal(clients_of(both).v, clients_of(alone).personal)
    assert torch.equal(both.server.w, together.server.w)
    assert torch.equal(clients_of(both).personal, clients_of(together).personal)


def test_the_global_half_is_fedavgs_whatever_the_pull() -> None:
    _, both, _ = three_rounds(Ditto(lam=5.0))
    _, together, _ = three_rounds(FedAvg())
    assert torch.equal(both.server.w, together.server.w)


def test_a_new_client_predicts_with_the_broadcast() -> None:
    task, algorithm = chain(1.0, 1.0), Ditto()
    down, client = down_of(algorithm, task, vector(5.0, 6.0)), algorithm.client_init(task)
    assert algorithm.personal_model(task, client, down).tolist() == [5.0, 6.0]
    assert algorithm.personal_model(task, client._replace(started=torch.tensor(True)), down).tolist() == [
        1.0,
        1.0,
    ]
