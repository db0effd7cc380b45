"""FedBABU: the federation never touches the head; fine-tuning does, and is dropped."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import FedBABU
from copfl.core.optim import Adam, Optimizer, Sgd
from copfl.parts import Mamo
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector
from tests.algorithms.updates import clients_of, output_of, three_rounds


def test_the_body_alone_is_learned_and_the_whole_broadcast_is_tuned() -> None:
    task, data = chain(2.0, 0.5), samples((1.0, 1), (3.0, 0))
    output = output_of(FedBABU(PLAIN, tune_epochs=1), task, data, one_at_a_time([0], [1]), w=vector(3.0))
    assert output.upload.w.tolist() == numbers(3.0 - LR * off(0.5 * 3.0, 1) * 0.5)
    assert output.client.personal.tolist() == [0.5]
    miss = off(0.5 * 3.0 * 3.0, 0)  # at the global model, not at the body that was just trained
    assert output.trained.tolist() == numbers(3.0 - LR * miss * 0.5 * 3.0, 0.5 - LR * miss * 3.0 * 3.0)


@pytest.mark.parametrize(("tune", "still"), [("head", 0), ("body", 1)])
def test_one_part_can_be_tuned_alone(tune: str, still: int) -> None:
    task, data = chain(2.0, 0.5), samples((1.0, 1))
    output = output_of(FedBABU(PLAIN, tune_epochs=1, tune=tune), task, data, one_at_a_time([0], [0]))
    assert output.trained[still] == task.initial[still]
    assert output.trained[1 - still] != task.initial[1 - still]


@pytest.mark.parametrize("optimizer", [Sgd(weight_decay=0.1), Adam(keep=True), Mamo()], ids=repr)
def test_the_head_never_moves(optimizer: Optimizer) -> None:
    task, state, _ = three_rounds(FedBABU(optimizer, tune_epochs=1), norm="none")
    head = task.where("head")
    assert torch.equal(clients_of(state).personal, task.initial[head].expand(4, -1))
    assert not torch.equal(state.server.w, task.initial[~head])


def test_tuning_changes_what_is_seen_and_nothing_else() -> None:
    _, plain, shown = three_rounds(FedBABU(Sgd(keep=True), tune_epochs=0))
    _, tuned, better = three_rounds(FedBABU(Sgd(keep=True), tune_epochs=3))
    assert torch.equal(plain.server.w, tuned.server.w)
    assert torch.equal(clients_of(plain).personal, clients_of(tuned).personal)
    assert (shown[-1].clients["test_loss"] != better[-1].clients["test_loss"]).all()
    assert (shown[-1].clients["test_loss"] == shown[-1].clients["test_loss_before"]).all()
