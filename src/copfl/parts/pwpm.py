"""PWPM, the parameter-wise personalisation mechanism: the entries that change most become personal."""

import re
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from copfl.core.batches import training_split, validation_split
from copfl.core.layout import Layout, inside
from copfl.core.optim import DefaultNumber
from copfl.core.task import Data, Plan, Task
from copfl.core.tree import Masked
from copfl.errors import UsageError, at_least, one_of
from copfl.kernels.fused import elementwise
from copfl.kernels.topk import count, count_of_each, largest, largest_of_each

CRITERIA = ("change", "benefit", "held_out")
CANDIDATES = ("shared", "all", "tensor", "reselect")
COUNTS = ("moving", "all")
HEADS = ("shared", "personal")
MERGES = ("sharers", "union", "common")  # of the server


@dataclass(frozen=True)
class Pwpm:
    """Grows each client's mask by the entries with the largest |change|, within a budget: Eqs. (6) and (7).

    rate        p: the fraction that becomes personal in one growth
    budget      gamma: the largest personal fraction; 0: no entry becomes personal
    candidates  "shared": top p of the entries that are still shared (default). "all": personal entries
                compete too, so the mask may stall (Paper: Eq. 7 as published). "tensor": top p of the shared
                entries of every weight tensor (FedSelect). "reselect": the grown mask is chosen among all
                entries, so some become shared again
    count       "moving": rate and budget count the entries that training changes. "all": every entry (Paper).
                In ResNet-18 with the ImageNet stem on 32x32 images 62 % of the entries never change
    warmup      rounds before the first growth
    interval    rounds between growths
    criterion   "change": |change|, Eq. (6). "benefit": by how much an entry's change lowers the loss on a
                fifth of the samples, another one in every round of growth, which that round does not train
                on; entries without a benefit stay shared. "held_out": whole groups, the head and then layer
                by layer from the last, are personal where the client's own values have a lower loss than
                the global ones on every fifth sample, which is not trained on, by more than twice the
                standard error; others are shared again. Rate, budget, candidates, count do not apply
    until       rounds after which the mask stays as it is, and all samples are trained on with
                criterion="held_out"; 0: never
    head        "shared": nothing is personal at first (Paper). "personal": the head is, in all rounds, and
                rate and budget count the entries of the body
    """

    rate: float = DefaultNumber(0.25)
    budget: float = 0.5
    candidates: str = "shared"
    count: str = "moving"
    warmup: int = 0
    interval: int = 1
    criterion: str = "change"
    until: int = 0
    head: str = "shared"

    def __post_init__(self) -> None:
        for name, fraction in (("rate", self.rate), ("budget", self.budget)):
            if not 0 <= fraction <= 1:
                allowed = "must lie between 0 and 1: it is a fraction of the parameters"
                raise UsageError(f"{name}={fraction} {allowed}")
        one_of(CANDIDATES, candidates=self.candidates)
        one_of(CRITERIA, criterion=self.criterion)
        one_of(COUNTS, count=self.count)
        one_of(HEADS, head=self.head)
        at_least(0, warmup=self.warmup, until=self.until)
        at_least(1, interval=self.interval)

    def check_merge(self, merge: str) -> None:
        """UsageError for a merge that is unknown, or that never averages an entry which is shared again."""
        one_of(MERGES, merge=merge)
        if merge == "union" and (self.candidates == "reselect" or self.criterion == "held_out"):
            raise UsageError(
                'candidates="reselect" and criterion="held_out" share personal entries again, merge="union" '
                'does not; use "sharers"'
            )
        if merge == "common" and (self.candidates == "reselect" or self.criterion != "change"):
            raise UsageError(
                f'merge="common" chooses the mask from the mean alone, without samples; candidates="'
                f'{self.candidates}" and criterion="{self.criterion}" need each client\'s own values; use '
                'criterion="change" without candidates="reselect", or merge="sharers"'
            )

    def first_mask(self, task: Task) -> Tensor:
        """m^0 [D]: what is personal before any growth; local statistics always are."""
        return task.local("head") if self.head == "personal" else task.local()

    def due(self, round: Tensor) -> Tensor:
        """Whether the mask grows in this round, counted from 0."""
        due = (round >= self.warmup) & ((round - self.warmup) % self.interval == 0)
        return due & (round < self.until) if self.until else due

    def trainable(self, plan: Plan, round: Tensor) -> Plan:
        """The plan without the samples that the benefit is measured on."""
        if self.criterion == "change":
            return plan
        if self.criterion == "held_out":
            return training_split(plan, fold=torch.where(round < self.until, 4, -1) if self.until else None)
        return training_split(plan, fold=torch.where(self.due(round), round % 5, -1))

    def next_mask(
        self,
        task: Task,
        mask: Tensor,
        change: Tensor,
        data: Data,
        round: Tensor,
        *,
        w: Tensor,
        own: Tensor,
        received: Tensor,
    ) -> Tensor:
        """m^{k+1} [D], by the criterion, after the change [d] that led to w.

        `own` and `received` are the client's and the global model before this round's training.
        """
        if self.criterion == "held_out":
            grown = self.selected(task, mask, own, received, data, round)
        else:
            benefit = self.benefit(task, w, change, data, round) if self.criterion == "benefit" else None
            grown = self.grow(task.layout, mask[: task.d], change, round, benefit)
        return torch.cat([grown, mask[task.d :]])

    def benefit(self, task: Task, w: Tensor, change: Tensor, data: Data, round: Tensor) -> Tensor:
        """[d], by how much each entry of the change that led to w lowers the loss on unseen samples.

        It is gradient times change, with the gradient at the midpoint of the change: a second-order
        approximation of the difference in loss.
        """
        unseen = validation_split(data, fold=round % 5)
        valid = torch.arange(unseen.y.shape[0], device=w.device) < unseen.size
        d, x = task.d, task.numbers(unseen.x)
        return task.gradient(w[:d] + change / 2, w[d:], x, unseen.y, valid)[0] * change

    def grow(
        self, layout: Layout, mask: Tensor, change: Tensor, round: Tensor, benefit: Tensor | None = None
    ) -> Tensor:
        """m^{k+1}: the mask with the top of |change| or of the benefit added, Eq. (7)."""
        if self.head == "personal":
            head = _groups(layout, mask.device)[0]
            return head | self._grow(layout, mask & ~head, ~head, change, round, benefit)
        return self._grow(layout, mask, torch.ones_like(mask), change, round, benefit)

    def _grow(
        self,
        layout: Layout,
        mask: Tensor,
        growing: Tensor,  # [d] bool, the entries that rate and budget count
        change: Tensor,
        round: Tensor,
        benefit: Tensor | None,
    ) -> Tensor:
        moving = growing & moves(change, mask) if self.count == "moving" else growing
        excluded = torch.zeros_like(mask) if self.candidates in ("all", "reselect") else mask
        criterion, values = (_by_change, change) if benefit is None else (_by_benefit, benefit)
        (size,) = elementwise(criterion, values, moving, excluded)
        due = self.due(round)
        if self.candidates == "reselect":
            return torch.where(due, self._reselected(size, mask, moving), mask)
        return mask | self._top(size, mask, moving, due, layout)

    def selected(
        self, task: Task, mask: Tensor, own: Tensor, received: Tensor, data: Data, round: Tensor
    ) -> Tensor:
        """[d], the mask of the groups whose own values have a lower loss on held-out samples.

        `own` and `received` are the client's and the global model [D] after the same training: what the
        client kept or uploaded, and the mean. The groups are tried in turn; one that is better stays.
        """
        d, unseen = task.d, validation_split(data)
        if not unseen.y.shape[0]:  # no client has five samples
            return mask[:d]
        valid = torch.arange(unseen.y.shape[0], device=own.device) < unseen.size
        counted = task.criterion.counted(unseen.y, valid)
        assert counted is not None
        valid, size = counted, counted.sum().clamp(min=2).to(own.dtype)
        y = task.criterion.at_risk(unseen.y, valid)

        def losses(w: Tensor) -> Tensor:
            return torch.where(valid, task.criterion.test_losses(task.predict(w, unseen.x), y), 0)

        groups, personal = _groups(task.layout, own.device), torch.zeros_like(mask[:d])
        if self.head == "personal":
            personal, groups = groups[0], groups[1:]
        w = torch.cat([torch.where(personal, own[:d], received[:d]), own[d:]])
        before = losses(w)
        for group in groups:
            candidate = torch.cat([torch.where(group, own[:d], w[:d]), own[d:]])
            after = losses(candidate)
            gain = (before - after).sum() / size
            variance = torch.where(valid, (before - after - gain) ** 2, 0).sum() / (size - 1)
            better = gain > 2 * (variance / size).sqrt()
            personal = personal | (group & better)
            w, before = torch.where(better, candidate, w), torch.where(better, after, before)
        return torch.where(self.due(round), personal, mask[:d])

    def _reselected(self, size: Tensor, mask: Tensor, moving: Tensor) -> Tensor:
        """As many entries as the mask would have grown to, chosen among all."""
        entries, personal = count(moving), count(mask)
        wanted = personal + torch.round(self.rate * (entries - personal).double()).long()
        return largest(size, torch.minimum(wanted, torch.floor(self.budget * entries.double()).long()))

    def within_budget(self, wanted: Tensor, room: Tensor) -> Tensor:
        """How many of the wanted entries of each segment become personal; `room` of them are left."""
        return torch.minimum(wanted, room.clamp(min=0))

    def _top(self, size: Tensor, mask: Tensor, moving: Tensor, due: Tensor, layout: Layout) -> Tensor:
        """The entries that become or stay personal; `size` is -1 where an entry is no candidate.

        The vector is one segment, or one per tensor, each with counts of its own.
        """
        by_tensor = self.candidates == "tensor"
        names = layout.names[: layout.trained] if by_tensor else ()
        sizes = layout.sizes[: layout.trained] if by_tensor else (len(mask),)
        entries, personal = count_of_each(moving, sizes), count_of_each(mask, sizes)
        # In double precision, where counts are exact; in float32 they would not be.
        among = entries if self.candidates == "all" else entries - personal
        wanted = torch.round(self.rate * among.double()).long()
        room = torch.floor(self.budget * entries.double()).long() - personal
        if self.candidates == "all":  # only new entries use up the budget: the largest new ones of the top
            new = largest_of_each(size, wanted, sizes) & ~mask
            admitted = torch.minimum(count_of_each(new, sizes), room.clamp(min=0))
            return largest_of_each(torch.where(new, size, -1), admitted * due, sizes)
        wanted = self.within_budget(wanted, room)
        if not all("weight" in name for name in names):  # biases always stay shared, as in FedSelect
            zero, pairs = 0 * wanted[0], zip(wanted, names, strict=True)
            wanted = torch.stack([number if "weight" in name else zero for number, name in pairs])
        return largest_of_each(size, wanted * due, sizes)


@lru_cache(maxsize=8)  # a recorded program must not copy from the host
def _groups(layout: Layout, device: torch.device) -> tuple[Tensor, ...]:
    """[d] bool each: the head, then the numbered blocks of the model from the last to the first."""
    names = [name for name in layout.names[: layout.trained] if not inside(name, layout.head)]
    blocks = dict.fromkeys(re.split(r"(?<=\.\d)\.|(?<=\.\d\d)\.", name)[0] for name in names)
    return tuple(layout.where(part)[: layout.parameters].to(device) for part in ("head", *reversed(blocks)))


def moves(change: Tensor, mask: Tensor) -> Tensor:
    """Where training changed the parameters by more than rounding, and where they are personal."""
    return elementwise(_moves, change, mask, torch.linalg.vector_norm(change, torch.inf))[0]


def _moves(change: Tensor, mask: Tensor, largest: Tensor) -> tuple[Tensor]:
    return ((change.abs() > 1e-6 * largest) | mask,)


def _by_change(change: Tensor, moving: Tensor, excluded: Tensor) -> tuple[Tensor]:
    return (torch.where(moving & ~excluded, change.abs(), -1),)


def _by_benefit(benefit: Tensor, moving: Tensor, excluded: Tensor) -> tuple[Tensor]:
    return (torch.where(moving & ~excluded & (benefit > 0), benefit, -1),)


def personal_fraction(mask: Tensor, change: Tensor) -> dict[str, Tensor]:
    """The personal fraction of all parameters, and of those that training changes, as metrics."""
    personal = count(mask)
    return {
        "personal_fraction": personal / mask.numel(),
        "personal_fraction_of_moving": personal / count(moves(change, mask)).clamp(min=1),
    }


# -- vectors under a mask, each function in one pass over memory ---------------------------------------------


def shared(mask: Tensor, w: Tensor) -> Masked:
    """The uploaded vector, zero where personal: g = w o (1 - m), Eq. (8)."""
    return Masked(elementwise(_shared, mask, w)[0], mask)


def weighted(upload: Masked, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The summands of a mean over the sharers: Gamma (1 - m) w, Gamma (1 - m), and m."""
    w, weights, personal = elementwise(_weighted, *upload, weight)
    return w, weights, personal


def sharing_metrics(personal: Tensor, averaged: Tensor, clients: Tensor) -> dict[str, Tensor]:
    """The shared fractions, from how many clients keep each entry personal and what the round averaged."""
    return {
        "shared": 1 - (personal / clients).mean(),  # of all clients' parameters
        "averaged": averaged.to(personal.dtype).mean(),  # of the server's parameters
        "shared_by_all": (personal == 0).to(personal.dtype).mean(),
    }


def _shared(mask: Tensor, w: Tensor) -> tuple[Tensor]:
    return (torch.where(mask, 0, w),)


def _weighted(values: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.where(mask, 0, weight)
    return weights * values, weights, mask.to(values.dtype)
