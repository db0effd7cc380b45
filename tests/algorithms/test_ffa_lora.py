"""FFA-LoRA: A never moves, B is averaged, the head too unless it is personal."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import FedAvg, FFALoRA
from copfl.core import task_of
from copfl.core.optim import Adam, Optimizer, Sgd
from copfl.errors import UsageError
from copfl.parts import Mamo
from copfl.testing import SIZES, small_federation
from tests.algorithms.adapter import Chain, Numbers, adapted
from tests.algorithms.chain import LR, PLAIN, chain, numbers
from tests.toys import federation_of, rounds_of

START = Numbers(base=0.5, a=1.5, b=-0.5, head=0.75)


def test_b_and_the_head_are_means_by_samples() -> None:
    federation = federation_of(([[1.0]], [1]), ([[2.0]] * 3, [0] * 3))
    state, _ = rounds_of(FFALoRA(PLAIN), adapted(START), federation, 1, batch=3)
    one, three = START.stepped(1.0, 1, LR), START.stepped(2.0, 0, LR)
    assert state.server.w.tolist() == numbers((one.b + 3 * three.b) / 4, (one.head + 3 * three.head) / 4)
    assert state.clients.rows(torch.arange(2)).personal.tolist() == [[1.5], [1.5]]


def test_the_head_may_be_personal() -> None:
    federation = federation_of(([[1.0]], [1]), ([[2.0]] * 3, [0] * 3))
    state, _ = rounds_of(FFALoRA(PLAIN, personal=("head",)), adapted(START), federation, 1, batch=3)
    one, three = START.stepped(1.0, 1, LR), START.stepped(2.0, 0, LR)
    assert state.server.w.tolist() == numbers((one.b + 3 * three.b) / 4)
    assert state.clients.rows(torch.arange(2)).personal[:, 1].tolist() == numbers(one.head, three.head)


@pytest.mark.parametrize("optimizer", [Sgd(weight_decay=0.1), Adam(keep=True), Mamo()], ids=repr)
def test_a_never_moves(optimizer: Optimizer) -> None:
    task, federation = small_federation("none", SIZES, needs=FFALoRA.needs)
    state, _ = rounds_of(FFALoRA(optimizer), task, federation, 3, batch=4)
    a = task.where("*.lora_A")
    assert torch.equal(state.clients.rows(torch.arange(4)).personal, task.initial[a].expand(4, -1))
    assert not torch.equal(state.server.w, task.initial[~a])


def test_it_is_fedavg_of_a_model_whose_a_is_frozen() -> None:
    module = Chain(START, train_base=False)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_B" in name or "head" in name)
    frozen, federation = (
        task_of(module, 2, dtype=torch.float64),
        federation_of(([[1.0]] * 2, [1, 0]), ([[2.0]], [0])),
    )
    ours, _ = rounds_of(FFALoRA(PLAIN), adapted(START), federation, 3, batch=1)
    plain, _ = rounds_of(FedAvg(PLAIN), frozen, federation, 3, batch=1)
    torch.testing.assert_close(ours.server.w, plain.server.w, rtol=1e-12, atol=1e-12)


def test_a_model_without_adapters_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"ffa_lora works on .*no parameter \*\.lora_A; add them with --adapter"
    ):
        FFALoRA().server_init(chain(1.0, 1.0), 2)
