"""PWPM, the parameter-wise personalisation mechanism: what changed most in local training becomes personal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.batches import training_split, validation_split
from copfl.core.layout import Layout
from copfl.core.task import Data, Plan, Task
from copfl.errors import UsageError, one_of
from copfl.kernels.fused import elementwise
from copfl.kernels.topk import count, count_of_each, largest, largest_of_each

BY = ("change", "benefit")
AMONG = ("shared", "all", "tensor", "reselect")
LIMITS = ("exact", "check_before")
COUNTS = ("moving", "all")


@dataclass(frozen=True)
class Pwpm:
    """Grows each client's mask by the entries with the largest |change|, within a budget: Eqs. (6) and (7).

    rate    p: the share that turns personal in one update
    budget  gamma: the largest personal share
    among   "shared": top p of what is still shared (default); "all": personal entries compete too, so the mask may
            stall (Paper: the letter of Eq. 7); "tensor": top p of the shared entries of every weight tensor
            (FedSelect); "reselect": the grown mask is chosen among all entries, so that some return to the shared part
    limit   "exact": never above the budget, as the paper demands; "check_before": a mask that is not yet above the
            budget may grow past it (FedSelect)
    count   "moving": rate and budget count the entries that training moves; "all": every entry (Paper: the letter).
            In ResNet-18 with the ImageNet stem on 32x32 images 62 % of the entries never move.
    warmup  rounds before the first growth
    every   rounds between growths
    by      "change": |change|, Eq. (6); "benefit": by how much keeping an entry's change lowers the loss on a fifth of
            the samples, another one in every round of growth, which that round does not train on; what does not lower
            it stays shared
    """

    rate: float = 0.25
    budget: float = 0.5
    candidates: str = "shared"
    limit: str = "exact"
    count: str = "moving"
    warmup: int = 0
    interval: int = 1
    criterion: str = "change"

    def __post_init__(self) -> None:
        for name, share in (("rate", self.rate), ("budget", self.budget)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name}={share} must lie between 0 and 1: it is a share of the parameters")
        one_of(AMONG, candidates=self.candidates)
        one_of(BY, criterion=self.criterion)
        one_of(LIMITS, limit=self.limit)
        one_of(COUNTS, count=self.count)
        if self.warmup < 0 or self.interval < 1:
            raise UsageError(
                f"warmup={self.warmup} must be at least 0 and interval={self.interval} at least 1"
            )

    def due(self, round: Tensor) -> Tensor:
        """Whether the mask grows in this round, counted from 0."""
        return (round >= self.warmup) & ((round - self.warmup) % self.interval == 0)

    def trainable(self, plan: Plan, round: Tensor) -> Plan:
        """The plan without the samples that benefit is found with."""
        return (
            training_split(plan, fold=torch.where(self.due(round), round % 5, -1))
            if self.criterion == "benefit"
            else plan
        )

    def benefit(self, task: Task, w: Tensor, change: Tensor, data: Data, round: Tensor) -> Tensor | None:
        """[d], by how much the loss on unseen samples falls with each entry of the change that led to w.

        That is gradient times change, the gradient taken half-way between both ends, where it tells their difference
        best. None: nobody asks.
        """
        if self.criterion == "change":
            return None
        unseen = validation_split(data, fold=round % 5)
        valid = torch.arange(unseen.y.shape[0], device=w.device) < unseen.size
        d, x = task.d, task.numbers(unseen.x)
        return task.gradient(w[:d] + change / 2, w[d:], x, unseen.y, valid)[0] * change

    def grow(
        self, layout: Layout, mask: Tensor, change: Tensor, round: Tensor, benefit: Tensor | None = None
    ) -> Tensor:
        """m^{k+1}: the mask with the top of |change|, or of the benefit, added, Eq. (7); `round` counts from 0."""
        moving = moves(change, mask) if self.count == "moving" else torch.ones_like(mask)
        taken = torch.zeros_like(mask) if self.candidates in ("all", "reselect") else mask
        if benefit is None:
            (size,) = elementwise(_candidates, change, moving, taken)
        else:
            (size,) = elementwise(_useful, benefit, moving, taken)
        due = self.due(round)
        if self.candidates == "reselect":
            return torch.where(due, self._anew(size, mask, moving), mask)
        names = layout.names[: layout.trained] if self.candidates == "tensor" else ()
        return mask | self._top(size, mask, moving, due, layout.sizes[: len(names)] or (len(mask),), names)

    def _anew(self, size: Tensor, mask: Tensor, moving: Tensor) -> Tensor:
        """As many entries as the mask would have grown to, whoever held them before."""
        entries, personal = count(moving), count(mask)
        wanted = personal + torch.round(self.rate * (entries - personal).double()).long()
        return largest(size, torch.minimum(wanted, torch.floor(self.budget * entries.double()).long()))

    def _top(
        self,
        size: Tensor,
        mask: Tensor,
        moving: Tensor,
        due: Tensor,
        sizes: tuple[int, ...],
        names: tuple[str, ...],
    ) -> Tensor:
        """The entries that this update makes (or finds) personal; `size` is -1 where an entry cannot be chosen.

        The vector is one stretch, or as many as there are tensors, with these names, each with counts of its own.
        """
        entries, personal = (
            count_of_each(moving, sizes),
            count_of_each(mask, sizes),
        )  # personal entries count as moving
        # Counts are sums of whole numbers far below 2^53; in float32 they would not be exact.
        baselines = entries if self.candidates == "all" else entries - personal
        wanted = torch.round(self.rate * baselines.double()).long()
        room = torch.floor(self.budget * entries.double()).long() - personal
        if self.limit == "exact":
            if (
                self.candidates == "all"
            ):  # only newcomers use up room, so admit the largest newcomers of the top
                top = largest_of_each(size, wanted, sizes)
                fresh = torch.where(top & ~mask, size, -1)
                new_clients = torch.minimum(count_of_each(top & ~mask, sizes), room.clamp(min=0))
                return largest_of_each(fresh, new_clients * due, sizes)
            wanted = torch.minimum(wanted, room.clamp(min=0))
        else:
            wanted = wanted * (room >= 0)
        if not all("weight" in name for name in names):  # biases stay shared for ever, as in FedSelect
            none = 0 * wanted[0]
            wanted = torch.stack(
                [n if "weight" in name else none for n, name in zip(wanted, names, strict=True)]
            )
        return largest_of_each(size, wanted * due, sizes)


def moves(change: Tensor, mask: Tensor) -> Tensor:
    """Where training moved the parameters, and where they are personal.

    Moved is more than rounding, which is all that an entry without a gradient shows.
    """
    return elementwise(_moves, change, mask, torch.linalg.vector_norm(change, torch.inf))[0]


def _moves(change: Tensor, mask: Tensor, most: Tensor) -> tuple[Tensor]:
    return ((change.abs() > 1e-6 * most) | mask,)


def _candidates(change: Tensor, moving: Tensor, mask: Tensor) -> tuple[Tensor]:
    return (torch.where(moving & ~mask, change.abs(), -1),)


def _useful(benefit: Tensor, moving: Tensor, mask: Tensor) -> tuple[Tensor]:
    return (torch.where(moving & ~mask & (benefit > 0), benefit, -1),)


class Share(NamedTuple):
    """How much is personal, under the names that it has among a turn's figures."""

    personal_fraction: Tensor  # [], of all parameters
    personal_fraction_of_moving: Tensor  # [], of those that training moves


def personal_fraction(mask: Tensor, change: Tensor) -> Share:
    """The personal share of all parameters, and of those that training moves."""
    personal = count(mask)
    return Share(personal / mask.numel(), personal / count(moves(change, mask)).clamp(min=1))
