"""Modules that replace torch's own in a Task: batch norm over valid samples, faster convolutions and pooling.

torch's convolution and pooling of small maps are far below the speed of a processor. The last maps of
ResNet-18 on images of 32x32 have four pixels, then one: a convolution is then a matrix product. The results
are the same, up to the rounding of sums.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from copfl.errors import UsageError
from copfl.kernels.private_torch import mapped

FEW = 4  # outputs of a map up to which, on a CPU, one matrix product is faster than a convolution
MANY = 16  # samples from which this also holds for kernels of one pixel
LARGE = 2**14  # entries from which pooling is worth another memory layout


class Position(NamedTuple):
    """A kernel position along one axis, and where it meets pixels; elsewhere it meets padding."""

    number: int
    outputs: slice
    pixels: slice


def positions_of(size: int, kernel: int, stride: int, padding: int) -> tuple[int, list[Position]]:
    """The number of outputs of an axis of `size` pixels, and the kernel positions that meet a pixel."""
    outputs, positions = (size + 2 * padding - kernel) // stride + 1, []
    for number in range(kernel):
        first = max(0, -((number - padding) // stride))
        last = min(outputs - 1, (size - 1 + padding - number) // stride)
        if first <= last:
            start = first * stride + number - padding
            pixels = slice(start, start + (last - first) * stride + 1, stride)
            positions.append(Position(number, slice(first, last + 1), pixels))
    return outputs, positions


class Convolution(nn.Conv2d):
    """A convolution that is a matrix product on small maps, without positions that only meet padding.

    Where the map is one pixel, those are eight of the nine positions of a kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel_size == (1, 1) and x.shape[0] < MANY and not mapped():
            return super().forward(x)
        axes = zip(x.shape[-2:], self.kernel_size, self.stride, map(int, self.padding), strict=True)
        (height, down), (width, across) = (positions_of(*axis) for axis in axes)
        if not (down and across):
            return super().forward(x)
        trained = torch.is_grad_enabled() and self.weight.requires_grad and not mapped()
        if trained and x.dim() == 4 and x.device.type == "cpu" and height * width <= FEW:
            size = height, width
            y: Tensor = _Product.apply(x, self.weight, size, down, across)  # type: ignore[no-untyped-call]
            return y if self.bias is None else y + self.bias[:, None, None]
        if height * width > 1 or (len(down), len(across)) == self.kernel_size:
            return super().forward(x)
        (rows, columns), (i, j) = (
            [slice(axis[0].pixels.start, axis[-1].pixels.stop) for axis in (down, across)],
            [slice(axis[0].number, axis[-1].number + 1) for axis in (down, across)],
        )
        weight = self.weight[:, :, i, j]
        return F.linear(x[..., rows, columns].flatten(1), weight.flatten(1), self.bias)[..., None, None]


class _Product(torch.autograd.Function):
    """The convolution as a product of each output's pixels with the kernels.

    If the weight has a `.grad` already, its gradient is added there and not passed to autograd, which would
    allocate one of full size, mostly zeros where the map is one pixel, and then add that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        outputs: tuple[int, int],
        down: Sequence[Position],
        across: Sequence[Position],
    ) -> Tensor:
        pruned = [(a.number * weight.shape[3] + b.number, a, b) for a in down for b in across]
        # A single position is cut out of the kernel; to select several costs more than it saves.
        first, last = (pruned[0][0], pruned[0][0]) if len(pruned) == 1 else (0, weight.shape[2:].numel() - 1)
        used = slice(first, last + 1)
        patches = x.new_zeros(x.shape[0], *outputs, x.shape[1], last + 1 - first)  # [b, h, w, in, positions]
        for n, a, b in pruned:
            patches[:, a.outputs, b.outputs, :, n - first] = x[:, :, a.pixels, b.pixels].permute(0, 2, 3, 1)
        kernels = weight.flatten(2)[..., used].flatten(1).contiguous()  # [out, in * positions]
        ctx.save_for_backward(patches, kernels)
        ctx.pruned, ctx.used, ctx.pixels, ctx.shape = pruned, used, x.shape[2:], weight.shape
        ctx.leaf = weight if weight.is_leaf else None
        return (_rows(patches) @ kernels.t()).view(*patches.shape[:3], -1).permute(0, 3, 1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, toward: Tensor) -> tuple[Tensor | None, ...]:
        patches, kernels = ctx.saved_tensors
        toward = toward.permute(0, 2, 3, 1).flatten(0, 2)  # [b * h * w, out]
        x = gradient = None
        if ctx.needs_input_grad[0]:
            back = (toward @ kernels).view(patches.shape)
            x = back.new_zeros(patches.shape[0], *ctx.pixels, patches.shape[3])  # [b, H, W, in]
            for n, a, b in ctx.pruned:
                x[:, a.pixels, b.pixels] += back[:, a.outputs, b.outputs, :, n - ctx.used.start]
            x = x.permute(0, 3, 1, 2).contiguous()
        if ctx.needs_input_grad[1]:
            to = None if ctx.leaf is None else ctx.leaf.grad
            if to is None or not to.is_contiguous():
                to = gradient = toward.new_zeros(ctx.shape)
            part = to.flatten(2)[..., ctx.used].flatten(1)  # a view, [out, in * positions]
            if part.is_contiguous():
                part.addmm_(toward.t(), _rows(patches))
            else:
                part.add_(toward.t() @ _rows(patches))
        return x, gradient, None, None, None


def _rows(patches: Tensor) -> Tensor:
    return patches.flatten(0, 2).flatten(1)  # [b * h * w, in * positions]


class MaxPool(nn.MaxPool2d):
    """Max-pooling that is fast on a CPU, where torch's own is vectorised only in channels-last layout."""

    def forward(self, x: Tensor) -> Tensor:
        eager = not torch.compiler.is_compiling() and not mapped() and x.device.type == "cpu"
        if not (eager and x.dim() == 4 and x.numel() >= LARGE and x.is_contiguous()):
            pooled: Tensor = super().forward(x)
            return pooled
        last = x.detach().contiguous(memory_format=torch.channels_last)
        options = self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        _, largest = F.max_pool2d(last, *options, return_indices=True)
        return x.flatten(2).gather(2, largest.flatten(2)).view(largest.shape)


class BatchNorm(nn.Module):
    """Batch norm over the valid samples of a batch.

    Clients of unequal size are batched with padding, which must not count in the statistics. The Task sets
    `valid` around each call; None: all samples are valid. A frozen one, whose `train` leaves it in evaluation
    mode, stays frozen: it always normalises with its running statistics, and never changes them. What the
    module that it replaces does after the norm, as those of timm do, is its `tail`.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, like: nn.modules.batchnorm._BatchNorm, frozen: bool = False) -> None:
        super().__init__()
        if like.running_mean is None or like.running_var is None:
            raise UsageError(
                "a batch norm without running statistics cannot be evaluated; leave track_running_stats on"
            )
        self.weight, self.bias, self.eps = like.weight, like.bias, like.eps
        mode = like.training
        self.frozen = frozen or not like.train().training
        like.train(mode)
        self.momentum = 0.0 if self.frozen else 0.1 if like.momentum is None else like.momentum
        self.register_buffer("running_mean", like.running_mean)
        self.register_buffer("running_var", like.running_var)
        self.valid: Tensor | None = None
        self.tail = _after_the_norm(like)

    def train(self, mode: bool = True) -> BatchNorm:
        """In training mode, unless it is frozen."""
        return super().train(mode and not self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        normalised = self._normalised(x)
        return normalised if self.tail is None else self.tail(normalised)

    def _normalised(self, x: Tensor) -> Tensor:
        values = x.numel() // x.shape[1]
        if not self.training or (self.valid is None and values > 1):
            running = self.running_mean, self.running_var
            return F.batch_norm(x, *running, self.weight, self.bias, self.training, self.momentum, self.eps)
        others = [0, *range(2, x.dim())]
        valid = x.new_ones(x.shape[0]) if self.valid is None else self.valid.to(x.dtype)
        weight = valid.view(-1, *[1] * (x.dim() - 1))
        count = valid.sum() * (values // x.shape[0])
        shape = [1, -1, *[1] * (x.dim() - 2)]
        mean = (x * weight).sum(others) / count.clamp(min=1)
        centred = x - mean.view(shape)
        variance = (centred * centred * weight).sum(others) / count.clamp(min=1)
        with torch.no_grad():
            # A batch without valid samples changes nothing.
            momentum = (count > 0).to(x.dtype) * self.momentum
            unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
            self.running_mean.add_(momentum * (mean.detach() - self.running_mean))
            self.running_var.add_(momentum * (unbiased - self.running_var))
        scaled = centred * torch.rsqrt(variance + self.eps).view(shape)
        return scaled if self.weight is None else scaled * self.weight.view(shape) + self.bias.view(shape)


def _after_the_norm(like: nn.modules.batchnorm._BatchNorm) -> nn.Module | None:
    """The dropout and activation of timm's batch norms; None for torch's own. Another one is refused."""
    kind = type(like)
    if kind.forward in (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward):
        return None
    parts = [getattr(like, name, None) for name in ("drop", "act")]
    tail = nn.Sequential(*(part for part in parts if isinstance(part, nn.Module)))
    if kind.__module__.startswith("timm.") and len(tail) == 2 and not list(tail.parameters()):
        return tail
    raise UsageError(
        f"the model has a {kind.__name__}, a batch norm with a forward of its own, which copfl cannot batch "
        "over clients; use torch's own batch norm and put what follows it into a module of its own"
    )


def is_plain(conv: nn.Conv2d) -> bool:
    """Whether the convolution has no groups, dilation or other padding than zeros."""
    return conv.groups == 1 and conv.dilation == (1, 1) and pads_with_zeros(conv)


def is_grouped(conv: nn.Conv2d) -> bool:
    """Whether it has groups of several channels: torch has kernels for depthwise ones."""
    return 1 < conv.groups < conv.in_channels and pads_with_zeros(conv)


def pads_with_zeros(conv: nn.Conv2d) -> bool:
    """Whether the convolution is padded with zeros, the same number at both ends of an axis."""
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def for_tasks(model: nn.Module, partly_frozen: bool = False) -> nn.Module:
    """The model with the batch norms, convolutions and max-pools of this module; names and values stay.

    In a partly frozen model, a batch norm without a parameter that requires a gradient is frozen.
    """
    for name, child in list(model.named_children()):
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            trained = any(p.requires_grad for p in child.parameters())
            setattr(model, name, BatchNorm(child, frozen=partly_frozen and not trained))
        elif type(child) is nn.Conv2d:
            if is_plain(child):
                child.__class__ = Convolution  # the same parameters, settings and hooks
        elif type(child) is nn.MaxPool2d and not child.return_indices:
            child.__class__ = MaxPool
        else:
            for_tasks(child, partly_frozen)
    return model


class Structure(NamedTuple):
    """The modules of a model."""

    norms: list[BatchNorm]
    others: list[nn.Module]
    tied: bool  # whether a parameter or buffer has several names


@lru_cache(maxsize=1)  # to look through all modules takes a hundredth of a small step
def structure_of(model: nn.Module) -> Structure:
    """The batch norms of a model and its other modules, and whether any weights are tied."""
    named = model.named_parameters, model.named_buffers
    tied = any(len(list(each())) < len(list(each(remove_duplicate=False))) for each in named)
    norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
    return Structure(norms, [m for m in model.modules() if not isinstance(m, BatchNorm)], tied)


def in_mode(model: nn.Module, training: bool) -> Structure:
    """The modules of a model, which are in training or in evaluation mode now; batch norms may not be.

    To set the mode of all modules takes a tenth of a small step, so it is done where one has another mode.
    """
    structure = structure_of(model)
    if any(module.training != training for module in structure.others):
        model.train(training)
    return structure


# Inputs and outputs of any model

# A batch: a tensor, or a dict of tensors if a sample has several arrays. Any, as only the model knows which.
Inputs = Any


def arguments_of(model: nn.Module, x: Inputs) -> tuple[tuple[Inputs, ...], dict[str, Tensor]]:
    """A call's positional and keyword arguments: a dict's arrays as keywords, if the model has them."""
    if isinstance(x, dict) and _takes(type(model).forward, tuple(x)):
        return (), x
    return (x,), {}


@lru_cache(maxsize=64)
def _takes(forward: Callable[..., Any], names: tuple[str, ...]) -> bool:
    parameters = inspect.signature(forward).parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or all(n in parameters for n in names)


@contextlib.contextmanager
def mappable_attention() -> Iterator[None]:
    """Attention in operations that vmap can batch: torch's fused ones have no batching rule."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: a tensor, or the field `logits` of a transformers record."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"the model returned {type(output).__name__}; it must return a tensor, or a record with a field "
            "logits. Of transformers take a model with a head, or hf:FOLDER with --set model.task=embedding"
        )
    return logits
