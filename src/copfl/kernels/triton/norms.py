"""Batch norm, forward and back, each in one kernel."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from copfl.kernels.triton.compiling import launch


@triton.jit
def _normalise(
    x, weight, bias, share, y, mean, var, inverse, R, C, weight_stride, bias_stride,
    eps: tl.constexpr,  # an argument at run time would be rounded to 32 bits
    SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < C
    total = tl.zeros([COLUMNS], dtype=mean.dtype.element_ty)
    count = tl.zeros([COLUMNS], dtype=mean.dtype.element_ty)
    for start in range(0, R, ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < R)[:, None] & inside[None]
        value = tl.load(x + (n * R + r[:, None]) * C + c[None], mask=here, other=0.0)
        if SHARED:
            part = tl.load(share + n * R + r, mask=r < R, other=0.0)
            total += tl.sum(value * part[:, None], 0)
            count += tl.sum(part, 0)
        else:
            total += tl.sum(value, 0)
    if SHARED:
        count = tl.maximum(count, 1.0)
    else:
        count += R
    middle = total / count
    spread = tl.zeros([COLUMNS], dtype=mean.dtype.element_ty)
    for start in range(0, R, ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < R)[:, None] & inside[None]
        value = tl.load(x + (n * R + r[:, None]) * C + c[None], mask=here, other=0.0)
        away = tl.where(here, value - middle[None], 0.0)
        if SHARED:
            part = tl.load(share + n * R + r, mask=r < R, other=0.0)
            spread += tl.sum(away * away * part[:, None], 0)
        else:
            spread += tl.sum(away * away, 0)
    spread = spread / count
    scale = 1.0 / tl.sqrt(spread + eps)
    tl.store(mean + n * C + c, middle, mask=inside)
    tl.store(var + n * C + c, spread, mask=inside)
    tl.store(inverse + n * C + c, scale, mask=inside)
    factor = tl.load(weight + n * weight_stride + c, mask=inside, other=0.0) * scale
    shift = tl.load(bias + n * bias_stride + c, mask=inside, other=0.0) - middle * factor
    for start in range(0, R, ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < R)[:, None] & inside[None]
        at = (n * R + r[:, None]) * C + c[None]
        value = tl.load(x + at, mask=here, other=0.0)
        tl.store(y + at, value * factor[None] + shift[None], mask=here)


@triton.jit
def _normalise_back(
    grad, x, weight, share, mean, inverse, to_x, to_weight, to_bias, R, C, weight_stride,
    SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < C
    middle = tl.load(mean + n * C + c, mask=inside, other=0.0)
    scale = tl.load(inverse + n * C + c, mask=inside, other=0.0)
    sums = tl.zeros([COLUMNS], dtype=mean.dtype.element_ty)
    products = tl.zeros([COLUMNS], dtype=mean.dtype.element_ty)
    count = tl.zeros([COLUMNS], dtype=mean.dtype.element_ty)
    for start in range(0, R, ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < R)[:, None] & inside[None]
        at = (n * R + r[:, None]) * C + c[None]
        g = tl.load(grad + at, mask=here, other=0.0)
        scaled = (tl.load(x + at, mask=here, other=0.0) - middle[None]) * scale[None]
        sums += tl.sum(g, 0)
        products += tl.sum(g * scaled, 0)
        if SHARED:
            count += tl.sum(tl.load(share + n * R + r, mask=r < R, other=0.0), 0)
    if SHARED:
        count = tl.maximum(count, 1.0)
    else:
        count += R
    tl.store(to_bias + n * C + c, sums, mask=inside)
    tl.store(to_weight + n * C + c, products, mask=inside)
    factor = tl.load(weight + n * weight_stride + c, mask=inside, other=0.0) * scale
    for start in range(0, R, ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < R)[:, None] & inside[None]
        at = (n * R + r[:, None]) * C + c[None]
        g = tl.load(grad + at, mask=here, other=0.0)
        scaled = (tl.load(x + at, mask=here, other=0.0) - middle[None]) * scale[None]
        pull = (sums[None] + scaled * products[None]) / count[None]
        if SHARED:
            pull = pull * tl.load(share + n * R + r, mask=r < R, other=0.0)[:, None]
        tl.store(to_x + at, factor[None] * (g - pull), mask=here)


def _tile(rows: int) -> tuple[int, int]:
    return min(128, triton.next_power_of_2(rows)), 16


def normalise(x: Tensor, weight: Tensor, bias: Tensor, share: Tensor | None, eps: float):
    """Batch norm of rows [N, R, C] over R: the result, the mean, the variance and 1 / its root."""
    x = x.contiguous()
    n, r, c = x.shape
    y = torch.empty_like(x)
    mean, var, inverse = (torch.empty(n, c, dtype=x.dtype, device=x.device) for _ in range(3))
    height, width = _tile(r)
    launch(
        _normalise, (n, triton.cdiv(c, width)),
        x, weight, bias, x if share is None else share.contiguous(), y, mean, var, inverse, r, c,
        weight.stride(0), bias.stride(0), eps=eps, SHARED=share is not None, ROWS=height, COLUMNS=width,
    )  # fmt: skip
    return y, mean, var, inverse


def normalise_back(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, share: Tensor | None
):
    """The gradients of `normalise` with respect to the rows, the weight and the bias."""
    grad, x = grad.contiguous(), x.contiguous()
    n, r, c = x.shape
    to_x = torch.empty_like(x)
    to_weight, to_bias = (torch.empty(n, c, dtype=x.dtype, device=x.device) for _ in range(2))
    height, width = _tile(r)
    launch(
        _normalise_back, (n, triton.cdiv(c, width)),
        grad, x, weight, x if share is None else share.contiguous(), mean, inverse, to_x, to_weight, to_bias,
        r, c, weight.stride(0), SHARED=share is not None, ROWS=height, COLUMNS=width,
    )  # fmt: skip
    return to_x, to_weight, to_bias
