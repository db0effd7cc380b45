"""Normal noise as a pure function of a key: the same in every engine, on every device and after every restart.

torch's own generators have a state, which clients that are trained side by side would share in an order of their own.
This is no source of secrets: who knows the key knows the noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEP, FIRST, SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mixed(*counters: int | Tensor) -> Tensor:
    """64 well-mixed bits for every combination of the counters, one of them a tensor: `plan.hashed` in torch."""
    like = next(c for c in counters if isinstance(c, Tensor))
    state = torch.zeros((), dtype=torch.int64, device=like.device)
    for counter in counters:
        state = (state ^ counter) + STEP
        state = (state ^ _down(state, 30)) * FIRST
        state = (state ^ _down(state, 27)) * SECOND
        state = state ^ _down(state, 31)
    return state


def normal(key: Tensor, like: Tensor) -> Tensor:
    """Standard normal numbers, as many as the vector `like` has entries; Box and Muller's."""
    place = torch.arange(like.shape[-1], device=like.device)
    one, two = ((_down(mixed(key, which, place), 11).double() + 0.5) / 2**53 for which in (0, 1))  # in (0, 1)
    drawn: Tensor = (-2 * one.log()).sqrt() * (2 * math.pi * two).cos()
    return drawn.to(like.dtype)


def _down(bits: Tensor, places: int) -> Tensor:
    """A shift to the right that brings in zeros; torch's own keeps the sign."""
    shifted: Tensor = (bits >> places) & (2 ** (64 - places) - 1)
    return shifted
