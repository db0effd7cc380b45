"""Random numbers and dropout, each in one kernel: the hash of `kernels.draws`, bit for bit."""

# mypy: ignore-errors
import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from copfl.kernels.triton.compiling import launch

BLOCK = 1024


@triton.jit
def _mixed(state, counter):
    """One round of splitmix64, in unsigned numbers: their shift fills with zeros."""
    state = (state ^ counter) + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _bits(keys, row, call, place):
    """The 24 highest bits of the hash of a client's key, the call and the place."""
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    state = _mixed(_mixed(tl.zeros([], dtype=tl.uint64), key), call.to(tl.uint64))
    return (_mixed(state, place.to(tl.uint64)) >> 40).to(tl.int32)


@triton.jit(do_not_specialize=["call"])
def _dropout(x, y, keys, call, size, LIMIT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    row, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(x + row * size + place, mask=inside)
    WIDE: tl.constexpr = tl.float64 if value.dtype == tl.float64 else tl.float32
    keep = (_bits(keys, row, call, place) < LIMIT).to(WIDE)
    value = value.to(WIDE) * keep * tl.full([], SCALE, WIDE)
    tl.store(y + row * size + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["call"])
def _uniform(y, keys, call, size, BLOCK: tl.constexpr):
    row, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = _bits(keys, row, call, place).to(y.dtype.element_ty) * (1.0 / 16777216)
    tl.store(y + row * size + place, value, mask=place < size)


def dropout(x: Tensor, keys: Tensor, call: int, probability: float) -> Tensor:
    """x where a number of the place is below the probability, over the probability, and else 0."""
    x, keys = x.contiguous(), keys.contiguous()
    y, size = torch.empty_like(x), x.numel() // keys.numel()
    # As torch rounds a number beside a tensor, and divides by it: as a product with its inverse.
    rounded = float if x.dtype == torch.float64 else np.float32
    limit = math.ceil(float(rounded(probability)) * 2**24)
    scale = float(rounded(1) / rounded(max(probability, 1e-12)))
    grid = (triton.cdiv(size, BLOCK), keys.numel())
    launch(_dropout, grid, x, y, keys, call, size, LIMIT=limit, SCALE=scale, BLOCK=BLOCK)
    return y


def uniform(keys: Tensor, call: int, size: int, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1) of these keys [...], [..., size]."""
    y = torch.empty(*keys.shape, size, dtype=dtype, device=keys.device)
    # Not by `launch`: a number that was not drawn might become an index.
    _uniform[(triton.cdiv(size, BLOCK), keys.numel())](y, keys.contiguous(), call, size, BLOCK=BLOCK)
    return y
