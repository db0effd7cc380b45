"""Guards against hostile clients: an algorithm whose server trusts nobody, made out of any algorithm.

clip           No update counts for more than a radius, and no claim for more than twice the median claim. Sums suffice;
               the radius is a number, or the median length of what clients last sent. Before anybody sent something the
               server knows no lengths and no claims: the first round only measures, and counts nobody.
trimmed_mean   Entry by entry, the mean without the largest and the smallest `trim` of the values.
median         Entry by entry, the middle value.

The last two need all uploads at once, so the server's memory grows with the clients of a round, sums of partial sums no
longer suffice, and no layer can hide single uploads from the server. They leave out what clients claim to weigh: every
client that shares an entry counts the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, Metrics, received
from copfl.core.payload import update_of, with_update
from copfl.core.task import Task
from copfl.core.tree import Gathered
from copfl.errors import UsageError, at_least
from copfl.wrappers import base


class Heard(NamedTuple):
    """What each client last said, in two numbers: a table with a row per client."""

    length: Tensor  # [N], of its change
    reported_weight: Tensor  # [N]
    ever: Tensor  # [N], 1 where it ever said something


class ClipServer(NamedTuple):
    server: Any
    heard: Heard
    radius: Tensor  # [], how long a change may be; 0 before the first round
    reported_weight: Tensor  # [], the largest claim that counts; 0 before the first round


class ClipTotal(NamedTuple):
    total: Any
    heard: Heard
    clipped: Tensor  # [], how many were longer than the radius


@dataclass(frozen=True)
class Clipped:
    """The algorithm, with every upload's change held to a radius and its claim to `louder` times the median.

    radius   how long a change may be; 0: `times` the median of the clients' last lengths, which fewer than half of the
             clients cannot move beyond what honest ones send
    """

    algorithm: AnyAlgorithm
    radius: float = 0.0
    times: float = 1.0
    louder: float = 2.0

    def __post_init__(self) -> None:
        at_least(0, radius=self.radius)
        at_least(1e-9, times=self.times, louder=self.louder)

    total_epochs = property(base.total_epochs)
    optimizer = property(base.optimizer)
    client_init = base.client_init
    client_update = base.client_update
    downlink = base.downlink_of_server
    personal_model = base.personal_model

    def server_init(self, task: Task, clients: int) -> ClipServer:
        nothing, none = task.initial.new_zeros(clients), task.initial.new_zeros(())
        return ClipServer(
            self.algorithm.server_init(task, clients), Heard(nothing, nothing, nothing), none, none
        )

    def summand(self, task: Task, server: ClipServer, id: Tensor, upload: Any) -> ClipTotal:
        """What the upload adds when it is cut to size; nothing in the round that only measures."""
        found = update_of(received(self.algorithm, server.server, id), upload)
        length = found.change.norm()
        factor = torch.where(length > server.radius, server.radius / length.clamp(min=1e-30), 1)
        reported_weight = (
            None
            if found.reported_weight is None
            else found.reported_weight.clamp(min=0).clamp(max=server.reported_weight)
        )
        cut = with_update(
            upload,
            found._replace(sent=found.received + factor * found.change, reported_weight=reported_weight),
        )
        measured = server.heard.ever.any()
        total = self.algorithm.summand(task, server.server, id, cut)
        one = torch.ones_like(length)
        loudest = one if found.reported_weight is None else found.reported_weight.max().to(length.dtype)
        return ClipTotal(
            tree.each(lambda t: torch.where(measured, t, torch.zeros_like(t)), total),
            Heard(*tree.placed((length, loudest, one), id, server.heard.ever.shape[0])),
            (length > server.radius).to(length.dtype),
        )

    def server_update(self, task: Task, server: ClipServer, total: ClipTotal) -> tuple[ClipServer, Metrics]:
        inside, metrics = self.algorithm.server_update(task, server.server, total.total)
        now = total.heard.ever > 0
        heard = tree.each(lambda new, old: torch.where(now, new, old), total.heard, server.heard)
        middle = self.times * middle_of(heard.length, heard.ever)
        radius = torch.where(heard.ever.any(), self.radius, 0).to(middle.dtype) if self.radius else middle
        reported_weight = self.louder * middle_of(heard.reported_weight, heard.ever)
        share = total.clipped / total.heard.ever.sum().clamp(min=1)
        return ClipServer(inside, heard, radius, reported_weight), {
            **metrics,
            "radius": server.radius,
            "clipped": share,
        }


def middle_of(values: Tensor, counts: Tensor) -> Tensor:
    """The median of the values that count, the lower one of two; 0 if none does."""
    ordered = torch.where(counts > 0, values, torch.inf).sort().values
    place = ((counts > 0).sum() - 1).div(2, rounding_mode="floor").clamp(min=0)
    return torch.where((counts > 0).any(), ordered[place], 0)


class GatherServer(NamedTuple):
    server: Any


class Row(NamedTuple):
    """One client's upload, kept beside the others."""

    id: Tensor  # [1] int64
    upload: Any
    counts: Tensor  # [1], 0 for a client that is left out


@dataclass(frozen=True)
class Trimmed:
    """The algorithm, with its mean replaced by one that leaves out the `trim` largest and smallest of every entry."""

    algorithm: AnyAlgorithm
    trim: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.trim <= 0.5:
            raise UsageError(
                f"trim={self.trim} must be at least 0 and at most 0.5: it is a share of each end"
            )

    total_epochs = property(base.total_epochs)
    optimizer = property(base.optimizer)
    client_init = base.client_init
    client_update = base.client_update
    downlink = base.downlink_of_server
    personal_model = base.personal_model

    def server_init(self, task: Task, clients: int) -> GatherServer:
        return GatherServer(self.algorithm.server_init(task, clients))

    def summand(self, task: Task, server: GatherServer, id: Tensor, upload: Any) -> Gathered:
        one = torch.ones(1, dtype=task.initial.dtype, device=id.device)
        return Gathered(Row(id[None], tree.each(lambda t: t[None], upload), one))

    def server_update(
        self, task: Task, server: GatherServer, total: Gathered
    ) -> tuple[GatherServer, Metrics]:
        """The algorithm's own step, as if every client had sent the middle of what all of them sent.

        The mean of equal vectors is that vector whatever the weights, so this is right for every algorithm that takes a
        mean; what else it does with scores and masks it still does with those that were sent.
        """
        ids, uploads, counts = total.rows
        counted = [tree.row((ids, uploads), n) for n in counts.nonzero()[:, 0].tolist()]
        if not counted:
            nothing = self.algorithm.summand(task, server.server, ids[0], tree.row(uploads, 0))
            inside, metrics = self.algorithm.server_update(
                task, server.server, tree.each(torch.zeros_like, nothing)
            )
            return GatherServer(inside), metrics
        found = [update_of(received(self.algorithm, server.server, id), upload) for id, upload in counted]
        middle = trimmed_mean(
            torch.stack([one.sent for one in found]),
            torch.stack(
                [
                    torch.ones_like(one.sent, dtype=torch.bool) if one.personal is None else ~one.personal
                    for one in found
                ]
            ),
            self.trim,
        )
        summands = (
            self.algorithm.summand(task, server.server, id, with_update(upload, one._replace(sent=middle)))
            for (id, upload), one in zip(counted, found, strict=True)
        )
        inside, metrics = self.algorithm.server_update(task, server.server, reduce(tree.add, summands))
        return GatherServer(inside), metrics


def trimmed_mean(values: Tensor, present: Tensor, trim: float) -> Tensor:
    """The mean of every column's present values without the largest and smallest `trim` of them; 0.5 is the median.

    Of c values, floor(trim c) are left out at each end, but never all: one or two stay. A column without any gives 0.
    """
    count = present.sum(0)  # [s]
    most = ((count - 1) // 2).clamp(min=0)
    out = torch.minimum((trim * count).floor().long(), most)
    ordered = torch.where(present, values, torch.inf).sort(0).values  # [n, s], what is absent comes last
    place = torch.arange(len(values), device=values.device)[:, None]
    stays = (place >= out) & (place < count - out)
    return torch.where(stays, ordered, 0).sum(0) / (count - 2 * out).clamp(min=1)


def clip(algorithm: AnyAlgorithm, radius: float = 0.0, times: float = 1.0, louder: float = 2.0) -> Clipped:
    """Changes held to a radius, by default the median length; claims to twice the median claim."""
    return Clipped(algorithm, radius, times, louder)


def trimmed(algorithm: AnyAlgorithm, trim: float = 0.25) -> Trimmed:
    """Entry by entry the mean without a quarter of the values at each end; not a sum."""
    return Trimmed(algorithm, trim)


def median(algorithm: AnyAlgorithm) -> Trimmed:
    """Entry by entry the median; not a sum."""
    return Trimmed(algorithm, 0.5)


ROBUST_RULES: dict[str, Callable[..., AnyAlgorithm]] = {
    "clip": clip,
    "median": median,
    "trimmed_mean": trimmed,
}
