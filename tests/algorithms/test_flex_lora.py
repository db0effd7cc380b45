"""FlexLoRA: a round by hand and by numpy's own decomposition, in float64, and its laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from copfl.algorithms import FedAvg, FlexLoRA
from copfl.algorithms.flex_lora import Upload
from copfl.core import Sgd, Task, UsageError, task_of, tree
from copfl.models.adapters import lora
from copfl.parts.adapters import A, B, components, dense, factored
from copfl.parts.averaging import Upload as Sums
from copfl.testing import SIZES, LoRALinear, small_federation
from tests.algorithms.adapter import SCALING, Numbers, adapted
from tests.algorithms.chain import LR, PLAIN, numbers
from tests.models import tiny
from tests.toys import federation_of, rounds_of

START = Numbers(base=0.5, a=1.5, b=-0.5, head=0.75)
RANK, ALPHA = 3, 6.0


class Net(nn.Module):
    """Four inputs, an adapted layer of five outputs, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = LoRALinear(nn.Linear(4, 5), r=RANK, scaling=ALPHA / RANK)
        self.body.base_layer.requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(torch.tanh(self.body(x)))
        return answer


def task_and_vectors(count: int) -> tuple[Task, list[Tensor]]:
    """The task, and the vectors of this many clients."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = task_of(Net(), 3, dtype=torch.float64)
        return task, [torch.randn(len(task.initial)).double() for _ in range(count)]


def matrices(task: Task, w: Tensor) -> tuple[np.ndarray, np.ndarray]:
    tensors = task.layout.split(w)
    a, b = (tensors[f"body.lora_{name}.default.weight"].numpy() for name in "AB")
    return a, b


def test_one_component_by_hand() -> None:
    """With one number each, B A of the mean is the mean of b a; A has length 1 and B has the rest."""
    federation = federation_of(([[1.0]], [1]), ([[2.0]] * 3, [0] * 3))
    state, _ = rounds_of(FlexLoRA(PLAIN), adapted(START), federation, 1, batch=3)
    one, three = START.stepped(1.0, 1, LR), START.stepped(2.0, 0, LR)
    product = (one.b * one.a + 3 * three.b * three.a) / 4
    assert state.server.w.tolist() == numbers(1.0, product, (one.head + 3 * three.head) / 4)


@pytest.mark.parametrize("send", ["factors", "products"])
def test_a_round_is_the_decomposed_mean_of_the_products(send: str) -> None:
    algorithm: Any = FlexLoRA(ranks=(3, 2, 1), send=send)
    task, vectors = task_and_vectors(3)
    server, beyond = algorithm.server_init(task, 3), components(task.layout, task.device)
    cut = [torch.where(beyond >= rank, 0, w) for w, rank in zip(vectors, (3, 2, 1), strict=True)]
    sizes, summands = (1.0, 2.0, 5.0), []
    for n, (w, size) in enumerate(zip(cut, sizes, strict=True)):
        down = tree.row(algorithm.downlink(server, torch.tensor([n])), 0)
        assert int(down.rank) == 3 - n
        weight, factors = torch.tensor(size).double(), tree.Masked(w, beyond >= down.rank)
        products = Sums(algorithm._summed(task, w), weight)
        upload = products if send == "products" else Upload(factors, weight)
        summands.append(algorithm.summand(task, server, torch.tensor(n), upload))
    after, metrics = algorithm.server_update(task, server, tree.summed(summands))
    pairs = [matrices(task, w) for w in cut]
    mean = sum(size * ALPHA / RANK * b @ a for size, (a, b) in zip(sizes, pairs, strict=True)) / sum(sizes)
    u, s, v = np.linalg.svd(mean)
    for rank in (1, 2, 3):
        down = tree.row(algorithm.downlink(after, torch.tensor([3 - rank])), 0)
        w = algorithm.personal_model(task, algorithm.client_init(task), down)
        a, b = matrices(task, w)
        expected = (u[:, :rank] * s[:rank]) @ v[:rank]
        np.testing.assert_allclose(ALPHA / RANK * b @ a, expected, rtol=0, atol=1e-12)
        assert not a[rank:].any()
        assert not b[:, rank:].any()
        np.testing.assert_allclose(a[:rank] @ a[:rank].T, np.eye(rank), rtol=0, atol=1e-12)
    assert float(metrics["truncated"]) == pytest.approx(float(np.linalg.norm(s[3:])), abs=1e-12)
    head = task.where("head")
    by_size = sum(size * w[head] for size, w in zip(sizes, cut, strict=True)) / sum(sizes)
    torch.testing.assert_close(after.w[head], by_size, rtol=0, atol=1e-12)


def test_what_is_sent_makes_no_difference() -> None:
    task, federation = small_federation("batch", SIZES, needs=FlexLoRA.needs)
    by_factors, by_products = (
        rounds_of(FlexLoRA(Sgd(lr=0.05), ranks=(2, 1), send=send), task, federation, 3, batch=4)[0].server.w
        for send in ("factors", "products")
    )
    torch.testing.assert_close(by_factors, by_products, rtol=0, atol=1e-9)


def test_a_client_trains_and_sends_its_rank_alone() -> None:
    task, federation = small_federation("batch", SIZES, needs=FlexLoRA.needs)
    algorithm = FlexLoRA(Sgd(lr=0.05), ranks=(2, 1))
    state, shown = rounds_of(algorithm, task, federation, 2, batch=4)
    masks = state.clients.rows(torch.arange(len(SIZES))).mask
    beyond = components(task.layout, task.device) >= 1
    assert masks[1][beyond].all()
    assert not masks[0][beyond].any()
    up = shown[-1].clients["bytes_up"]
    assert up[1] < up[0]


def test_one_client_of_full_rank_keeps_its_products() -> None:
    """A, B are other factors of the same layer, so its predictions are those of its own model."""
    task, federation = adapted(START), federation_of(([[1.0]], [1]))
    state, _ = rounds_of(FlexLoRA(PLAIN), task, federation, 1, batch=1)
    plain, _ = rounds_of(FedAvg(PLAIN), task, federation, 1, batch=1)
    torch.testing.assert_close(dense(task, state.server.w), dense(task, plain.server.w), rtol=0, atol=1e-12)
    assert float(dense(task, state.server.w)) == pytest.approx(
        SCALING * START.stepped(1.0, 1, LR).a * START.stepped(1.0, 1, LR).b
    )


def test_a_component_without_values_begins_as_an_adapter_does() -> None:
    """Nothing was learned, or by clients of rank 1 alone: B is zero there, and A stays as it was."""
    task, (w, other) = task_and_vectors(2)
    a, b = matrices(task, factored(task, w, torch.zeros_like(dense(task, w))))
    assert not b.any()
    assert np.array_equal(a, matrices(task, w)[0])
    rank_one = torch.where(components(task.layout, task.device) >= 1, 0, other)
    a, b = matrices(task, factored(task, w, dense(task, rank_one)))
    assert np.array_equal(a[1:], matrices(task, w)[0][1:])
    assert not b[:, 1:].any()
    assert b[:, 0].any()


def test_the_adapters_of_peft_with_layers_that_are_smaller_than_their_rank() -> None:
    """Of a convolution and of linear layers: the factored vector has the products again."""
    assert tiny.peft  # whose import also makes torchvision importable
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 2))
    lora(model, r=4, alpha=6, targets="0+2")
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.lora_B["default"].weight)
    task = task_of(model, 2, dtype=torch.float64)
    assert task.where(A, B).any()
    before = dense(task, task.initial)
    expected = [layer.get_delta_weight("default").double().reshape(-1) for layer in (model[0], model[2])]
    torch.testing.assert_close(before, torch.cat(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dense(task, factored(task, task.initial, before)), before, rtol=0, atol=1e-9)


def test_wrong_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match=r"ranks=\(4, 0\): a rank is at least 1"):
        FlexLoRA(ranks=(4, 0))
    with pytest.raises(UsageError, match="the model's adapters have rank 1; give the model the largest rank"):
        FlexLoRA(ranks=(4,)).server_init(adapted(START), 2)
    task, _ = small_federation("batch", SIZES)
    with pytest.raises(UsageError, match="flex_lora works on the matrices of LoRA"):
        FlexLoRA().server_init(task, 2)
