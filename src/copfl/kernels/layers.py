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

from copfl.kernels.fused import compiles

Pair = tuple[int, int]

# A window is a row of numbers: pixel by pixel, [kh, kw, C], as memory lies, so that whole pixels are copied and added;
# or [C, kh, kw], as weights lie. Where weights lie otherwise than windows they are turned: always on a CPU, on a GPU
# where there are at least as many windows as kernels.


def pixel_by_pixel(weight: Tensor, windows: int) -> bool:
    """How so many windows of each client are kept for kernels [N, O, C, kh, kw]; 1 x 1 is both."""
    return weight.shape[3:] != (1, 1) and (not compiles(weight) or windows >= weight.shape[1])


def outputs(size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """How many windows there are, down and across."""
    high, wide = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, kernel, stride, padding, strict=True))
    return high, wide


def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, pixels: bool = True) -> Tensor:
    """The windows of x [B, H, W, C] as rows [B, Ho, Wo, K], K = C * kh * kw; on a GPU, with zeros behind them."""
    high, wide = outputs((x.shape[1], x.shape[2]), kernel, stride, padding)
    if kernel == (1, 1) and padding == (0, 0):
        return x[:, :: stride[0], :: stride[1]]
    if compiles(x):
        from copfl.kernels.triton import patches as triton_patches

        return triton_patches.patches(x, (high, wide), kernel, stride, padding, pixels)
    if padding != (0, 0):
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    rows = x.new_empty(x.shape[0], high, wide, *kernel, x.shape[3])
    for i, j, down, across in _taps(kernel, stride, high, wide):
        rows[:, :, :, i, j] = x[:, down, across]
    return rows.flatten(3)


def unpatch(
    rows: Tensor, size: Pair, channels: int, kernel: Pair, stride: Pair, padding: Pair, pixels: bool = True
) -> Tensor:
    """The sum of windows [B, Ho, Wo, K] back where they came from, [B, H, W, C]: the adjoint of `patches`."""
    batch, high, wide, _ = rows.shape
    if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0):
        return rows
    if compiles(rows):
        from copfl.kernels.triton import patches as triton_patches

        return triton_patches.unpatch(rows, size, channels, kernel, stride, padding, pixels)
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


def turned(weight: Tensor, entries: int, pixels: bool) -> Tensor:
    """Kernels [N, O, C, kh, kw] as matrices [N, O, K] whose columns are in the order of `patches`, K `entries`."""
    if not pixels:
        return weight.flatten(2)
    matrix = weight.movedim(2, 4).flatten(2)
    return matrix if matrix.shape[2] == entries else F.pad(matrix, (0, entries - matrix.shape[2]))


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None, place: Tensor | None = None) -> Tensor:
    """a @ b over the clients, in this dtype, back in a's own; written to `place` where that is given."""
    if dtype is None:
        return torch.bmm(a, b) if place is None else torch.bmm(a, b, out=place.flatten(2))
    left, right = a.to(dtype), b.to(dtype)
    if (
        not a.is_cuda
    ):  # few CPUs can multiply in bf16, and on one that cannot it took torch two hundred times as long
        left, right = left.to(a.dtype), right.to(a.dtype)
    short = torch.bmm(left, right).to(dtype)
    return short.to(a.dtype) if place is None else place.flatten(2).copy_(short)


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
        high, wide = outputs((x.shape[1], x.shape[2]), kernel, stride, padding)
        pixels = pixel_by_pixel(weight, x.shape[0] // n * high * wide)
        seen = patches(x, kernel, stride, padding, pixels)
        rows = seen.reshape(n, -1, seen.shape[3])  # [N, B*Ho*Wo, K]
        ctx.save_for_backward(rows, weight)
        ctx.how = (tuple(x.shape), (high, wide), kernel, stride, padding, products, place, pixels)
        y = product(rows, turned(weight, rows.shape[2], pixels).transpose(1, 2), products)
        return y.view(x.shape[0], high, wide, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        shape, out, kernel, stride, padding, products, place, pixels = ctx.how
        n, outs, channels = weight.shape[:3]
        grad = grads[0].reshape(n, -1, outs)  # [N, B*Ho*Wo, O]
        if pixels:
            found = product(grad.transpose(1, 2), rows, products)[..., : weight[0, 0].numel()]
            found = found.reshape(n, outs, *kernel, channels).movedim(4, 2)
            to_weight = found if place is None else place.copy_(found)
        else:
            to_weight = product(grad.transpose(1, 2), rows, products, place).view(weight.shape)
        to_x = None
        if ctx.needs_input_grad[0]:
            back = product(grad, turned(weight, rows.shape[2], pixels), products).view(shape[0], *out, -1)
            to_x = unpatch(back, shape[1:3], channels, kernel, stride, padding, pixels)
        return to_x, to_weight, None, None, None, None, None, None


class _Normalise(torch.autograd.Function):
    """Batch norm of rows [N, R, C] over R, only those with a share; also the mean and the variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, share: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # nobody asks for those of the mean and the variance
        if compiles(x):
            from copfl.kernels.triton import norms

            y, mean, var, inverse = norms.normalise(x, weight, bias, share, eps)
        else:
            y, mean, var, inverse = normalised(x, weight, bias, share, eps)
        ctx.save_for_backward(x, weight, mean, inverse, share)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, share = ctx.saved_tensors
        if compiles(x):
            from copfl.kernels.triton import norms

            back = norms.normalise_back(grads[0], x, weight, mean, inverse, share)
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
