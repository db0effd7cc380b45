"""APFL: the personal model and alpha both descend the mixture's loss."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from copfl.algorithms import APFL, FedAvg, Local
from copfl.core import Experts, Sgd, Task, UsageError
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector
from tests.algorithms.updates import clients_of, down_of, output_of, three_rounds

V, W, X = [1.0, -1.0], [2.0, 0.5], 1.5  # one sample of class 1


def sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s))


def met(algorithm: APFL, task: Task) -> Any:
    """A client that has trained before and holds V."""
    return algorithm.client_init(task)._replace(v=vector(*V), started=torch.tensor(True))


def test_mixed_predictions_by_hand() -> None:
    task, algorithm = chain(0.0, 0.0), APFL(PLAIN, alpha=0.3, alpha_rate=0.1)
    output = output_of(
        algorithm, task, samples((X, 1)), one_at_a_time([0]), met(algorithm, task), w=vector(*W)
    )
    mine, other = sigmoid(V[0] * V[1] * X), sigmoid(W[0] * W[1] * X)
    alpha = 0.3 - 0.1 * (other - mine) / (
        0.3 * mine + 0.7 * other
    )  # d/dalpha of -log(alpha * mine + rest * other)
    assert output.client.alpha.item() == pytest.approx(alpha, rel=1e-12)
    # d/ds of -log(alpha * sigmoid(s) + rest) is -alpha * sigmoid' / mixture
    slope = -alpha * mine * (1 - mine) / (alpha * mine + (1 - alpha) * other)
    assert output.client.v.tolist() == numbers(V[0] - LR * slope * V[1] * X, V[1] - LR * slope * V[0] * X)
    miss = off(W[0] * W[1] * X, 1)  # the global half does not know of the mixture
    assert output.upload.w.tolist() == numbers(W[0] - LR * miss * W[1] * X, W[1] - LR * miss * W[0] * X)
    assert isinstance(output.trained, Experts)
    assert torch.equal(output.trained.w, torch.stack([output.client.v, output.upload.w]))
    assert output.trained.share.tolist() == numbers(alpha, 1 - alpha)


def test_mixed_weights_by_hand() -> None:
    task, algorithm = chain(0.0, 0.0), APFL(PLAIN, alpha=0.3, alpha_rate=0.1, mixture="weights")
    output = output_of(
        algorithm, task, samples((X, 1)), one_at_a_time([0]), met(algorithm, task), w=vector(*W)
    )

    def gradient(alpha: float) -> list[float]:
        body, head = (alpha * v + (1 - alpha) * w for v, w in zip(V, W, strict=True))
        miss = off(head * body * X, 1)
        return [miss * head * X, miss * body * X]

    alpha = 0.3 - 0.1 * sum(g * (v - w) for g, v, w in zip(gradient(0.3), V, W, strict=True))
    assert output.client.alpha.item() == pytest.approx(alpha, rel=1e-12)
    moved = [v - LR * alpha * g for v, g in zip(V, gradient(alpha), strict=True)]
    assert output.client.v.tolist() == numbers(*moved)
    mixed = [alpha * v + (1 - alpha) * w for v, w in zip(moved, output.upload.w.tolist(), strict=True)]
    assert output.trained.tolist() == numbers(*mixed)


@pytest.mark.parametrize("mixture", ["predictions", "weights"])
def test_all_personal_is_local_training_and_all_global_is_fedavg(mixture: str) -> None:
    optimizer = Sgd(weight_decay=0.0, keep=True)
    _, alone, alone_shown = three_rounds(Local(optimizer))
    _, together, together_shown = three_rounds(FedAvg(optimizer))
    task, mine, mine_shown = three_rounds(APFL(optimizer, alpha=1.0, alpha_rate=0.0, mixture=mixture))
    _, ours, ours_shown = three_rounds(APFL(optimizer, alpha=0.0, alpha_rate=0.0, mixture=mixture))
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(clients_of(mine).v, clients_of(alone).personal)
    assert torch.equal(clients_of(ours).v[:, : task.d], task.initial[: task.d].expand(4, -1))  # never moved
    for state in (mine, ours):
        assert torch.equal(state.server.w, together.server.w)
    for found, expected in ((mine_shown, alone_shown), (ours_shown, together_shown)):
        close(*(torch.from_numpy(rounds[-1].clients["test_loss"]) for rounds in (found, expected)))


@pytest.mark.parametrize("mixture", ["predictions", "weights"])
def test_alpha_goes_to_the_better_model_and_stays_between_0_and_1(mixture: str) -> None:
    task, algorithm = chain(0.0, 0.0), APFL(PLAIN, alpha_rate=100.0, mixture=mixture)
    for label, expected in ((0, 1.0), (1, 0.0)):  # V says class 0, W says class 1
        output = output_of(
            algorithm, task, samples((X, label)), one_at_a_time([0]), met(algorithm, task), w=vector(*W)
        )
        assert output.client.alpha.item() == expected


@pytest.mark.parametrize("mixture", ["predictions", "weights"])
def test_a_new_client_answers_like_the_broadcast(mixture: str) -> None:
    task, algorithm = chain(9.0, 9.0), APFL(mixture=mixture)
    w, x = vector(*W), vector(X)[None]
    personal = algorithm.personal_model(task, algorithm.client_init(task), down_of(algorithm, task, w))
    torch.testing.assert_close(task.predict(personal, x), task.predict(w, x))


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match=r"alpha=1\.5 must be between 0, all global, and 1, all personal"):
        APFL(alpha=1.5)
    with pytest.raises(UsageError, match='no mixture "prediction"; did you mean "predictions"'):
        APFL(mixture="prediction")
