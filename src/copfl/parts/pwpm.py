"""PWPM, the parameter-wise personalisation mechanism: what changed most in local training becomes personal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.elementwise import elementwise
from copfl.errors import UsageError, one_of
from copfl.layout import Layout
from copfl.selection import count, largest

AMONG = ("shared", "all", "tensor")
LIMITS = ("exact", "check_before")
COUNTS = ("moving", "all")


@dataclass(frozen=True)
class Pwpm:
    """Grows each client's mask by the entries with the largest |change|, within a budget: Eqs. (6) and (7).

    rate    p: the share that turns personal in one update
    budget  gamma: the largest personal share
    among   "shared": top p of what is still shared (default); "all": personal entries compete too, so the mask may
            stall (Paper: the letter of Eq. 7); "tensor": top p of the shared entries of every weight tensor (FedSelect)
    limit   "exact": never above the budget, as the paper demands; "check_before": a mask that is not yet above the
            budget may grow past it (FedSelect)
    count   "moving": rate and budget count the entries that training moves; "all": every entry (Paper: the letter).
            In ResNet-18 with the ImageNet stem on 32x32 images 62 % of the entries never move.
    warmup  rounds before the first growth
    every   rounds between growths
    """

    rate: float = 0.25
    budget: float = 0.5
    among: str = "shared"
    limit: str = "exact"
    count: str = "moving"
    warmup: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        for name, share in (("rate", self.rate), ("budget", self.budget)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name}={share} must lie between 0 and 1: it is a share of the parameters")
        one_of(AMONG, among=self.among)
        one_of(LIMITS, limit=self.limit)
        one_of(COUNTS, count=self.count)
        if self.warmup < 0 or self.every < 1:
            raise UsageError(f"warmup={self.warmup} must be at least 0 and every={self.every} at least 1")

    def due(self, round: Tensor) -> Tensor:
        """Whether the mask grows in this round, counted from 0."""
        return (round >= self.warmup) & ((round - self.warmup) % self.every == 0)

    def grow(self, layout: Layout, mask: Tensor, change: Tensor, round: Tensor) -> Tensor:
        """m^{k+1}: the mask with the top of |change| added, Eq. (7); `round` counts from 0."""
        moving = moves(change, mask) if self.count == "moving" else torch.ones_like(mask)
        (size,) = elementwise(_candidates, change, moving, mask if self.among != "all" else torch.zeros_like(mask))
        due = self.due(round)
        if self.among != "tensor":
            return mask | self._top(size, mask, moving, due)
        starts, grown = 0, []
        for name, entries in zip(layout.names[: layout.trained], layout.sizes, strict=False):
            part = slice(starts, starts + entries)
            starts += entries
            # Biases stay shared for ever, as in FedSelect.
            chosen = (
                self._top(size[part], mask[part], moving[part], due)
                if "weight" in name
                else torch.zeros_like(mask[part])
            )
            grown.append(mask[part] | chosen)
        return torch.cat(grown)

    def _top(self, size: Tensor, mask: Tensor, moving: Tensor, due: Tensor) -> Tensor:
        """The entries that this update makes (or finds) personal; `size` is -1 where an entry cannot be chosen."""
        entries, personal = count(moving), count(mask)  # personal entries count as moving
        # Counts are sums of whole numbers far below 2^53; in float32 they would not be exact.
        rivals = entries if self.among == "all" else entries - personal
        wanted = torch.round(self.rate * rivals.double()).long()
        room = torch.floor(self.budget * entries.double()).long() - personal
        if self.limit == "exact":
            if self.among == "all":  # only newcomers use up room, so admit the largest newcomers of the top
                top = largest(size, wanted)
                fresh = torch.where(top & ~mask, size, -1)
                return largest(fresh, torch.minimum(count(top & ~mask), room.clamp(min=0)) * due)
            wanted = torch.minimum(wanted, room.clamp(min=0))
        else:
            wanted = wanted * (room >= 0)
        return largest(size, wanted * due)


def moves(change: Tensor, mask: Tensor) -> Tensor:
    """Where training moved the parameters, and where they are personal.

    Moved is more than rounding, which is all that an entry without a gradient shows.
    """
    return elementwise(_moves, change, mask, torch.linalg.vector_norm(change, torch.inf))[0]


def _moves(change: Tensor, mask: Tensor, most: Tensor) -> tuple[Tensor]:
    return ((change.abs() > 1e-6 * most) | mask,)


def _candidates(change: Tensor, moving: Tensor, mask: Tensor) -> tuple[Tensor]:
    return (torch.where(moving & ~mask, change.abs(), -1),)


class Share(NamedTuple):
    """How much is personal, under the names that it has among a turn's figures."""

    personal_share: Tensor  # [], of all parameters
    personal_share_of_moving: Tensor  # [], of those that training moves


def personal_share(mask: Tensor, change: Tensor) -> Share:
    """The personal share of all parameters, and of those that training moves."""
    personal = count(mask)
    return Share(personal / mask.numel(), personal / count(moves(change, mask)).clamp(min=1))
