"""Counting and choosing entries of a vector, with a count that may differ from client to client under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from copfl.kernels.fused import compiles, in_front


def largest(values: Tensor, count: Tensor) -> Tensor:
    """A bool vector, True on the `count` largest values; equal ones in the order they stand. Negative values never win.

    The count may be a tensor that differs from client to client, which neither topk nor a slice of a sort allows under
    vmap. Non-negative floats are ordered like their bits, so the threshold is found digit by digit on the bits.
    """
    return _choose(values, count[None], (len(values),))


def largest_of_each(values: Tensor, counts: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """`largest` of each of the stretches, of these sizes, that the vector is cut into: counts [stretches]."""
    return _choose(values, counts, sizes)


class _Largest(torch.autograd.Function):
    """`largest_of_each`, with vmap told how: a vector's bits are not something that it knows how to look at."""

    @staticmethod
    def forward(values: Tensor, counts: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return _largest(values[None], counts[None], sizes)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], values: Tensor, counts: Tensor, sizes: tuple[int, ...]
    ) -> tuple[Tensor, int]:
        return _largest(in_front(info, in_dims[0], values), in_front(info, in_dims[1], counts), sizes), 0


def _largest(values: Tensor, counts: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """`largest_of_each` of every row: values [N, d], counts [N, stretches]."""
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
    # Of those that equal the threshold, the first ones: found like the threshold, on their places counted from behind.
    places = torch.arange(bits.shape[1] - 1, -1, -1, device=bits.device, dtype=torch.int32)
    places = torch.where(equal, places, -1)
    last = _threshold(places, spare, max(1, (bits.shape[1] - 1).bit_length()))
    return above | ((places >= last[:, None]) & equal & (spare > 0)[:, None])


def _threshold(keys: Tensor, count: Tensor, width: int) -> Tensor:
    """The largest whole number below 2^width that at least `count` keys of the row reach, [N]."""
    if (
        keys.device.type == "cpu"
    ):  # looking at a count costs nothing here, and one selection a row beats many passes
        most = keys.shape[1]
        found = [
            row.kthvalue(most + 1 - k).values
            if 0 < k <= most
            else row.new_tensor(0 if k > most else (1 << width) - 1)
            for row, k in zip(keys, count.tolist(), strict=True)
        ]
        return torch.stack(found).clamp(0, (1 << width) - 1)
    low = torch.zeros_like(count, dtype=keys.dtype)
    for place in range(width - 1, -1, -1):
        higher = low + (1 << place)
        low = torch.where((keys >= higher[:, None]).sum(1) >= count, higher, low)
    return low


def count(mask: Tensor) -> Tensor:
    """How many entries are True; a plain sum would first turn each of them into eight bytes."""
    return _number(mask, (len(mask),))[0]


def count_of_each(mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """How many entries are True in each of the stretches, of these sizes, that the vector is cut into: [stretches]."""
    return _number(mask, sizes)


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return torch.stack([part.count_nonzero() for part in torch.split(mask, list(sizes))])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], mask: Tensor, sizes: tuple[int, ...]
    ) -> tuple[Tensor, int]:
        rows = in_front(info, in_dims[0], mask)
        if compiles(rows) and rows.stride(1) == 1:
            from copfl.kernels.triton import vectors

            return vectors.count(rows, sizes), 0
        return torch.stack([part.sum(1) for part in torch.split(rows, list(sizes), 1)], 1), 0


_choose: Callable[[Tensor, Tensor, tuple[int, ...]], Tensor] = _Largest.apply
_number: Callable[[Tensor, tuple[int, ...]], Tensor] = _Count.apply
