"""Counting and selecting entries of a vector; under vmap the count may differ from client to client."""

import torch
from torch import Tensor

from copfl.kernels.fused import compiles, over_rows


def largest(values: Tensor, count: Tensor) -> Tensor:
    """A bool vector, True on the `count` largest values, of equal ones the first; never on negative values.

    The count may be a tensor that differs from client to client, which neither topk nor a slice of a sort
    allows under vmap. Non-negative floats are ordered like their bits, so the threshold is found digit by
    digit on the bits.
    """
    return largest_of_each(values, count[None], (len(values),))


@over_rows
def largest_of_each(values: Tensor, counts: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """`largest` of each of the segments, of these sizes, of the vector: values [d], counts [segments]."""
    double = values.dtype == torch.float64
    bits = values.view(torch.int64 if double else torch.int32)
    width = 63 if double else 31
    if compiles(bits) and bits.stride(-1) == 1:
        from copfl.kernels.triton import vectors

        return vectors.largest(bits, counts, width, sizes)
    parts = zip(torch.split(bits, list(sizes), 1), counts.T, strict=True)
    return torch.cat([_top(part.contiguous(), count, width) for part, count in parts], 1)


def _top(bits: Tensor, count: Tensor, width: int) -> Tensor:
    """True on the `count` [N] largest of every row [N, d]."""
    low = _threshold(bits, count, width)
    above, equal = bits > low[:, None], bits == low[:, None]
    spare = count - above.sum(1)
    # Of the entries equal to the threshold, the first ones: found like the threshold, on places counted from
    # the end.
    places = torch.arange(bits.shape[1] - 1, -1, -1, device=bits.device, dtype=torch.int32)
    places = torch.where(equal, places, -1)
    last = _threshold(places, spare, max(1, (bits.shape[1] - 1).bit_length()))
    return above | ((places >= last[:, None]) & equal & (spare > 0)[:, None])


def _threshold(keys: Tensor, count: Tensor, width: int) -> Tensor:
    """The largest whole number below 2^width that at least `count` keys of the row reach, [N]."""
    if keys.device.type == "cpu":  # reading a count is free here, and one selection per row beats many passes
        length, top = keys.shape[1], (1 << width) - 1
        thresholds = [
            row.kthvalue(length + 1 - k).values
            if 0 < k <= length
            else row.new_tensor(0 if k > length else top)
            for row, k in zip(keys, count.tolist(), strict=True)
        ]
        return torch.stack(thresholds).clamp(0, top)
    low = torch.zeros_like(count, dtype=keys.dtype)
    for place in range(width - 1, -1, -1):
        higher = low + (1 << place)
        low = torch.where((keys >= higher[:, None]).sum(1) >= count, higher, low)
    return low


def count(mask: Tensor) -> Tensor:
    """The number of True entries; a plain sum would first convert each of them into eight bytes."""
    return count_of_each(mask, (len(mask),))[0]


@over_rows
def count_of_each(mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The number of True entries in each of the segments, of these sizes, of the vector: [segments]."""
    if compiles(mask) and mask.stride(1) == 1:
        from copfl.kernels.triton import vectors

        return vectors.count(mask, sizes)
    parts = torch.split(mask, list(sizes), 1)
    return torch.stack([p.sum(1) if len(p) > 1 else p[0].count_nonzero()[None] for p in parts], 1)
