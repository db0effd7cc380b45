"""The two layers of a folded model whose backward pass is written by hand: a convolution and a batch norm per client.

Autograd could do both, in several times as many passes over memory. On a GPU the passes are kernels of our own, see
`gpu_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.elementwise import compiles

Pair = tuple[int, int]

# Windows are kept as the GPU's kernels write them, [..., C, kh, kw], like a convolution's weights; or, on a CPU, as
# memory lies, [..., kh, kw, C]: whole pixels are copied and added, and it is the (far smaller) weights that are turned.


def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The windows of x [B, H, W, C] as rows [B, Ho, Wo, C * kh * kw]."""
    high, wide = (
        (size + 2 * p - k) // s + 1 for size, k, s, p in zip(x.shape[1:3], kernel, stride, padding, strict=True)
    )
    if kernel == (1, 1) and padding == (0, 0):
        return x[:, :: stride[0], :: stride[1]]
    if compiles(x):
        from copfl import gpu_kernels

        return gpu_kernels.patches(x, (high, wide), kernel, stride, padding).flatten(3)
    if padding != (0, 0):
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    rows = x.new_empty(x.shape[0], high, wide, *kernel, x.shape[3])
    for i, j, down, across in _taps(kernel, stride, high, wide):
        rows[:, :, :, i, j] = x[:, down, across]
    return rows.flatten(3)


def unpatch(rows: Tensor, size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The sum of windows [B, Ho, Wo, C * kh * kw] back where they came from, [B, H, W, C]: the adjoint of `patches`."""
    batch, high, wide, entries = rows.shape
    channels = entries // (kernel[0] * kernel[1])
    if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0):
        return rows
    if compiles(rows):
        from copfl import gpu_kernels

        return gpu_kernels.unpatch(rows.view(batch, high, wide, channels, *kernel), size, stride, padding)
    x = rows.new_zeros(batch, size[0] + 2 * padding[0], size[1] + 2 * padding[1], channels)
    rows = rows.view(batch, high, wide, *kernel, channels)
    for i, j, down, across in _taps(kernel, stride, high, wide):
        x[:, down, across] += rows[:, :, :, i, j]
    return x[:, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def _taps(kernel: Pair, stride: Pair, high: int, wide: int) -> Iterator[tuple[int, int, slice, slice]]:
    """Each tap of a kernel, and the pixels that it meets."""
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            yield i, j, slice(i, i + stride[0] * high, stride[0]), slice(j, j + stride[1] * wide, stride[1])


def turned(weight: Tensor) -> Tensor:
    """Kernels [N, O, C, kh, kw] as matrices [N, O, C * kh * kw] whose columns are in the order of `patches`."""
    return weight.flatten(2) if _as_they_are(weight) else weight.movedim(2, 4).flatten(2)


def _as_they_are(weight: Tensor) -> bool:
    return weight.shape[3:] == (1, 1) or compiles(weight)


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None, place: Tensor | None = None) -> Tensor:
    """a @ b over the clients, in this dtype, back in a's own; written to `place` where that is given."""
    if place is None:
        return torch.bmm(a, b) if dtype is None else torch.bmm(a.to(dtype), b.to(dtype)).to(a.dtype)
    flat = place.flatten(2)
    return torch.bmm(a, b, out=flat) if dtype is None else flat.copy_(torch.bmm(a.to(dtype), b.to(dtype)))


class _Convolve(torch.autograd.Function):
    """x [N*B, H, W, C] with a kernel per client [N, O, C, kh, kw]: [N*B, Ho, Wo, O].

    The kernels' gradient is written to `place` where that is given: to its part of a long vector, say.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        n: int,
        kernel: Any,
        stride: Any,
        padding: Any,
        products: torch.dtype | None,
        place: Tensor | None,
    ) -> Tensor:
        windows = patches(x, kernel, stride, padding)
        high, wide = windows.shape[1:3]
        rows = windows.reshape(n, -1, windows.shape[3])  # [N, B*Ho*Wo, C*kh*kw]
        ctx.save_for_backward(rows, weight)
        ctx.how = (tuple(x.shape), (high, wide), kernel, stride, padding, products, place)
        y = product(rows, turned(weight).transpose(1, 2), products)
        return y.view(x.shape[0], high, wide, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        shape, out, kernel, stride, padding, products, place = ctx.how
        grad = grads[0].reshape(weight.shape[0], -1, weight.shape[1])  # [N, B*Ho*Wo, O]
        if _as_they_are(weight):
            to_weight = product(grad.transpose(1, 2), rows, products, place).view(weight.shape)
        else:
            n, outs, channels = weight.shape[:3]
            found = product(grad.transpose(1, 2), rows, products).view(n, outs, *kernel, channels).movedim(4, 2)
            to_weight = found if place is None else place.copy_(found)
        to_x = None
        if ctx.needs_input_grad[0]:
            back = product(grad, turned(weight), products).view(shape[0], *out, -1)
            to_x = unpatch(back, shape[1:3], kernel, stride, padding)
        return to_x, to_weight, None, None, None, None, None, None


class _Normalise(torch.autograd.Function):
    """Batch norm of rows [N, R, C] over R, only those with a share; also the mean and the variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, share: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # nobody asks for those of the mean and the variance
        if compiles(x):
            from copfl import gpu_kernels

            y, mean, var, inverse = gpu_kernels.normalise(x, weight, bias, share, eps)
        else:
            y, mean, var, inverse = normalised(x, weight, bias, share, eps)
        ctx.save_for_backward(x, weight, mean, inverse, share)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, share = ctx.saved_tensors
        if compiles(x):
            from copfl import gpu_kernels

            back = gpu_kernels.normalise_back(grads[0], x, weight, mean, inverse, share)
        else:
            back = normalised_back(grads[0], x, weight, mean, inverse, share)
        return (*back, None, None)


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor, share: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows normalised, their mean and variance, and 1 / its root."""
    if share is None:
        var, mean = torch.var_mean(x, 1, correction=0)
    else:
        count = share.sum(1, keepdim=True).clamp(min=1)
        mean = torch.einsum("nrc,nr->nc", x, share) / count
        var = torch.einsum("nrc,nr->nc", (x - mean[:, None]) ** 2, share) / count
    inverse = torch.rsqrt(var + eps)
    scale = weight * inverse
    return x * scale[:, None] + (bias - mean * scale)[:, None], mean, var, inverse


def normalised_back(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, share: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `normalised` with respect to the rows, the weight and the bias."""
    scaled = (x - mean[:, None]) * inverse[:, None]
    to_bias = grad.sum(1)
    to_weight = (grad * scaled).sum(1)
    # d/dx of (x - mean) / std: the mean and the variance depend on every row that has a share.
    part = 1 / x.shape[1] if share is None else (share / share.sum(1, keepdim=True).clamp(min=1))[..., None]
    pull = (to_bias[:, None] + scaled * to_weight[:, None]) * part
    return (weight * inverse)[:, None] * (grad - pull), to_weight, to_bias


convolve: Callable[..., Tensor] = _Convolve.apply
normalise: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Normalise.apply
