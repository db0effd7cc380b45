"""Modules that replace torch's own inside a Task: batch norm over valid samples, faster convolutions and pooling.

torch's convolution and pooling of small maps are far below the speed of a processor. The last maps of ResNet-18 on
images of 32x32 have four pixels, then one: a convolution is then a matrix product. The results are the same, up to the
rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from copfl.errors import UsageError
from copfl.kernels.fused import mapped

FEW = 4  # outputs of a map up to which, on a CPU, one matrix product is quicker than a convolution
LARGE = 2**14  # numbers from which pooling is worth another layout


class Tap(NamedTuple):
    """A tap of a kernel along one axis, and where it meets pixels; elsewhere it meets padding."""

    number: int
    outputs: slice
    pixels: slice


def taps_of(size: int, kernel: int, stride: int, padding: int) -> tuple[int, list[Tap]]:
    """How many outputs an axis of so many pixels has, and the taps that meet a pixel."""
    outputs, taps = (size + 2 * padding - kernel) // stride + 1, []
    for number in range(kernel):
        first = max(0, -((number - padding) // stride))
        last = min(outputs - 1, (size - 1 + padding - number) // stride)
        if first <= last:
            start = first * stride + number - padding
            taps.append(
                Tap(number, slice(first, last + 1), slice(start, start + (last - first) * stride + 1, stride))
            )
    return outputs, taps


class Convolution(nn.Conv2d):
    """A convolution that is a matrix product where the map is small, without taps that can only ever meet padding.

    Where the map is one pixel, those are eight of the nine taps of a kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        axes = zip(x.shape[-2:], self.kernel_size, self.stride, map(int, self.padding), strict=True)
        (height, down), (width, across) = (taps_of(*axis) for axis in axes)
        if not (down and across):
            return super().forward(x)
        trained = torch.is_grad_enabled() and self.weight.requires_grad and not mapped()
        if trained and x.dim() == 4 and x.device.type == "cpu" and height * width <= FEW:
            y: Tensor = _Product.apply(x, self.weight, (height, width), down, across)  # type: ignore[no-untyped-call]
            return y if self.bias is None else y + self.bias[:, None, None]
        if height * width > 1 or (len(down), len(across)) == self.kernel_size:
            return super().forward(x)
        seen = x[
            ..., down[0].pixels.start : down[-1].pixels.stop, across[0].pixels.start : across[-1].pixels.stop
        ]
        kept = self.weight[
            :, :, down[0].number : down[-1].number + 1, across[0].number : across[-1].number + 1
        ]
        return F.linear(seen.flatten(1), kept.flatten(1), self.bias)[..., None, None]


class _Product(torch.autograd.Function):
    """The convolution as a product of the pixels that each output sees with the kernels.

    If the weight has a `.grad` already, its gradient is added there and not given to autograd, which would make one of
    full size, for the most part of zeros where the map is one pixel, and then add that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        outputs: tuple[int, int],
        down: Sequence[Tap],
        across: Sequence[Tap],
    ) -> Tensor:
        pruned = [(a.number * weight.shape[3] + b.number, a, b) for a in down for b in across]
        # A single living tap is taken out of the kernel; to pick several costs more than it saves.
        taps = (
            slice(pruned[0][0], pruned[0][0] + 1) if len(pruned) == 1 else slice(0, weight.shape[2:].numel())
        )
        seen = x.new_zeros(x.shape[0], *outputs, x.shape[1], taps.stop - taps.start)  # [b, h, w, in, taps]
        for tap, a, b in pruned:
            seen[:, a.outputs, b.outputs, :, tap - taps.start] = x[:, :, a.pixels, b.pixels].permute(
                0, 2, 3, 1
            )
        kept = weight.flatten(2)[..., taps].flatten(1).contiguous()  # [out, in * taps]
        ctx.save_for_backward(seen, kept)
        ctx.pruned, ctx.taps, ctx.pixels, ctx.kernels = pruned, taps, x.shape[2:], weight.shape
        ctx.leaf = weight if weight.is_leaf else None
        return (_rows(seen) @ kept.t()).view(*seen.shape[:3], -1).permute(0, 3, 1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, toward: Tensor) -> tuple[Tensor | None, ...]:
        seen, kept = ctx.saved_tensors
        toward = toward.permute(0, 2, 3, 1).flatten(0, 2)  # [b * h * w, out]
        x = gradient = None
        if ctx.needs_input_grad[0]:
            back = (toward @ kept).view(seen.shape)
            x = back.new_zeros(seen.shape[0], *ctx.pixels, seen.shape[3])  # [b, H, W, in]
            for tap, a, b in ctx.pruned:
                x[:, a.pixels, b.pixels] += back[:, a.outputs, b.outputs, :, tap - ctx.taps.start]
            x = x.permute(0, 3, 1, 2).contiguous()
        if ctx.needs_input_grad[1]:
            place = None if ctx.leaf is None else ctx.leaf.grad
            if place is None or not place.is_contiguous():
                place = gradient = toward.new_zeros(ctx.kernels)
            wanted = place.flatten(2)[..., ctx.taps].flatten(1)  # a view, [out, in * taps]
            if wanted.is_contiguous():
                wanted.addmm_(toward.t(), _rows(seen))
            else:
                wanted.add_(toward.t() @ _rows(seen))
        return x, gradient, None, None, None


def _rows(seen: Tensor) -> Tensor:
    return seen.flatten(0, 2).flatten(1)  # [b * h * w, in * taps]


class MaxPool(nn.MaxPool2d):
    """Max-pooling that is quick on a CPU: torch's own looks at one number at a time unless the channels come last."""

    def forward(self, x: Tensor) -> Tensor:
        alone = not torch.compiler.is_compiling() and not mapped()
        if not (
            alone and x.dim() == 4 and x.device.type == "cpu" and x.numel() >= LARGE and x.is_contiguous()
        ):
            found: Tensor = super().forward(x)
            return found
        turned = x.detach().contiguous(memory_format=torch.channels_last)
        _, largest = F.max_pool2d(
            turned,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            return_indices=True,
        )
        return x.flatten(2).gather(2, largest.flatten(2)).view(largest.shape)


class BatchNorm(nn.Module):
    """Batch norm over the real samples of a batch alone; stands in for torch's own inside a Task.

    Clients of unequal size are trained side by side in batches filled up with samples that do not count. They must not
    count in the statistics either. `real` is set by the Task around each call; None means that all samples are real.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, like: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        if like.running_mean is None or like.running_var is None:
            raise UsageError(
                "a batch norm without running statistics cannot be evaluated; leave track_running_stats on"
            )
        self.weight, self.bias, self.eps = like.weight, like.bias, like.eps
        self.momentum = 0.1 if like.momentum is None else like.momentum
        self.register_buffer("running_mean", like.running_mean)
        self.register_buffer("running_var", like.running_var)
        self.valid: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        values = x.numel() // x.shape[1]
        if not self.training or (self.valid is None and values > 1):
            return F.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                self.momentum,
                self.eps,
            )
        others = [0, *range(2, x.dim())]
        valid = x.new_ones(x.shape[0]) if self.valid is None else self.valid.to(x.dtype)
        share = valid.view(-1, *[1] * (x.dim() - 1))
        count = valid.sum() * (values // x.shape[0])
        shape = [1, -1, *[1] * (x.dim() - 2)]
        mean = (x * share).sum(others) / count.clamp(min=1)
        centred = x - mean.view(shape)
        variance = (centred * centred * share).sum(others) / count.clamp(min=1)
        with torch.no_grad():
            some = (count > 0).to(x.dtype) * self.momentum  # a batch of nobody teaches nothing
            unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
            self.running_mean.add_(some * (mean.detach() - self.running_mean))
            self.running_var.add_(some * (unbiased - self.running_var))
        scaled = centred * torch.rsqrt(variance + self.eps).view(shape)
        return scaled if self.weight is None else scaled * self.weight.view(shape) + self.bias.view(shape)


def for_tasks(model: nn.Module) -> nn.Module:
    """The model with our batch norms, convolutions and max-pools in the place of torch's; names and values stay."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(model, name, BatchNorm(child))
        elif type(child) is nn.Conv2d:
            plain = child.groups == 1 and child.dilation == (1, 1) and child.padding_mode == "zeros"
            if plain and not isinstance(child.padding, str):
                child.__class__ = Convolution  # the same parameters, settings and hooks
        elif type(child) is nn.MaxPool2d and not child.return_indices:
            child.__class__ = MaxPool
        else:
            for_tasks(child)
    return model
