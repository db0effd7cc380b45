"""FedAvg with fine-tuning: what is tuned is seen and dropped."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import FedAvg, FedAvgFT
from copfl.core.optim import Sgd
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples
from tests.algorithms.updates import clients_of, output_of, three_rounds


def test_the_upload_ends_with_the_epochs_and_the_evaluated_model_goes_on() -> None:
    task, data = chain(1.0, 0.0), samples((1.0, 1))
    output = output_of(FedAvgFT(PLAIN, epochs=1, tune_epochs=1), task, data, one_at_a_time([0], [0]))
    head = 0.5 * LR  # off(0, 1) = -1/2; the body has no gradient while the head is 0
    assert output.upload.w.tolist() == numbers(1.0, head)
    miss = off(head, 1)
    assert output.trained.tolist() == numbers(1.0 - LR * miss * head, head - LR * miss * 1.0)


def test_tuning_one_part_leaves_the_other_as_it_was_uploaded() -> None:
    task, data = chain(1.0, 1.0), samples((1.0, 1))
    output = output_of(FedAvgFT(PLAIN, tune_epochs=2, tune="head"), task, data, one_at_a_time([0], [0], [0]))
    assert output.trained[0] == output.upload.w[0]
    assert output.trained[1] > output.upload.w[1]


@pytest.mark.job
@pytest.mark.parametrize("keep", [False, True])
def test_the_federation_is_fedavgs_whatever_is_tuned(keep: bool) -> None:
    optimizer = Sgd(keep=keep)
    _, plain, shown = three_rounds(FedAvg(optimizer))
    _, tuned, better = three_rounds(FedAvgFT(optimizer, tune_epochs=2))
    assert torch.equal(plain.server.w, tuned.server.w)
    assert torch.equal(clients_of(plain).personal, clients_of(tuned).personal)
    assert all(
        torch.equal(a, b) for a, b in zip(clients_of(plain).moments, clients_of(tuned).moments, strict=True)
    )
    assert (shown[-1].clients["test_loss"] != better[-1].clients["test_loss"]).all()
    _, _, same = three_rounds(FedAvgFT(optimizer))
    assert (shown[-1].clients["test_loss"] == same[-1].clients["test_loss"]).all()
