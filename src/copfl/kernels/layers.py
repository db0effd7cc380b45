"""The layers of a batched model with a hand-written backward pass: a convolution and a batch norm per client.

Autograd could do both, in several times as many passes over memory. On a GPU the passes are kernels of our
own, in `kernels.triton`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.kernels.fused import compiles

Pair = tuple[int, int]
FEW = 32  # rows of a product that is bound by reading the other factor
SMALL = 2**12  # entries of a product that is one tile of a GPU's kernel


class Geometry(NamedTuple):
    """Of a convolution, down and across."""

    kernel: Pair
    stride: Pair
    padding: Pair

    def outputs(self, size: Pair) -> Pair:
        """The number of patches of a map of this size."""
        high, wide = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, *self, strict=True))
        return high, wide

    def positions(self, high: int, wide: int) -> Iterator[tuple[int, int, slice, slice]]:
        """Each position of the kernel, and the pixels that it meets."""
        down, across = self.stride
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield i, j, slice(i, i + down * high, down), slice(j, j + across * wide, across)


# A patch is a row of numbers, in one of two orders: by pixel, [kh, kw, C], as in memory, so that whole pixels
# are copied and added; or by channel, [C, kh, kw], as in weights. Weights are permuted to the order of the
# patches: always on a CPU, on a GPU where there are at least as many patches as kernels.


def patches(x: Tensor, geometry: Geometry, pixels: bool = True) -> Tensor:
    """The patches of x [B, H, W, C] as rows [B, Ho, Wo, K], K = C * kh * kw; on a GPU, padded with zeros."""
    kernel, stride, padding = geometry
    high, wide = geometry.outputs((x.shape[1], x.shape[2]))
    if kernel == (1, 1) and padding == (0, 0):
        return x[:, :: stride[0], :: stride[1]]
    if compiles(x):
        from copfl.kernels.triton import patches as triton_patches

        return triton_patches.patches(x, (high, wide), kernel, stride, padding, pixels)
    if padding != (0, 0):
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    rows = x.new_empty(x.shape[0], high, wide, *kernel, x.shape[3])
    for i, j, down, across in geometry.positions(high, wide):
        rows[:, :, :, i, j] = x[:, down, across]
    return rows.flatten(3)


def unpatch(rows: Tensor, size: Pair, channels: int, geometry: Geometry, pixels: bool = True) -> Tensor:
    """The sum of patches [B, Ho, Wo, K] at their pixels, [B, H, W, C]: the adjoint of `patches`."""
    kernel, stride, padding = geometry
    batch, high, wide, _ = rows.shape
    if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0):
        return rows
    if compiles(rows):
        from copfl.kernels.triton import patches as triton_patches

        return triton_patches.unpatch(rows, size, channels, kernel, stride, padding, pixels)
    x = rows.new_zeros(batch, size[0] + 2 * padding[0], size[1] + 2 * padding[1], channels)
    rows = rows.view(batch, high, wide, *kernel, channels)
    for i, j, down, across in geometry.positions(high, wide):
        x[:, down, across] += rows[:, :, :, i, j]
    return x[:, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def matrices(weight: Tensor, entries: int, pixels: bool) -> Tensor:
    """Kernels [N, O, C, kh, kw] as matrices [N, O, K], columns in the order of `patches`, K `entries`."""
    if not pixels:
        return weight.flatten(2)
    matrix = weight.movedim(2, 4).flatten(2)
    return matrix if matrix.shape[2] == entries else F.pad(matrix, (0, entries - matrix.shape[2]))


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
    """a @ b over the clients, in this dtype, converted to that of a; written to `out` where that is given."""
    if dtype is None and out is None and a.shape[1] <= FEW and compiles(a):  # the other way it takes longer
        return torch.bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2).contiguous()
    if dtype is None:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out.flatten(2))
    left, right = a.to(dtype), b.to(dtype)
    if not a.is_cuda:  # few CPUs multiply in bf16, and on others torch takes two hundred times as long
        left, right = left.to(a.dtype), right.to(a.dtype)
    short = torch.bmm(left, right).to(dtype)
    return short.to(a.dtype) if out is None else out.flatten(2).copy_(short)


def summed_products(grad: Tensor, rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The products of gradients [N, P, O] and patches [N, P, K], summed over the patches: [N, O, K].

    A few long sums would occupy a small part of a GPU, so each is split.
    """
    parts = math.gcd(grad.shape[1], 16) if grad.shape[2] * rows.shape[2] <= SMALL and compiles(grad) else 1
    grad, rows = (t.reshape(len(t) * parts, -1, t.shape[2]) for t in (grad, rows))
    found = product(grad.transpose(1, 2), rows, dtype)
    return found if parts == 1 else found.view(-1, parts, *found.shape[1:]).sum(1)


class _Convolve(torch.autograd.Function):
    """x [N*B, H, W, C] with a kernel per client [N, O, C, kh, kw]: [N*B, Ho, Wo, O].

    The kernels' gradient is written to `out` where that is given, such as a part of a long vector.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        geometry: Geometry,
        products: torch.dtype | None,
        out: Tensor | None,
    ) -> Tensor:
        n = weight.shape[0]
        high, wide = geometry.outputs((x.shape[1], x.shape[2]))
        many = not compiles(weight) or x.shape[0] // n * high * wide >= weight.shape[1]
        pixels = weight.shape[3:] != (1, 1) and many  # for 1 x 1 both orders are equal
        found = patches(x, geometry, pixels)
        rows = found.reshape(n, -1, found.shape[3])  # [N, B*Ho*Wo, K]
        matrix = matrices(weight, rows.shape[2], pixels)
        ctx.save_for_backward(rows, matrix)
        ctx.shape, ctx.size, ctx.geometry, ctx.pixels = x.shape, (high, wide), geometry, pixels
        ctx.products, ctx.out, ctx.kernels = products, out, weight.shape
        y = product(rows, matrix.transpose(1, 2), products)
        return y.view(x.shape[0], high, wide, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrix = ctx.saved_tensors
        n, outs, channels, *kernel = ctx.kernels
        grad = grads[0].reshape(n, -1, outs)  # [N, B*Ho*Wo, O]
        if ctx.pixels:
            found = summed_products(grad, rows, ctx.products)[..., : ctx.kernels[2:].numel()]
            found = found.reshape(n, outs, *kernel, channels).movedim(4, 2)
            to_weight = found if ctx.out is None else ctx.out.copy_(found)
        else:
            to_weight = product(grad.transpose(1, 2), rows, ctx.products, ctx.out).view(ctx.kernels)
        to_x = None
        if ctx.needs_input_grad[0]:
            back = product(grad, matrix, ctx.products)
            back = back.view(ctx.shape[0], *ctx.size, -1)
            to_x = unpatch(back, ctx.shape[1:3], channels, ctx.geometry, ctx.pixels)
        return to_x, to_weight, None, None, None


class Groups(NamedTuple):
    """Of a convolution with groups, down and across."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


class _ConvolveGroups(torch.autograd.Function):
    """x [N*B, H, W, C] with a kernel per client [N, O, C / groups, kh, kw]: [N*B, Ho, Wo, O], by Triton.

    The kernels' gradient is written to `out` where that is given, such as a part of a long vector.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Groups, out: Tensor | None) -> Tensor:
        from copfl.kernels.triton import grouped

        spans = [(k - 1) * d + 1 for k, d in zip(weight.shape[3:], how.dilation, strict=True)]
        high, wide = Geometry((spans[0], spans[1]), how.stride, how.padding).outputs((x.shape[1], x.shape[2]))
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.out = how, out
        return grouped.convolve(x, weight, (high, wide), how.groups, how[:3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from copfl.kernels.triton import grouped

        (x, weight), how, to_x = ctx.saved_tensors, ctx.how, None
        to_weight = grouped.to_kernels(x, grads[0], weight, how.groups, how[:3], ctx.out)
        if ctx.needs_input_grad[0]:
            to_x = grouped.convolve(grads[0], weight, x.shape[1:3], how.groups, how[:3], back=True)
        return to_x, to_weight, None, None


def convolve_groups(x: Tensor, weight: Tensor, how: Groups, out: Tensor | None = None) -> Tensor:
    """`convolve` with groups; without Triton as one convolution with the groups of all clients."""
    if compiles(x):
        y: Tensor = _ConvolveGroups.apply(x, weight, how, out)  # type: ignore[no-untyped-call]
        return y
    n = weight.shape[0]
    images = x.reshape(n, -1, *x.shape[1:]).permute(1, 0, 4, 2, 3).flatten(1, 2)  # [B, N*C, H, W]
    stride, padding, dilation, groups = how
    maps = F.conv2d(images, weight.flatten(0, 1), None, stride, padding, dilation, n * groups)
    return maps.reshape(len(maps), n, -1, *maps.shape[2:]).permute(1, 0, 3, 4, 2).flatten(0, 1)


class _Normalise(torch.autograd.Function):
    """Batch norm of rows [N, R, C] over R, weighted by `weights` [N, R]; also the mean and the variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, weights: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # those of the mean and the variance are not needed
        if compiles(x):
            from copfl.kernels.triton import norms

            y, mean, var, inverse = norms.normalise(x, weight, bias, weights, eps)
        else:
            y, mean, var, inverse = normalised(x, weight, bias, weights, eps)
        ctx.save_for_backward(x, weight, mean, inverse, weights)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, weights = ctx.saved_tensors
        if compiles(x):
            from copfl.kernels.triton import norms

            back = norms.normalise_back(grads[0], x, weight, mean, inverse, weights)
        else:
            back = normalised_back(grads[0], x, weight, mean, inverse, weights)
        return (*back, None, None)


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor, weights: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows normalised, their mean and variance, and 1 / its root."""
    if weights is None:
        var, mean = torch.var_mean(x, 1, correction=0)
    else:
        count = weights.sum(1, keepdim=True).clamp(min=1)
        mean = torch.einsum("nrc,nr->nc", x, weights) / count
        var = torch.einsum("nrc,nr->nc", (x - mean[:, None]) ** 2, weights) / count
    inverse = torch.rsqrt(var + eps)
    scale = weight * inverse
    return x * scale[:, None] + (bias - mean * scale)[:, None], mean, var, inverse


def normalised_back(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `normalised` with respect to the rows, the weight and the bias."""
    scaled = (x - mean[:, None]) * inverse[:, None]
    to_bias = grad.sum(1)
    to_weight = (grad * scaled).sum(1)
    # d/dx of (x - mean) / std: the mean and the variance depend on every row with a weight.
    part: float | Tensor = 1 / x.shape[1]
    if weights is not None:
        part = (weights / weights.sum(1, keepdim=True).clamp(min=1))[..., None]
    pull = (to_bias[:, None] + scaled * to_weight[:, None]) * part
    return (weight * inverse)[:, None] * (grad - pull), to_weight, to_bias


convolve: Callable[..., Tensor] = _Convolve.apply
normalise: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Normalise.apply
