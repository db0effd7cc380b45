"""FedSA-LoRA: A is averaged; B and the head stay."""

from __future__ import annotations

import pytest
import torch

from copfl.algorithms import FedSALoRA
from copfl.errors import UsageError
from tests.algorithms.adapter import Numbers, adapted
from tests.algorithms.chain import LR, PLAIN, chain, numbers
from tests.toys import federation_of, rounds_of

START = Numbers(base=0.5, a=1.5, b=-0.5, head=0.75)


def test_a_is_the_mean_by_samples_and_b_and_the_head_are_each_clients_own() -> None:
    federation = federation_of(([[1.0]], [1]), ([[2.0]] * 3, [0] * 3))
    state, _ = rounds_of(FedSALoRA(PLAIN), adapted(START), federation, 1, batch=3)
    one, three = START.stepped(1.0, 1, LR), START.stepped(2.0, 0, LR)
    assert state.server.w.tolist() == numbers((one.a + 3 * three.a) / 4)
    own = state.clients.rows(torch.arange(2)).personal
    assert own[0].tolist() == numbers(one.b, one.head)
    assert own[1].tolist() == numbers(three.b, three.head)


def test_b_lives_on_from_round_to_round() -> None:
    state, _ = rounds_of(FedSALoRA(PLAIN), adapted(START), federation_of(([[1.0]], [1])), 2, batch=1)
    twice = START.stepped(1.0, 1, LR).stepped(1.0, 1, LR)
    assert state.server.w.tolist() == numbers(twice.a)
    assert state.clients.rows(torch.arange(1)).personal[0].tolist() == numbers(twice.b, twice.head)


def test_a_model_without_adapters_is_refused() -> None:
    with pytest.raises(UsageError, match=r"fedsa_lora works on the matrices of LoRA"):
        FedSALoRA().server_init(chain(1.0, 1.0), 2)
