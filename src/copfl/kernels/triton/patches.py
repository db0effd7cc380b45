"""The patches of a convolution, and the adjoint."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from copfl.kernels.triton.compiling import launch

BLOCK = 1024


@triton.jit
def _gather(
    x, rows, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Patches [C, kh, kw], in the order of weights, number by number."""
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
    valid = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    value = tl.load(x + ((b * H + h) * W + w) * C + c, mask=valid, other=0.0)
    tl.store(rows + place, value, mask=inside)


@triton.jit
def _gather_lines(
    x, rows, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr,
    ROW: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Patches [kh, kw, C] line by line: the kw pixels of a line of a patch are contiguous in x as well.

    The origin of a line is computed once for all its numbers. After the last line of a patch come ROW's
    zeros. Where there are none, and columns fill a line, no bound prevents reads and writes of four numbers
    at once.
    """
    WHOLE: tl.constexpr = (KW * C) % COLUMNS == 0 and KH * KW * C == ROW
    line = tl.program_id(0).to(INDEX) * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i = line % KH
    patch = line // KH
    wo = patch % WO
    rest = patch // WO
    h = (rest % HO) * SH + i - PH
    w = (wo * SW - PW)[:, None] + (column // C)[None]
    inside = (line < total)[:, None]
    valid = inside & ((h >= 0) & (h < H))[:, None] & (w >= 0) & (w < W)
    if not WHOLE:
        valid = valid & (column < KW * C)[None]
        length = tl.where(i == KH - 1, ROW - (KH - 1) * KW * C, KW * C)
        inside = inside & (column[None] < length[:, None])
    start = (((rest // HO) * H + h) * W + wo * SW - PW) * C
    value = tl.load(x + start[:, None] + column[None], mask=valid, other=0.0)
    to = patch * ROW + i * (KW * C)
    tl.store(rows + to[:, None] + column[None], value, mask=inside)


@triton.jit
def _scatter(
    rows, x, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr,
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
            valid = fits & (across >= 0) & (across % SW == 0) & (wide < WO)
            k = (i * KW + j) * C + c if PIXELS else c * (KH * KW) + i * KW + j
            value += tl.load(rows + ((b * HO + high) * WO + wide) * ROW + k, mask=valid, other=0.0)
    tl.store(x + place, value, mask=inside)


def _index(numbers: int):
    return tl.int32 if numbers < 2**31 - 2 * BLOCK else tl.int64


def patches(x: Tensor, out: tuple[int, int], kernel, stride, padding, pixels: bool) -> Tensor:
    """The patches of x [B, H, W, C] as rows [B, Ho, Wo, K].

    A row is [C, kh, kw], in the order of weights; or [kh, kw, C], pixel by pixel as in x, which is read and
    written in wider units, and padded with zeros to a multiple of four.
    """
    x = x.contiguous()
    batch, high, wide, channels = x.shape
    entries = channels * kernel[0] * kernel[1]
    rows = torch.empty(
        batch, *out, -(-entries // 4) * 4 if pixels else entries, dtype=x.dtype, device=x.device
    )
    how = (high, wide, channels, *out, *kernel, *stride, *padding)
    index = _index(max(x.numel(), rows.numel()))
    if not pixels:
        total = rows.numel()
        launch(_gather, (triton.cdiv(total, BLOCK),), x, rows, total, *how, BLOCK=BLOCK, INDEX=index)
        return rows
    lines, length = batch * out[0] * out[1] * kernel[0], kernel[1] * channels
    longest = length + rows.shape[3] - entries
    columns = 64 if longest % 64 == 0 else min(128, triton.next_power_of_2(longest))
    lines_per_program = 2 * BLOCK // columns
    grid = triton.cdiv(lines, lines_per_program), triton.cdiv(longest, columns)
    sizes = {"ROW": rows.shape[3], "LINES": lines_per_program, "COLUMNS": columns}
    launch(_gather_lines, grid, x, rows, lines, *how, **sizes, INDEX=index)
    return rows


def unpatch(
    rows: Tensor, size: tuple[int, int], channels: int, kernel, stride, padding, pixels: bool
) -> Tensor:
    """The adjoint of `patches`: [B, H, W, C]."""
    rows = rows.contiguous()
    batch, ho, wo, entries = rows.shape
    x = torch.empty(batch, *size, channels, dtype=rows.dtype, device=rows.device)
    total = x.numel()
    launch(
        _scatter, (triton.cdiv(total, BLOCK),),
        rows, x, total, *size, channels, ho, wo, *kernel, *stride, *padding,
        PIXELS=pixels, ROW=entries, BLOCK=BLOCK, INDEX=_index(max(total, rows.numel())),
    )  # fmt: skip
    return x
