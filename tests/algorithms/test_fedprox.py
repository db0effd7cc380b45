"""FedProx: the pull is towards the global model."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import FedAvg, FedProx
from copfl.core.optim import Sgd
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector
from tests.algorithms.updates import output_of, three_rounds


def test_from_the_second_step_on_the_gradient_has_the_pull_in_it() -> None:
    task, data = chain(2.0, 0.5), samples((1.0, 1), (3.0, 0))
    output = output_of(FedProx(PLAIN, mu=0.2), task, data, one_at_a_time([0, 1]))
    miss = off(0.5 * 2.0, 1)
    body, head = (
        2.0 - LR * miss * 0.5,
        0.5 - LR * miss * 2.0,
    )  # in the first step there is nowhere to be pulled
    miss = off(head * body * 3.0, 0)
    expected = (
        body - LR * (miss * head * 3.0 + 0.2 * (body - 2.0)),
        head - LR * (miss * body * 3.0 + 0.2 * (head - 0.5)),
    )
    assert output.upload.w.tolist() == numbers(*expected)
    assert output.trained.tolist() == numbers(*expected)


def test_each_round_pulls_towards_its_own_broadcast() -> None:
    task, data = chain(2.0, 0.5), samples((0.0, 1))  # a sample without a gradient: the pull is all there is
    output = output_of(FedProx(PLAIN, mu=1.0), task, data, one_at_a_time([0, 0]), w=vector(7.0, -3.0))
    assert output.upload.w.tolist() == [7.0, -3.0]


@pytest.mark.parametrize("keep", [False, True])
def test_without_a_pull_it_is_fedavg(keep: bool) -> None:
    _, prox, _ = three_rounds(FedProx(Sgd(keep=keep), mu=0.0))
    _, avg, _ = three_rounds(FedAvg(Sgd(keep=keep)))
    assert torch.equal(prox.server.w, avg.server.w)
