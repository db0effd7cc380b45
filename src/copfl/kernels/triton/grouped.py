"""Convolutions with groups and a kernel per client, forward and back, without patches in memory.

A program has a tile of pixels and of channels of a few neighbouring groups, and adds one product of tiles per
position of the kernel. Between channels of different groups the tile of the kernel is zero: a matrix unit
multiplies many zeros faster than others multiply few numbers.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from copfl.kernels.triton.compiling import launch

PIXELS = 64  # of a tile
CHANNELS = 32  # of a tile, where groups have fewer
PROGRAMS = 1024  # that occupy a GPU


@triton.jit
def _pixel(p, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """The image, the line and the column of a pixel."""
    return p // (HIGH * WIDE), p // WIDE % HIGH, p % WIDE


@triton.jit
def _operand(x, PRECISION: tl.constexpr):
    """For tf32 rounded to its 10 bits, to the nearest as torch does: a matrix unit cuts the others off."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        nearest = (x.to(tl.int32, bitcast=True) + 4096 & -8192).to(tl.float32, bitcast=True)
        return tl.where(x == x, nearest, x)  # a nan stays one
    return x


@triton.jit
def _over_pixels(
    source, weight, result, pixels, from_pixels, row,
    HIGH: tl.constexpr, WIDE: tl.constexpr, FROM_HIGH: tl.constexpr, FROM_WIDE: tl.constexpr,
    CG: tl.constexpr, OG: tl.constexpr, GROUPS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BACK: tl.constexpr, MERGED: tl.constexpr, PIXELS: tl.constexpr, TO: tl.constexpr, FROM: tl.constexpr,
    INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a convolution; with BACK, the gradient of its inputs from that of its outputs.

    `pixels` are those of one client's results, `from_pixels` of its sources. MERGED groups share a tile.
    """
    TO_GROUP: tl.constexpr = CG if BACK else OG
    FROM_GROUP: tl.constexpr = OG if BACK else CG
    PARTS: tl.constexpr = (MERGED * TO_GROUP + TO - 1) // TO
    n = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0).to(INDEX) * PIXELS + tl.arange(0, PIXELS)
    first = tl.program_id(1) // PARTS * MERGED
    to = tl.program_id(1) % PARTS * TO + tl.arange(0, TO)
    to_inside = (to < MERGED * TO_GROUP) & (first * TO_GROUP + to < GROUPS * TO_GROUP)
    source += n * from_pixels * (GROUPS * FROM_GROUP) + first * FROM_GROUP
    weight += n * row + first * (OG * CG * KH * KW)
    b, high, wide = _pixel(p, HIGH, WIDE)
    total = tl.zeros([PIXELS, TO], dtype=result.dtype.element_ty)
    for k in range(KH * KW):
        if BACK:
            down = high + PH - k // KW * DH
            across = wide + PW - k % KW * DW
            inside = (p < pixels) & (down >= 0) & (down % SH == 0) & (across >= 0) & (across % SW == 0)
            h, w = down // SH, across // SW
        else:
            h, w = high * SH + k // KW * DH - PH, wide * SW + k % KW * DW - PW
            inside = (p < pixels) & (h >= 0) & (w >= 0)
        inside = inside & (h < FROM_HIGH) & (w < FROM_WIDE)
        at = ((b * FROM_HIGH + h) * FROM_WIDE + w) * (GROUPS * FROM_GROUP)
        for start in range(0, MERGED * FROM_GROUP, FROM):
            c = start + tl.arange(0, FROM)
            c_inside = (c < MERGED * FROM_GROUP) & (first * FROM_GROUP + c < GROUPS * FROM_GROUP)
            x = tl.load(source + at[:, None] + c[None], mask=inside[:, None] & c_inside[None], other=0.0)
            same = (c[:, None] // FROM_GROUP == to[None] // TO_GROUP) & c_inside[:, None] & to_inside[None]
            if BACK:  # noqa: SIM108 - Triton compiles one of the branches
                entry = c[:, None] * CG + to[None] % CG
            else:
                entry = to[None] * CG + c[:, None] % CG
            kernel = tl.load(weight + entry * (KH * KW) + k, mask=same, other=0.0)
            x, kernel = _operand(x, PRECISION), _operand(kernel, PRECISION)
            total = tl.dot(x, kernel, total, input_precision=PRECISION, out_dtype=result.dtype.element_ty)
    place = (n * pixels + p)[:, None] * (GROUPS * TO_GROUP) + first * TO_GROUP + to[None]
    tl.store(result + place, total, mask=(p < pixels)[:, None] & to_inside[None])


@triton.jit
def _over_kernels(
    x, grad, result, pixels, from_pixels, row, split_stride, length,
    HO: tl.constexpr, WO: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    CG: tl.constexpr, OG: tl.constexpr, GROUPS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    MERGED: tl.constexpr, PIXELS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
    INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the kernels: one position, over the `length` pixels of one split."""
    OUT_PARTS: tl.constexpr = (MERGED * OG + OUTS - 1) // OUTS
    IN_PARTS: tl.constexpr = (MERGED * CG + INS - 1) // INS
    n = tl.program_id(2).to(tl.int64)
    k = tl.program_id(0) % (KH * KW)
    split = tl.program_id(0) // (KH * KW)
    part = tl.program_id(1) % (OUT_PARTS * IN_PARTS)
    first = tl.program_id(1) // (OUT_PARTS * IN_PARTS) * MERGED
    o = part // IN_PARTS * OUTS + tl.arange(0, OUTS)
    c = part % IN_PARTS * INS + tl.arange(0, INS)
    o_inside = (o < MERGED * OG) & (first * OG + o < GROUPS * OG)
    c_inside = (c < MERGED * CG) & (first * CG + c < GROUPS * CG)
    x += n * from_pixels * (GROUPS * CG) + first * CG
    grad += n * pixels * (GROUPS * OG) + first * OG
    total = tl.zeros([OUTS, INS], dtype=result.dtype.element_ty)
    for start in range(0, length, PIXELS):
        p = (split * length + start).to(INDEX) + tl.arange(0, PIXELS)
        b, high, wide = _pixel(p, HO, WO)
        h, w = high * SH + k // KW * DH - PH, wide * SW + k % KW * DW - PW
        inside = (p < pixels) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        at = ((b * H + h) * W + w) * (GROUPS * CG)
        toward = tl.load(
            grad + p[:, None] * (GROUPS * OG) + o[None], mask=inside[:, None] & o_inside[None], other=0.0
        )
        value = tl.load(x + at[:, None] + c[None], mask=inside[:, None] & c_inside[None], other=0.0)
        left, right = tl.trans(_operand(toward, PRECISION)), _operand(value, PRECISION)
        total = tl.dot(left, right, total, input_precision=PRECISION, out_dtype=result.dtype.element_ty)
    result += split * split_stride + n * row + first * (OG * CG * KH * KW) + k
    same = (o[:, None] // OG == c[None] // CG) & o_inside[:, None] & c_inside[None]
    tl.store(result + (o[:, None] * CG + c[None] % CG) * (KH * KW), total, mask=same)


def _tile(channels: int) -> int:
    return min(64, max(16, triton.next_power_of_2(channels)))


def _precision() -> str:
    """As torch computes products of float32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _index(*tensors: Tensor):
    return tl.int32 if max(t.numel() for t in tensors) < 2**31 - 2**20 else tl.int64


def _merged(outs: int, ins: int) -> int:
    """The number of groups of a tile."""
    return max(1, CHANNELS // max(outs, ins))


def convolve(source: Tensor, weight: Tensor, size, groups: int, geometry, back: bool = False) -> Tensor:
    """The convolution of x [N*B, H, W, C] with kernels [N, O, C / groups, kh, kw]: [N*B, *size, O].

    With `back`, the source is the gradient of the outputs, and the result that of the inputs, [N*B, *size,
    C].

    Args:
        source: Channels last.
        weight: Rows of kernels, each contiguous.
        size: The height and the width of the result.
        groups: Of the channels.
        geometry: The stride, the padding and the dilation, each down and across.
        back: Whether it is the gradient.
    """
    source = source.contiguous()
    n, outs, ins = weight.shape[0], weight.shape[1] // groups, weight.shape[2]
    to, from_ = (ins, outs) if back else (outs, ins)
    merged = _merged(outs, ins)
    result = torch.empty(source.shape[0], *size, groups * to, dtype=source.dtype, device=source.device)
    pixels, tile = result.shape[:3].numel() // n, _tile(merged * to)
    grid = triton.cdiv(pixels, PIXELS), triton.cdiv(groups, merged) * triton.cdiv(merged * to, tile), n
    launch(
        _over_pixels, grid,
        source, weight, result, pixels, source.shape[:3].numel() // n, weight.stride(0),
        *size, *source.shape[1:3], ins, outs, groups, *weight.shape[3:], *geometry[0], *geometry[1], *geometry[2],
        BACK=back, MERGED=merged, PIXELS=PIXELS, TO=tile, FROM=_tile(merged * from_),
        INDEX=_index(source, result), PRECISION=_precision(),
    )  # fmt: skip
    return result


def to_kernels(x: Tensor, grad: Tensor, weight: Tensor, groups: int, geometry, out: Tensor | None) -> Tensor:
    """The gradient of the kernels from that of the outputs, written to `out` [N, O, C / groups, kh, kw]."""
    x, grad = x.contiguous(), grad.contiguous()
    n, outs, ins = weight.shape[0], weight.shape[1] // groups, weight.shape[2]
    out = torch.empty_like(weight, memory_format=torch.contiguous_format) if out is None else out
    merged, positions = _merged(outs, ins), weight.shape[3] * weight.shape[4]
    tiles = _tile(merged * outs), _tile(merged * ins)
    blocks = (
        triton.cdiv(groups, merged)
        * triton.cdiv(merged * outs, tiles[0])
        * triton.cdiv(merged * ins, tiles[1])
    )
    pixels = grad.shape[:3].numel() // n
    # Few long sums would occupy a part of a GPU.
    splits = max(1, min(PROGRAMS // (positions * blocks * n), pixels // (2 * PIXELS)))
    length = triton.cdiv(triton.cdiv(pixels, splits), PIXELS) * PIXELS
    parts = out if splits == 1 else torch.empty(splits, *weight.shape, dtype=x.dtype, device=x.device)
    launch(
        _over_kernels, (positions * splits, blocks, n),
        x, grad, parts, pixels, x.shape[:3].numel() // n, parts.stride(-5), 0 if splits == 1 else parts.stride(0),
        length, *grad.shape[1:3], *x.shape[1:3], ins, outs, groups, *weight.shape[3:], *geometry[0], *geometry[1],
        *geometry[2], MERGED=merged, PIXELS=PIXELS, OUTS=tiles[0], INS=tiles[1],
        INDEX=_index(x, grad), PRECISION=_precision(),
    )  # fmt: skip
    return out if splits == 1 else torch.sum(parts, 0, out=out)
