"""Fed-POE: weights that fall with each expert's loss, and experts that are FedAvg and local training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from copfl.algorithms import FedAvg, FedPOE, Local
from copfl.algorithms.fedpoe import Down
from copfl.core import Adam, Data, Optimizer, Sgd, tree
from copfl.testing import small_federation
from tests.algorithms.chain import numbers, vector
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import everything, federation_of, rounds_of, sigma, slopes

# The model answers [0, a x]: label 1 has the probability sigma(a x) and the loss -log(sigma(a x)).
PLAIN = Sgd(1.0, 0.0, 0.0)


def softmax(*logs: float) -> list[float]:
    total = sum(math.exp(log) for log in logs)
    return [math.exp(log) / total for log in logs]


def test_two_rounds_by_hand() -> None:
    """Each client trains on its first sample and weighs on its second; nothing is stored but the first model, 0."""
    rate, x, held = 2.0, (1.0, -3.0), (2.0, -1.0)
    federation = federation_of(([[x[0]], [held[0]]], [1, 1]), ([[x[1]], [held[1]]], [1, 1]))
    state, shown = rounds_of(
        FedPOE(PLAIN, rate=rate, stored=1, period=100, holdout=2), slopes(0.0), federation, 2, batch=2
    )
    # In the first round all experts are the model 0, whose loss is log 2: nothing tells them apart.
    assert shown[0].clients["local_weight"] == pytest.approx([0.25, 0.25])
    own = [0.0 + x[n] * sigma(0.0) for n in range(2)]
    mean = sum(own) / 2
    clients = state.clients.rows(torch.arange(2))
    for n in range(2):
        losses = [-math.log(sigma(a * held[n])) for a in (own[n], mean, 0.0)]
        pair = softmax(-rate * losses[0], -rate * losses[1])
        together = -math.log((sigma(own[n] * held[n]) + sigma(mean * held[n])) / 2)
        halves = softmax(-rate * together, -rate * losses[2])
        assert shown[1].clients["local_weight"][n] == pytest.approx(halves[0] * pair[0])
        assert shown[1].clients["global_weight"][n] == pytest.approx(halves[0] * pair[1])
        assert float(clients.local[n]) == pytest.approx(own[n] + x[n] * sigma(-own[n] * x[n]))
        assert clients.logs.bank[n].tolist() == numbers(-rate * (math.log(2) + math.log(2)))


def test_the_answer_is_the_mixture_of_the_probabilities() -> None:
    task, algorithm = slopes(0.0), FedPOE(stored=1, rate=1.0)
    client = algorithm.client_init(task)
    client = client._replace(
        local=vector(3.0),
        logs=client.logs._replace(pair=vector(0.0, -1.0), halves=vector(1.0, 0.0)),
        rounds=torch.ones_like(client.rounds),
    )
    down = Down(*algorithm.server_init(task, 1))._replace(w=vector(-1.0), bank=vector(2.0)[:, None])
    experts = algorithm.personal_model(task, client, down)
    halves, pair = softmax(1.0, 0.0), softmax(0.0, -1.0)
    shares = [halves[0] * pair[0], halves[0] * pair[1], halves[1]]
    assert experts.share.tolist() == numbers(*shares)
    answer = task.predict(experts, vector(1.0)[:, None]).exp()[0, 1]
    mixed = sum(share * sigma(a) for share, a in zip(shares, (3.0, -1.0, 2.0), strict=True))
    assert float(answer) == pytest.approx(mixed)


@pytest.mark.parametrize("optimizer", [Sgd(), Adam(keep=True)])
def test_the_mean_is_fedavg_and_the_own_model_local_training(optimizer: Optimizer) -> None:
    task, federation = small_federation("batch", (5, 9, 3))
    state, _ = rounds_of(FedPOE(optimizer, holdout=0), task, federation, 3, batch=4)
    plain, _ = rounds_of(FedAvg(optimizer), task, federation, 3, batch=4)
    alone, _ = rounds_of(Local(optimizer), task, federation, 3, batch=4)
    clients, lonely = (s.clients.rows(torch.arange(3)) for s in (state, alone))
    torch.testing.assert_close(state.server.w, plain.server.w, rtol=0, atol=1e-12)
    torch.testing.assert_close(clients.local, lonely.personal, rtol=0, atol=1e-12)


def test_shares_add_up_and_without_a_rate_stay() -> None:
    for rate in (0.0, 5.0):
        algorithm = FedPOE(rate=rate, stored=3, period=2, holdout=2)
        task, state, shown = three_rounds(algorithm)
        down = algorithm.downlink(state.server, torch.arange(4))
        for n in range(4):
            share = algorithm.personal_model(task, tree.row(clients_of(state), n), tree.row(down, n)).share
            assert (share >= 0).all()
            assert float(share.sum()) == pytest.approx(1)
            assert float(share[-1]) == 0, "an empty place answers"
        fixed = shown[-1].clients["local_weight"] == pytest.approx([0.25] * 4)
        assert fixed is (rate == 0)


@pytest.mark.job
def test_the_server_stores_a_model_every_period_and_drops_the_oldest() -> None:
    task, federation = slopes(0.0), federation_of(([[1.0]], [1]), ([[-2.0]], [1]))
    means, births = [0.0], []
    for rounds in range(1, 8):
        state, _ = rounds_of(FedPOE(PLAIN, stored=2, period=2, holdout=0), task, federation, rounds)
        means.append(float(state.server.w))
        births.append(state.server.birth.tolist())
        for slot, born in enumerate(births[-1]):
            assert born < 0 or float(state.server.bank[slot]) == pytest.approx(means[born])
    assert births == [[0, -1], [0, 2], [0, 2], [4, 2], [4, 2], [4, 6], [4, 6]]


def test_a_stored_model_is_weighed_as_if_it_had_been_there_from_the_start() -> None:
    task, federation = slopes(0.0), federation_of(([[1.0], [2.0]], [1, 1]))
    algorithm = FedPOE(PLAIN, rate=1.0, stored=2, period=2, holdout=2)
    state, _ = rounds_of(algorithm, task, federation, 3)
    client = state.clients.rows(torch.arange(1))
    stored = float(state.server.bank[1])
    assert float(client.logs.bank[0, 1]) == pytest.approx(3 * math.log(sigma(stored * 2.0)))


def test_the_bank_is_evaluated_with_the_weight_of_a_newly_stored_model() -> None:
    """One client, so its own model is the mean: 0, a_1, a_2. In the third round the bank has 0 and, newly, a_2."""
    task, federation = slopes(0.0), federation_of(([[1.0], [2.0]], [1, 1]))
    state, _ = rounds_of(FedPOE(PLAIN, rate=1.0, stored=2, period=2, holdout=2), task, federation, 3)
    first = sigma(0.0)
    second = first + sigma(-first)
    loss = [-math.log(sigma(2.0 * a)) for a in (0.0, first, second)]
    weights = softmax(-2 * loss[0], -2 * loss[2])  # after two rounds, as if both had been there
    bank = -math.log(weights[0] * sigma(0.0) + weights[1] * sigma(2.0 * second))
    halves = state.clients.rows(torch.arange(1)).logs.halves[0]
    assert halves.tolist() == pytest.approx([-sum(loss), -(loss[0] + loss[0] + bank)])


def test_what_is_held_out_is_never_trained_on() -> None:
    task, algorithm = slopes(0.0), FedPOE(PLAIN, holdout=3)
    down = Down(*algorithm.server_init(task, 1))
    x, y = vector(1.0, 2.0, 4.0, 3.0)[:, None], torch.ones(4, dtype=torch.int64)

    def upload(x: Any) -> float:
        data = Data(x, y, torch.tensor(4))
        with torch.no_grad():
            output = algorithm.client_update(
                task, algorithm.client_init(task), down, data, everything(data, 1)
            )
        return float(output.upload.w)

    assert upload(x) == pytest.approx((1.0 + 2.0 + 3.0) / 3 / 2)
    changed = x.clone()
    changed[2] = -7.0
    assert upload(changed) == upload(x)
