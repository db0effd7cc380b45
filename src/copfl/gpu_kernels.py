"""Triton kernels for what PyTorch does in too many passes: a convolution's windows, batch norm, and a row's threshold.

Only imported where there is a GPU and Triton. The same in plain PyTorch is in `folded` and `selection`; where
Triton is installed, a test runs these in its interpreter and holds the two equal.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from itertools import accumulate

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
    """Windows [C, kh, kw], as weights lie, number by number."""
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
def _gather_lines(
    x, rows, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    ROW: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Windows [kh, kw, C] line by line: the kw pixels of a window's line lie beside each other in x as well.

    Where a line comes from is found once for all its numbers. Behind the last line of a window come ROW's zeros; where
    there are none, and columns fill a line, no bound stands in the way of reading and writing four numbers at once.
    """
    WHOLE: tl.constexpr = (KW * C) % COLUMNS == 0 and KH * KW * C == ROW
    line = tl.program_id(0).to(INDEX) * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i = line % KH
    window = line // KH
    wo = window % WO
    rest = window // WO
    h = (rest % HO) * SH + i - PH
    w = (wo * SW - PW)[:, None] + (column // C)[None]
    inside = (line < total)[:, None]
    real = inside & ((h >= 0) & (h < H))[:, None] & (w >= 0) & (w < W)
    if not WHOLE:
        real = real & (column < KW * C)[None]
        length = tl.where(i == KH - 1, ROW - (KH - 1) * KW * C, KW * C)
        inside = inside & (column[None] < length[:, None])
    start = (((rest // HO) * H + h) * W + wo * SW - PW) * C
    value = tl.load(x + start[:, None] + column[None], mask=real, other=0.0)
    to = window * ROW + i * (KW * C)
    tl.store(rows + to[:, None] + column[None], value, mask=inside)


@triton.jit
def _scatter(
    rows, x, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PIXELS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, INDEX: tl.constexpr,
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
            k = (i * KW + j) * C + c if PIXELS else c * (KH * KW) + i * KW + j
            value += tl.load(rows + ((b * HO + high) * WO + wide) * ROW + k, mask=real, other=0.0)
    tl.store(x + place, value, mask=inside)


def _index(numbers: int):
    return tl.int32 if numbers < 2**31 - 2 * BLOCK else tl.int64


def patches(x: Tensor, out: tuple[int, int], kernel, stride, padding, pixels: bool) -> Tensor:
    """The windows of x [B, H, W, C] as rows [B, Ho, Wo, K].

    A row is [C, kh, kw], as weights lie; or [kh, kw, C], pixel by pixel as x lies, which is read and written in wider
    pieces, and filled up with zeros to a multiple of four.
    """
    x = x.contiguous()
    batch, high, wide, channels = x.shape
    entries = channels * kernel[0] * kernel[1]
    rows = torch.empty(batch, *out, -(-entries // 4) * 4 if pixels else entries, dtype=x.dtype, device=x.device)
    how, index = (high, wide, channels, *out, *kernel, *stride, *padding), _index(max(x.numel(), rows.numel()))
    if not pixels:
        total = rows.numel()
        _gather[(triton.cdiv(total, BLOCK),)](x, rows, total, *how, BLOCK=BLOCK, INDEX=index)
        return rows
    lines, length = batch * out[0] * out[1] * kernel[0], kernel[1] * channels
    longest = length + rows.shape[3] - entries
    columns = 64 if longest % 64 == 0 else min(128, triton.next_power_of_2(longest))
    together = 2 * BLOCK // columns
    _gather_lines[(triton.cdiv(lines, together), triton.cdiv(longest, columns))](
        x, rows, lines, *how, ROW=rows.shape[3], LINES=together, COLUMNS=columns, INDEX=index
    )
    return rows


def unpatch(rows: Tensor, size: tuple[int, int], channels: int, kernel, stride, padding, pixels: bool) -> Tensor:
    """The adjoint of `patches`: [B, H, W, C]."""
    rows = rows.contiguous()
    batch, ho, wo, entries = rows.shape
    x = torch.empty(batch, *size, channels, dtype=rows.dtype, device=rows.device)
    total = x.numel()
    _scatter[(triton.cdiv(total, BLOCK),)](
        rows, x, total, *size, channels, ho, wo, *kernel, *stride, *padding,
        PIXELS=pixels, ROW=entries, BLOCK=BLOCK, INDEX=_index(max(total, rows.numel())),
    )  # fmt: skip
    return x


# A row may be cut into stretches, such as a model's tensors, each with a count and a threshold of its own. Programs go
# over parts of them: `stretches`, [3, parts], has each part's stretch, its own first place, and the end of the stretch.

PIECES = tl.constexpr(8)
PART = PIECES.value * BLOCK


@cache  # a recorded program reads it whenever it is replayed
def _parts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    ends = list(accumulate(sizes))
    found = [(i, at, end) for i, end in enumerate(ends) for at in range(end - sizes[i], end, PART)]
    return torch.tensor(found, dtype=torch.int32).reshape(-1, 3).T.contiguous().to(device)


@triton.jit
def _digits(
    keys, low, counts, ties, stretches, parts, number, stride,
    PLACE: tl.constexpr, TOP: tl.constexpr, TIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the keys whose higher digits are those of `low`, how many have each digit at PLACE.

    With TIES the keys are the places, counted from behind, of the entries that equal the threshold in `ties`.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = row * number + tl.load(stretches + part)
    if TIES and tl.load(ties + at * 3 + 2) == 0:  # all that are equal are taken: there is nothing to choose
        return
    start, end = tl.load(stretches + parts + part), tl.load(stretches + 2 * parts + part)
    prefix = 0 if TOP else tl.load(low + at) >> (PLACE + 4)
    total = tl.zeros([32], dtype=tl.int32)
    for piece in tl.static_range(PIECES):
        place = start + piece * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(keys + row * stride + place, mask=place < end, other=-1)
        if TIES:
            key = tl.where((place < end) & (key == tl.load(ties + at * 3)), end - 1 - place, -1).to(tl.int64)
        fits = key >= 0
        if not TOP:  # the highest digit has nothing above it
            fits = fits & ((key >> (PLACE + 4)) == prefix)
        digit = tl.where(fits, (key >> PLACE) & 15, 31).to(tl.int32)
        total += tl.histogram(digit, 32)
    bins = tl.arange(0, 32)
    tl.atomic_add(counts + at * 16 + bins, total, mask=bins < 16)


@triton.jit
def _settle(counts, wanted, low, above, equal, PLACE: tl.constexpr, DIGITS: tl.constexpr):
    """The digit of the threshold at PLACE, from how many keys have each digit; the counts are zero again then."""
    at = tl.program_id(0)
    bins = tl.arange(0, 16)
    found = tl.load(counts + at * 16 + bins)
    tl.store(counts + at * 16 + bins, tl.zeros([16], dtype=tl.int32))
    higher = tl.load(above + at)
    reached = tl.sum(tl.where(bins[None] >= bins[:, None], found[None], 0), 1) + higher  # have this digit, or a higher
    digit = tl.sum(((reached >= tl.load(wanted + at)) & (bins < DIGITS)).to(tl.int32), 0) - 1
    digit = tl.maximum(digit, 0)
    tl.store(above + at, higher + tl.sum(tl.where(bins > digit, found, 0), 0))
    tl.store(equal + at, tl.sum(tl.where(bins == digit, found, 0), 0))
    before = tl.load(low + at)
    tl.store(low + at, before + (digit.to(before.dtype) << PLACE))


def threshold(
    keys: Tensor, count: Tensor, width: int, sizes: tuple[int, ...], ties: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest number below 2^width that at least `count` keys of the stretch reach, how many exceed and equal it.

    Keys [N, d], the others [N, stretches]. With `ties` [N, stretches, 3] the keys are the places, counted from behind,
    of the keys that equal its first column; stretches whose last column is 0 are passed over.
    """
    rows, number, stretches = len(keys), len(sizes), _parts(sizes, keys.device)
    count = count.contiguous()  # the kernels go by places in memory
    low = torch.zeros_like(count, dtype=keys.dtype if ties is None else torch.int64)
    above, equal = (torch.zeros_like(count, dtype=torch.int32) for _ in range(2))
    counts, wanted = torch.zeros(rows * number, 16, dtype=torch.int32, device=keys.device), count.to(torch.int32)
    for place in range((width - 1) // 4 * 4, -1, -4):
        _digits[(stretches.shape[1], rows)](
            keys, low, counts, low if ties is None else ties, stretches, stretches.shape[1], number, keys.stride(0),
            PLACE=place, TOP=place + 4 >= width, TIES=ties is not None, BLOCK=BLOCK,
        )  # fmt: skip
        digits = 1 << min(4, width - place)  # the highest digit may have fewer bits
        _settle[(rows * number,)](counts, wanted, low, above, equal, PLACE=place, DIGITS=digits)
    return low, above, equal


@triton.jit
def _reach(keys, chosen, ties, last, stretches, parts, number, stride, length, BLOCK: tl.constexpr):
    """True on the keys above the threshold, and on those equal to it whose place from behind is `last` or more."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = row * number + tl.load(stretches + part)
    start, end = tl.load(stretches + parts + part), tl.load(stretches + 2 * parts + part)
    low, spare, first = tl.load(ties + at * 3), tl.load(ties + at * 3 + 1), tl.load(last + at)
    for piece in tl.static_range(PIECES):
        place = start + piece * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(keys + row * stride + place, mask=place < end, other=-1)
        value = (key > low) | ((key == low) & (end - 1 - place >= first) & (spare > 0))
        tl.store(chosen + row * length + place, value.to(tl.uint8), mask=place < end)


def largest(keys: Tensor, count: Tensor, width: int, sizes: tuple[int, ...]) -> Tensor:
    """True on the `count` [N, stretches] largest keys [N, d] of each stretch; equal ones in the order they stand."""
    (rows, length), count = keys.shape, count.contiguous()
    low, above, equal = threshold(keys, count, width, sizes)
    spare = count.to(torch.int64) - above
    ties = torch.stack([low.to(torch.int64), spare, ((spare > 0) & (spare < equal)).to(torch.int64)], -1)
    last, _, _ = threshold(keys, spare, max(1, (max(sizes) - 1).bit_length()), sizes, ties)
    last = torch.where(ties[..., 2] > 0, last, 0)
    chosen, stretches = torch.empty(rows, length, dtype=torch.bool, device=keys.device), _parts(sizes, keys.device)
    _reach[(stretches.shape[1], rows)](
        keys, chosen.view(torch.uint8), ties, last, stretches, stretches.shape[1], len(sizes), keys.stride(0), length,
        BLOCK=BLOCK,
    )  # fmt: skip
    return chosen


@triton.jit
def _count(mask, counts, stretches, parts, number, stride, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.load(stretches + 2 * parts + part)
    place = tl.load(stretches + parts + part) + tl.arange(0, PART)
    found = tl.load(mask + row * stride + place, mask=place < end, other=0).to(tl.int32)
    tl.atomic_add(counts + row * number + tl.load(stretches + part), tl.sum(found, 0))


def count(mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """How many entries of each stretch of each row [N, d] are True; PyTorch's sum first writes eight bytes for each."""
    counts = torch.zeros(len(mask), len(sizes), dtype=torch.int32, device=mask.device)
    stretches = _parts(sizes, mask.device)
    _count[(stretches.shape[1], len(mask))](
        mask.view(torch.uint8), counts, stretches, stretches.shape[1], len(sizes), mask.stride(0), PART=PART
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
