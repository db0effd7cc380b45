"""Convolution and pooling of small maps give what torch's own give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from copfl import models
from copfl.core.task import task_of
from copfl.kernels import modules
from copfl.kernels.modules import FEW, LARGE, Convolution, MaxPool, positions_of
from copfl.kernels.private_torch import mapped
from copfl.models.networks import FrozenBatchNorm


def ours(layer: nn.Module) -> nn.Module:
    return next(modules.for_tasks(nn.Sequential(copy.deepcopy(layer))).children())


def gradients(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """What comes out, and the gradients of a function of it towards the input and the parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return (y.detach(), *torch.autograd.grad((y**3).sum(), [x, *layer.parameters()]))


axis = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)).filter(
    lambda a: a[0] + 2 * a[3] >= a[1]
)  # pixels, kernel, stride, padding


@settings(max_examples=30, deadline=None)
@given(axis, axis, st.booleans())
def test_a_convolution_gives_what_torchs_own_gives(
    down: tuple[int, ...], across: tuple[int, ...], bias: bool
) -> None:
    height, kernel, stride, padding = zip(down, across, strict=True)
    layer = nn.Conv2d(3, 4, kernel, stride, padding, bias=bias).double()
    x = torch.randn(2, 3, *height, dtype=torch.float64)
    torch.testing.assert_close(gradients(ours(layer), x), gradients(layer, x))


@given(axis)
def test_taps_meet_exactly_the_pixels_that_they_can(axis: tuple[int, int, int, int]) -> None:
    size, kernel, stride, padding = axis
    outputs, positions = positions_of(size, kernel, stride, padding)
    found = {
        (position.number, output, pixel)
        for position in positions
        for output, pixel in zip(range(outputs)[position.outputs], range(size)[position.pixels], strict=True)
    }
    every = (
        (position, output, output * stride + position - padding)
        for position in range(kernel)
        for output in range(outputs)
    )
    assert found == {meeting for meeting in every if 0 <= meeting[2] < size}


def test_the_product_is_for_small_maps_in_training_outside_of_vmap() -> None:
    def name(x: Tensor) -> str:
        return type(layer(x).grad_fn).__name__

    layer = ours(nn.Conv2d(2, 2, 3, padding=1, bias=False))
    assert type(layer) is Convolution
    assert "Product" in name(torch.randn(2, 2, 2, 2))
    assert FEW < 9
    assert "Convolution" in name(torch.randn(2, 2, 3, 3))
    x = torch.randn(3, 2, 2, 2, 2)
    torch.testing.assert_close(
        torch.func.vmap(lambda x: layer(x) * mapped())(x), torch.stack([layer(one) for one in x])
    )
    assert not mapped()


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("kernel", "size"), [(3, 1), (3, 2), (1, 2)])
def test_a_gradient_that_has_a_place_is_added_to_what_is_there(
    kernel: int, size: int, layout: torch.memory_format
) -> None:
    plain = nn.Conv2d(3, 4, kernel, padding=kernel // 2, bias=False).double()
    x = torch.randn(5, 3, size, size, dtype=torch.float64)
    found = []
    for layer in (plain, ours(plain)):
        weight = layer.get_parameter("weight")
        weight.grad = torch.ones_like(weight, memory_format=layout)
        (layer(x) ** 3 + layer(2 * x)).sum().backward()  # a layer that is called twice
        found.append(weight.grad)
    torch.testing.assert_close(found[1], found[0])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.idle = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(5, 5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.conv(self.conv.weight.new_ones(()) * x).flatten(2).sum(2))
        return result


def test_parameters_that_nobody_uses_have_a_gradient_of_zero() -> None:
    task = task_of(Unused(), 3, dtype=torch.float64)
    x, y = torch.randn(6, 3, 2, 2, dtype=torch.float64), torch.arange(6) % 3
    w = task.initial
    with torch.no_grad():
        grad = task.gradient(w, w[:0], x, y)[0]
    expected = torch.func.grad(lambda w: F.cross_entropy(task.forward(w, x, training=True)[0], y))(w)
    torch.testing.assert_close(grad, expected)
    assert not task.layout.split(grad)["idle.weight"].any()


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(3, 1, ceil_mode=True),
        nn.MaxPool2d((2, 3), dilation=2),
    ],
)
def test_pooling_gives_what_torchs_own_gives_with_ties_too(pool: nn.MaxPool2d) -> None:
    mine = ours(pool)
    assert type(mine) is MaxPool
    for shape in ((4, 16, 17, 18), (2, 3, 8, 9)):
        x = torch.randn(*shape, dtype=torch.float64).relu().round(decimals=1)
        assert (x.numel() >= LARGE) == (shape[0] == 4)
        for layout in (torch.contiguous_format, torch.channels_last):
            torch.testing.assert_close(
                gradients(mine, x.to(memory_format=layout)), gradients(pool, x), rtol=0, atol=0
            )


def test_what_else_a_pool_can_do_is_left_to_torch() -> None:
    assert type(ours(nn.MaxPool2d(2, return_indices=True))) is nn.MaxPool2d
    x = torch.randn(32, 40, 40).relu()
    torch.testing.assert_close(ours(nn.MaxPool2d(2))(x), F.max_pool2d(x, 2))  # a single image


def test_a_resnets_gradient_is_that_of_torchs_own_layers() -> None:
    model = models.build("resnet18", (3, 32, 32), 10, 0, width=8).double()
    task = task_of(model, 10, dtype=torch.float64)
    x, y = torch.randn(16, 3, 32, 32, dtype=torch.float64), torch.arange(16) % 10
    F.cross_entropy(model.train()(x), y).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        grad, _, after = task.gradient(task.initial[: task.d], task.initial[task.d :], x, y)
    for name, found in task.layout.split(grad).items():
        torch.testing.assert_close(found, model.get_parameter(name).grad)
    for name, found in task.layout.split(after, buffers=True).items():
        torch.testing.assert_close(found, model.get_buffer(name))


def test_a_frozen_batch_norm_normalises_with_its_running_statistics_in_training_too() -> None:
    """A user's own layer stays frozen as well: its `train` leaves it in evaluation mode."""
    layer = FrozenBatchNorm(2)
    layer.running_mean, layer.running_var = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 1.0])
    frozen: Any = ours(layer).train()
    x = torch.randn(5, 2, 3, 3)
    expected = (x - torch.tensor([1.0, 2.0])[:, None, None]) / torch.tensor([2.0, 1.0])[:, None, None]
    torch.testing.assert_close(frozen(x), expected, rtol=1e-4, atol=1e-4)
    assert frozen.running_mean.tolist() == [1.0, 2.0]
    assert ours(nn.BatchNorm2d(2)).train().training
    task = task_of(models.SmallCNN((1, 8, 8), 2, norm="frozen"), 2)
    w, images, labels = task.initial, torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 0, 1])
    gradient, _, after = task.gradient(w[: task.d], w[task.d :], images, labels)
    assert after.tolist() == w[task.d :].tolist()
    assert gradient.abs().sum() > 0


def test_every_module_has_the_mode_that_is_asked_for() -> None:
    """Also where a part of a user's model was in the other mode, which the model itself does not tell."""
    dropout = nn.Dropout()
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(dropout)).train()
    dropout.eval()
    for training in (True, True, False):
        structure = modules.in_mode(model, training)
        assert {module.training for module in model.modules()} == {training}
        assert (structure.norms, structure.others) == ([], list(model.modules()))
