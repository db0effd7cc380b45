"""FedEx-LoRA: the adapted layers are the mean of the clients' layers, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from copfl.algorithms import FedAvg, FedExLoRA
from copfl.core import task_of
from copfl.errors import UsageError
from copfl.models.adapters import lora
from copfl.parts.adapters import BASE, products
from copfl.testing import SIZES, LoRALinear, small_federation
from tests.algorithms.adapter import SCALING, Numbers, adapted
from tests.algorithms.chain import LR, PLAIN, numbers
from tests.models import tiny
from tests.toys import federation_of, rounds_of

START = Numbers(base=0.5, a=1.5, b=-0.5, head=0.75)


def test_the_base_takes_up_the_residual() -> None:
    federation = federation_of(([[1.0]], [1]), ([[2.0]] * 3, [0] * 3))
    state, shown = rounds_of(FedExLoRA(PLAIN), adapted(START, train_base=True), federation, 1, batch=3)
    one, three = START.stepped(1.0, 1, LR), START.stepped(2.0, 0, LR)
    a, b = (one.a + 3 * three.a) / 4, (one.b + 3 * three.b) / 4
    residual = SCALING * ((one.b * one.a + 3 * three.b * three.a) / 4 - b * a)
    assert state.server.w.tolist() == numbers(a, b, (one.head + 3 * three.head) / 4)
    assert state.server.base.tolist() == numbers(START.base + residual)
    assert shown[0].federation["residual"] == pytest.approx(abs(residual))
    assert residual != 0


def test_the_layers_after_a_round_are_the_mean_of_the_clients_layers() -> None:
    task, federation = small_federation("batch", SIZES, needs=FedExLoRA.needs)
    algorithm = FedExLoRA(weights="equal")
    sent: list[Any] = []

    class Watched(FedExLoRA):
        def summand(self, task: Any, server: Any, id: Any, upload: Any) -> Any:
            sent.append((server.base, upload.w))
            return super().summand(task, server, id, upload)

    state, _ = rounds_of(Watched(weights="equal"), task, federation, 2, batch=4)
    layers = [base + products(task, algorithm._with(task, w)) for base, w in sent[-len(SIZES) :]]
    now = state.server.base + products(task, algorithm._with(task, state.server.w))
    torch.testing.assert_close(now, torch.stack(layers).mean(0), rtol=1e-12, atol=1e-12)


def test_one_client_alone_leaves_the_base_and_is_fedavg() -> None:
    task, federation = adapted(START, train_base=True), federation_of(([[1.0]], [1]))
    state, _ = rounds_of(FedExLoRA(PLAIN), task, federation, 3, batch=1)
    plain, _ = rounds_of(FedAvg(PLAIN), adapted(START), federation, 3, batch=1)
    assert state.server.base.tolist() == numbers(START.base)
    torch.testing.assert_close(state.server.w, plain.server.w, rtol=1e-12, atol=1e-12)


def test_the_products_of_pefts_layers() -> None:
    """Of linear layers and of convolutions, in the order of their weights."""
    assert tiny.peft  # whose import also makes torchvision importable
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 2))
    lora(model, r=2, alpha=6, targets="0+2")
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.lora_B["default"].weight)
        layer.base_layer.weight.requires_grad_(True)
    task = task_of(model, 2, dtype=torch.float64)
    expected = [layer.get_delta_weight("default").double().reshape(-1) for layer in (model[0], model[2])]
    torch.testing.assert_close(products(task, task.initial), torch.cat(expected), rtol=1e-5, atol=1e-6)
    assert len(task.layout.entries(task.initial, BASE)) == len(torch.cat(expected))


def test_every_adapted_layer_needs_its_weights() -> None:
    model = nn.Sequential(*(LoRALinear(nn.Linear(2, 2), r=1, scaling=1.0) for _ in range(2)), nn.Linear(2, 2))
    model.get_submodule("0.base_layer").requires_grad_(False)
    with pytest.raises(UsageError, match=r"changes 0.base_layer.weight, which is frozen"):
        FedExLoRA().server_init(task_of(model, 2), 2)


def test_a_model_whose_base_is_frozen_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r'no parameter \*\.base_layer\.weight; add them with --train "\*\.base'
    ):
        FedExLoRA().server_init(adapted(START), 2)
