"""Triton kernels for what PyTorch does in too many passes: a convolution's windows, batch norm, and a row's threshold.

Only imported where there is a GPU and Triton. The same in plain PyTorch is in `folded` and `selection`; where
Triton is installed, a test runs these in its interpreter and holds the two equal.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gather(
    x, rows, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    j = place % KW
    rest = place // KW
    i = rest % KH
    rest = rest // KH
    c = rest % C
    rest = rest // C
    wo = rest % WO
    rest = rest // WO
    ho = rest % HO
    b = rest // HO
    h = ho * SH + i - PH
    w = wo * SW + j - PW
    real = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    value = tl.load(x + ((b * H + h) * W + w) * C + c, mask=real, other=0.0)
    tl.store(rows + place, value, mask=inside)


@triton.jit
def _scatter(
    rows, x, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    c = place % C
    rest = place // C
    w = rest % W
    rest = rest // W
    h = rest % H
    b = rest // H
    value = tl.zeros([BLOCK], dtype=rows.dtype.element_ty)
    for i in tl.static_range(KH):
        down = h + PH - i
        high = down // SH
        fits = inside & (down >= 0) & (down % SH == 0) & (high < HO)
        for j in tl.static_range(KW):
            across = w + PW - j
            wide = across // SW
            real = fits & (across >= 0) & (across % SW == 0) & (wide < WO)
            at = (((b * HO + high) * WO + wide) * C + c) * (KH * KW) + i * KW + j
            value += tl.load(rows + at, mask=real, other=0.0)
    tl.store(x + place, value, mask=inside)


def _index(numbers: int):
    return tl.int32 if numbers < 2**31 - BLOCK else tl.int64


def patches(x: Tensor, out: tuple[int, int], kernel, stride, padding) -> Tensor:
    """The windows of x [B, H, W, C] as [B, Ho, Wo, C, kh, kw]."""
    x = x.contiguous()
    batch, high, wide, channels = x.shape
    rows = torch.empty(batch, *out, channels, *kernel, dtype=x.dtype, device=x.device)
    total = rows.numel()
    _gather[(triton.cdiv(total, BLOCK),)](
        x, rows, total, high, wide, channels, *out, *kernel, *stride, *padding, BLOCK=BLOCK, INDEX=_index(total)
    )
    return rows


def unpatch(rows: Tensor, size: tuple[int, int], stride, padding) -> Tensor:
    """The adjoint of `patches`: [B, H, W, C]."""
    rows = rows.contiguous()
    batch, ho, wo, channels, kh, kw = rows.shape
    x = torch.empty(batch, *size, channels, dtype=rows.dtype, device=rows.device)
    total = x.numel()
    _scatter[(triton.cdiv(total, BLOCK),)](
        rows, x, total, *size, channels, ho, wo, kh, kw, *stride, *padding, BLOCK=BLOCK, INDEX=_index(rows.numel())
    )
    return x


@triton.jit
def _digits(
    keys, low, counts, length, stride, spare,
    PLACE: tl.constexpr, TOP: tl.constexpr, TIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the keys whose higher digits are those of `low`, how many have each digit at PLACE.

    With TIES the keys are the places, counted from behind, of the entries that equal `spare`'s threshold.
    """
    row = tl.program_id(1).to(tl.int64)
    if TIES and tl.load(spare + row * 3 + 2) == 0:  # all that are equal are taken: there is nothing to choose
        return
    prefix = 0 if TOP else tl.load(low + row) >> (PLACE + 4)
    total = tl.zeros([32], dtype=tl.int32)
    for part in tl.static_range(8):
        place = (tl.program_id(0) * 8 + part) * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(keys + row * stride + place, mask=place < length, other=-1)
        if TIES:
            key = tl.where((place < length) & (key == tl.load(spare + row * 3)), length - 1 - place, -1).to(tl.int64)
        fits = key >= 0
        if not TOP:  # the highest digit has nothing above it
            fits = fits & ((key >> (PLACE + 4)) == prefix)
        digit = tl.where(fits, (key >> PLACE) & 15, 31).to(tl.int32)
        total += tl.histogram(digit, 32)
    bins = tl.arange(0, 32)
    tl.atomic_add(counts + row * 32 + bins, total, mask=bins < 16)


def threshold(keys: Tensor, count: Tensor, width: int, ties: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest number below 2^width that at least `count` keys of the row reach, how many exceed and equal it: [N]s.

    With `ties` [N, 3] the keys are the places, counted from behind, of the keys that equal its first column; rows
    whose last column is 0 are passed over.
    """
    rows, length = keys.shape
    low, above = torch.zeros_like(count, dtype=keys.dtype), torch.zeros_like(count, dtype=torch.int32)
    wanted, equal = count.to(torch.int32), above
    for place in range((width - 1) // 4 * 4, -1, -4):
        counts = torch.zeros(rows, 32, dtype=torch.int32, device=keys.device)
        grid = (triton.cdiv(length, 8 * 1024), rows)
        _digits[grid](
            keys, low, counts, length, keys.stride(0), low if ties is None else ties,
            PLACE=place, TOP=place + 4 >= width, TIES=ties is not None, BLOCK=1024,
        )  # fmt: skip
        tops = 1 << min(4, width - place)  # the highest digit may have fewer bits
        reached = counts[:, :tops].flip(1).cumsum(1).flip(1) + above[:, None]  # keys with this digit or a higher one
        digit = ((reached >= wanted[:, None]).sum(1) - 1).clamp(min=0)
        at = torch.arange(tops, device=keys.device)
        above = above + torch.where(at > digit[:, None], counts[:, :tops], 0).sum(1, dtype=torch.int32)
        equal = torch.where(at == digit[:, None], counts[:, :tops], 0).sum(1, dtype=torch.int32)
        low = low + (digit.to(keys.dtype) << place)
    return low, above, equal


@triton.jit
def _reach(keys, chosen, ties, last, length, stride, BLOCK: tl.constexpr):
    """True on the keys above the threshold, and on those equal to it whose place from behind is `last` or more."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row * stride + place, mask=place < length, other=-1)
    low, spare = tl.load(ties + row * 3), tl.load(ties + row * 3 + 1)
    early = (length - 1 - place) >= tl.load(last + row)
    value = (key > low) | ((key == low) & early & (spare > 0))
    tl.store(chosen + row * length + place, value.to(tl.uint8), mask=place < length)


def largest(keys: Tensor, count: Tensor, width: int) -> Tensor:
    """True on the `count` largest keys of each row [N, d]; equal ones in the order they stand."""
    rows, length = keys.shape
    low, above, equal = threshold(keys, count, width)
    spare = count.to(torch.int64) - above
    ties = torch.stack([low.to(torch.int64), spare, ((spare > 0) & (spare < equal)).to(torch.int64)], 1).contiguous()
    last, _, _ = threshold(keys, spare, max(1, (length - 1).bit_length()), ties)
    last = torch.where(ties[:, 2] > 0, last.to(torch.int64), 0)
    chosen = torch.empty(rows, length, dtype=torch.bool, device=keys.device)
    _reach[(triton.cdiv(length, BLOCK), rows)](
        keys, chosen.view(torch.uint8), ties, last, length, keys.stride(0), BLOCK=BLOCK
    )
    return chosen


@triton.jit
def _count(mask, counts, length, stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(mask + row * stride + place, mask=place < length, other=0).to(tl.int32)
    tl.atomic_add(counts + row, tl.sum(found, 0))


def count(mask: Tensor) -> Tensor:
    """How many entries of each row [N, d] are True; PyTorch's own sum first writes eight bytes for each."""
    rows, length = mask.shape
    counts = torch.zeros(rows, dtype=torch.int32, device=mask.device)
    _count[(triton.cdiv(length, 8 * BLOCK), rows)](
        mask.view(torch.uint8), counts, length, mask.stride(0), BLOCK=8 * BLOCK
    )
    return counts.to(torch.int64)


@triton.jit
def _put_back(healthy, new, old, length, new_stride, old_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(healthy + row) == 0:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(old + row * old_stride + place, mask=place < length)
        tl.store(new + row * new_stride + place, value, mask=place < length)


def put_back(healthy: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` [N, d] with the rows that are not healthy written over by those of `old`; the others are not touched."""
    rows, length = new.shape
    old = old if old.stride(1) == 1 else old.contiguous()
    whole = (lambda t: t.view(torch.uint8)) if new.dtype == torch.bool else (lambda t: t)
    _put_back[(triton.cdiv(length, 4 * BLOCK), rows)](
        healthy.contiguous().view(torch.uint8), whole(new), whole(old),
        length, new.stride(0), old.stride(0), BLOCK=4 * BLOCK,
    )  # fmt: skip
    return new


@triton.jit
def _normalise(
    x, weight, bias, share, y, mean, var, inverse, R, C, weight_stride, bias_stride,
    eps: tl.constexpr,  # a number that is handed over at run time would be rounded to 32 bits
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
    _normalise[(n, triton.cdiv(c, width))](
        x, weight, bias, x if share is None else share.contiguous(), y, mean, var, inverse, r, c,
        weight.stride(0), bias.stride(0), eps=eps, SHARED=share is not None, ROWS=height, COLUMNS=width,
    )  # fmt: skip
    return y, mean, var, inverse


def normalise_back(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, share: Tensor | None):
    """The gradients of `normalise` with respect to the rows, the weight and the bias."""
    grad, x = grad.contiguous(), x.contiguous()
    n, r, c = x.shape
    to_x = torch.empty_like(x)
    to_weight, to_bias = (torch.empty(n, c, dtype=x.dtype, device=x.device) for _ in range(2))
    height, width = _tile(r)
    _normalise_back[(n, triton.cdiv(c, width))](
        grad, x, weight, x if share is None else share.contiguous(), mean, inverse, to_x, to_weight, to_bias, r, c,
        weight.stride(0), SHARED=share is not None, ROWS=height, COLUMNS=width,
    )  # fmt: skip
    return to_x, to_weight, to_bias
