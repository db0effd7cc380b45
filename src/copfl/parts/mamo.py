"""MAMO, mask-aware momentum optimisation: Adam with separate moments for shared and personal entries.

The paper has two pairs of moments, one for the shared and one for the personal entries (Eqs. 3-5). Every
entry is in exactly one of them at a time, and each pair is updated only in its own phase. So one pair of
vectors that is only updated where `active` represents both. `forget` treats an entry that changes sides. A
test proves the two equal.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.optim import DefaultNumber
from copfl.errors import above, below_one, one_of
from copfl.kernels.fused import elementwise

# Paper: the moments of an entry that becomes personal are not specified (docs/algorithms/copfl.md).
#   "restart"  zero, and its step count starts again (default: no leakage and no oversized first steps)
#   "zero"     zero, but the count continues (as published: a 3x to 6x step right after the change)
CHANGES = ("restart", "zero")


class MamoState(NamedTuple):
    u: Tensor  # [d], u_n of Eq. (4a)
    v: Tensor  # [d], v_n of Eq. (4b)
    t: Tensor  # [d], the steps of each entry: the exponent of Eq. (5a)


@dataclass(frozen=True)
class Mamo:
    """Masked Adam with a step count per entry, Eqs. (4) and (5).

    Paper: Eq. (4b) says beta1 and Eq. (5a) the moments before the new gradient, which is 0/0 in the first
    step; both are interpreted as Adam. `keep` carries the moments over to the next round, as the exponent
    kT+t implies.
    """

    lr: float = DefaultNumber(1e-4)  # eta; the paper tries 1e-4 and 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    keep: bool = True
    change: str = "restart"

    def __post_init__(self) -> None:
        one_of(CHANGES, change=self.change)
        above(0, lr=self.lr, eps=self.eps)
        below_one(beta1=self.beta1, beta2=self.beta2)

    def init(self, parameters: Tensor) -> MamoState:
        zeros = torch.zeros_like(parameters)
        return MamoState(zeros, zeros.clone(), zeros.clone())

    def step(
        self, parameters: Tensor, grad: Tensor, state: MamoState, active: Tensor | None
    ) -> tuple[Tensor, MamoState]:
        """The parameters and moments after one step of the active entries; the others keep everything."""
        moved, *moments = elementwise(
            _step, parameters, grad, *state, active, self.lr, self.beta1, self.beta2, self.eps
        )
        return moved, MamoState(*moments)

    def forget(self, state: MamoState, entries: Tensor) -> MamoState:
        """The state after these entries changed sides."""
        u, v, t = elementwise(_zeroed, *state, entries)
        return MamoState(u, v, t if self.change == "restart" else state.t)


def _step(
    w: Tensor, grad: Tensor, u: Tensor, v: Tensor, t: Tensor, active: Tensor | None, *numbers: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w, u, v and t after one step, Eqs. (4) and (5)."""
    lr, beta1, beta2, eps = numbers
    count = t + 1
    mean = beta1 * u + (1 - beta1) * grad
    square = beta2 * v + (1 - beta2) * grad * grad
    scale = torch.sqrt(square / (1 - beta2**count)) + eps
    moved = w - lr * (mean / (1 - beta1**count)) / scale
    if active is None:
        return moved, mean, square, count
    return (
        torch.where(active, moved, w),
        torch.where(active, mean, u),
        torch.where(active, square, v),
        torch.where(active, count, t),
    )


def _zeroed(u: Tensor, v: Tensor, t: Tensor, entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.where(entries, 0, u), torch.where(entries, 0, v), torch.where(entries, 0, t)
