"""Random bits and normal noise as pure functions of counters (splitmix64).

A generator with a state would make each draw depend on the draws before it. Here any client's numbers can be
drawn alone, in any order, and are the same in every engine, on every device and after every restart. This is
no source of secrets: the key determines the noise.
"""

import math

import torch
from torch import Tensor

from copfl.kernels.draws import hashed as hashed
from copfl.kernels.draws import mixed, shift_right

# One stream per use, so that no two draws ever share their bits.
ORDER, SHIFT_DOWN, SHIFT_ACROSS, FLIP, CHOICE, MODEL, MALICIOUS, NOISE, HALVES = 0, 1, 2, 3, 4, 5, 6, 7, 8


def normal(key: Tensor, like: Tensor) -> Tensor:
    """Standard normal numbers in the shape of the vector `like`, by the Box-Muller transform."""
    place = torch.arange(like.shape[-1], device=like.device)
    first, second = ((shift_right(mixed(key, n, place), 11).double() + 0.5) / 2**53 for n in (0, 1))
    drawn: Tensor = (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()
    return drawn.to(like.dtype)
