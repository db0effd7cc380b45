"""Long vectors, a row per client: the largest entries, counts, and rows put back."""

# mypy: ignore-errors
from functools import cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from copfl.kernels.triton.compiling import launch

BLOCK = 1024

# A row may be split into segments, such as a model's tensors, each with its own count and threshold. A
# program processes a part of one: `segments`, [3, parts], has each part's segment, its first place, and the
# segment's end. The bit at which a digit begins is no constant: each would be compiled by itself.

PIECES = tl.constexpr(8)
PART = PIECES.value * BLOCK


@cache  # a recorded program reads it at every replay
def _parts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    ends = list(accumulate(sizes))
    found = [(i, at, end) for i, end in enumerate(ends) for at in range(end - sizes[i], end, PART)]
    return torch.tensor(found, dtype=torch.int32).reshape(-1, 3).T.contiguous().to(device)


@triton.jit(do_not_specialize=["low_bit"])
def _digits(
    keys, low, counts, ties, segments, parts, number, stride, low_bit,
    TOP: tl.constexpr, TIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the keys whose higher digits are those of `low`, how many have each digit from `low_bit` on.

    With TIES the keys are the places, counted from the end, of the entries that equal the threshold in
    `ties`.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = row * number + tl.load(segments + part)
    if TIES and tl.load(ties + at * 3 + 2) == 0:  # all equal keys are taken
        return
    start, end = tl.load(segments + parts + part), tl.load(segments + 2 * parts + part)
    prefix = 0 if TOP else tl.load(low + at) >> (low_bit + 4)
    total = tl.zeros([32], dtype=tl.int32)
    for piece in range(PIECES):
        place = start + piece * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(keys + row * stride + place, mask=place < end, other=-1)
        if TIES:
            key = tl.where((place < end) & (key == tl.load(ties + at * 3)), end - 1 - place, -1).to(tl.int64)
        fits = key >= 0
        if not TOP:  # the highest digit has nothing above it
            fits = fits & ((key >> (low_bit + 4)) == prefix)
        digit = tl.where(fits, (key >> low_bit) & 15, 31).to(tl.int32)
        total += tl.histogram(digit, 32)
    bins = tl.arange(0, 32)
    tl.atomic_add(counts + at * 16 + bins, total, mask=bins < 16)


@triton.jit(do_not_specialize=["low_bit", "digits"])
def _settle(counts, wanted, low, above, equal, low_bit, digits):
    """The digit of the threshold from `low_bit` on, from how many keys have each digit.

    The counts are left as they are, and one warp does it: another, without a barrier, might read them late.
    """
    at = tl.program_id(0)
    bins = tl.arange(0, 16)
    found = tl.load(counts + at * 16 + bins)
    higher = tl.load(above + at)
    # The keys with this digit or a higher one.
    reached = tl.sum(tl.where(bins[None] >= bins[:, None], found[None], 0), 1) + higher
    digit = tl.sum(((reached >= tl.load(wanted + at)) & (bins < digits)).to(tl.int32), 0) - 1
    digit = tl.maximum(digit, 0)
    tl.store(above + at, higher + tl.sum(tl.where(bins > digit, found, 0), 0))
    tl.store(equal + at, tl.sum(tl.where(bins == digit, found, 0), 0))
    before = tl.load(low + at)
    tl.store(low + at, before + (digit.to(before.dtype) << low_bit))


def threshold(
    keys: Tensor, count: Tensor, width: int, sizes: tuple[int, ...], ties: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest number below 2^width that `count` keys of the segment reach; the counts above and at it.

    Keys [N, d], the others [N, segments]. With `ties` [N, segments, 3] the keys are the places, counted
    from behind, of the keys that equal its first column; segments whose last column is 0 are skipped.
    """
    rows, number, segments = len(keys), len(sizes), _parts(sizes, keys.device)
    count = count.contiguous()  # the kernels read it as contiguous memory
    low = torch.zeros_like(count, dtype=keys.dtype if ties is None else torch.int64)
    above, equal = (torch.zeros_like(count, dtype=torch.int32) for _ in range(2))
    wanted, places = count.to(torch.int32), range((width - 1) // 4 * 4, -1, -4)
    every = torch.zeros(len(places), rows * number, 16, dtype=torch.int32, device=keys.device)
    for place, counts in zip(places, every, strict=True):
        launch(
            _digits, (segments.shape[1], rows),
            keys, low, counts, low if ties is None else ties, segments, segments.shape[1], number,
            keys.stride(0), place, TOP=place + 4 >= width, TIES=ties is not None, BLOCK=BLOCK,
        )  # fmt: skip
        digits = 1 << min(4, width - place)  # the highest digit may have fewer bits
        launch(_settle, (rows * number,), counts, wanted, low, above, equal, place, digits, num_warps=1)
    return low, above, equal


@triton.jit
def _reach(keys, chosen, ties, last, segments, parts, number, stride, length, BLOCK: tl.constexpr):
    """True on the keys above the threshold, and on equal ones whose place from the end is `last` or more."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = row * number + tl.load(segments + part)
    start, end = tl.load(segments + parts + part), tl.load(segments + 2 * parts + part)
    low, spare, first = tl.load(ties + at * 3), tl.load(ties + at * 3 + 1), tl.load(last + at)
    for piece in range(PIECES):
        place = start + piece * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(keys + row * stride + place, mask=place < end, other=-1)
        value = (key > low) | ((key == low) & (end - 1 - place >= first) & (spare > 0))
        tl.store(chosen + row * length + place, value.to(tl.uint8), mask=place < end)


def largest(keys: Tensor, count: Tensor, width: int, sizes: tuple[int, ...]) -> Tensor:
    """True on the `count` [N, segments] largest keys [N, d] of each segment, of equal ones the first."""
    (rows, length), count = keys.shape, count.contiguous()
    low, above, equal = threshold(keys, count, width, sizes)
    spare = count.to(torch.int64) - above
    ties = torch.stack([low.to(torch.int64), spare, ((spare > 0) & (spare < equal)).to(torch.int64)], -1)
    last, _, _ = threshold(keys, spare, max(1, (max(sizes) - 1).bit_length()), sizes, ties)
    last = torch.where(ties[..., 2] > 0, last, 0)
    chosen = torch.empty(rows, length, dtype=torch.bool, device=keys.device)
    segments = _parts(sizes, keys.device)
    launch(
        _reach, (segments.shape[1], rows),
        keys, chosen.view(torch.uint8), ties, last, segments, segments.shape[1], len(sizes),
        keys.stride(0), length, BLOCK=BLOCK,
    )  # fmt: skip
    return chosen


@triton.jit
def _count(mask, counts, segments, parts, number, stride, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.load(segments + 2 * parts + part)
    place = tl.load(segments + parts + part) + tl.arange(0, PART)
    found = tl.load(mask + row * stride + place, mask=place < end, other=0).to(tl.int32)
    tl.atomic_add(counts + row * number + tl.load(segments + part), tl.sum(found, 0))


def count(mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The number of True entries in each segment of each row [N, d]; a sum first writes eight bytes each."""
    counts = torch.zeros(len(mask), len(sizes), dtype=torch.int32, device=mask.device)
    segments = _parts(sizes, mask.device)
    launch(
        _count, (segments.shape[1], len(mask)),
        mask.view(torch.uint8), counts, segments, segments.shape[1], len(sizes), mask.stride(0), PART=PART,
    )  # fmt: skip
    return counts.to(torch.int64)


@triton.jit
def _put_back(healthy, new, old, rows, length, new_stride, old_stride, BLOCK: tl.constexpr):
    row = (tl.program_id(0) % rows).to(tl.int64)
    if tl.load(healthy + row) == 0:
        place = tl.program_id(0) // rows * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(old + row * old_stride + place, mask=place < length)
        tl.store(new + row * new_stride + place, value, mask=place < length)


def put_back(healthy: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` [N, d] with the rows that are not healthy overwritten by those of `old`, in place."""
    rows, length = new.shape
    old = old if old.stride(1) == 1 else old.contiguous()
    whole = (lambda t: t.view(torch.uint8)) if new.dtype == torch.bool else (lambda t: t)
    launch(
        _put_back, (triton.cdiv(length, 4 * BLOCK) * rows,),
        healthy.contiguous().view(torch.uint8), whole(new), whole(old),
        rows, length, new.stride(0), old.stride(0), BLOCK=4 * BLOCK,
    )  # fmt: skip
    return new


@triton.jit
def _sum_rows(healthy, rows, total, stride, length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], dtype=total.dtype.element_ty)
    for n in range(ROWS):
        if tl.load(healthy + n) != 0:
            found += tl.load(rows + place, mask=place < length, other=0)
        rows += stride
    tl.store(total + place, found, mask=place < length)


def sum_rows(healthy: Tensor, rows: Tensor) -> Tensor:
    """The sum of the healthy rows [N, d], in their order."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    (number, length), total = rows.shape, torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
    launch(
        _sum_rows, (triton.cdiv(length, BLOCK),),
        healthy.contiguous().view(torch.uint8), rows, total, rows.stride(0), length, ROWS=number, BLOCK=BLOCK,
    )  # fmt: skip
    return total
