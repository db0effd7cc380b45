"""Robust aggregation against malicious clients, around any algorithm.

clip           Bounds the norm of each update and the reported weight of each client, by the median of what
               clients sent last. Sums suffice. Before the first uploads the server knows no norms: the first
               round only measures them and changes nothing.
evidence       Leaves out clients that are known to do harm, from what each upload changes at the others; see
               `wrappers.evidence`. Sums suffice.
trimmed_mean   Entry by entry, the mean without the largest and the smallest `trim` of the values.
median         Entry by entry, the median.

The trimmed mean and the median need all uploads at once: the server's memory grows with the clients of a
round, partial sums do not suffice, and single uploads cannot be hidden from the server. They ignore the
reported weights: every client that shares an entry weighs the same there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import (
    AnyAlgorithm,
    ClientOutput,
    Data,
    Gathered,
    Metrics,
    Plan,
    Task,
    UsageError,
    at_least,
    received,
    tree,
)
from copfl.core.payload import Update, update_of, with_update
from copfl.wrappers.base import Wrapper
from copfl.wrappers.evidence import ByEvidence


class Reports(NamedTuple):
    """The last upload of each client in two numbers: a table with a row per client."""

    norm: Tensor  # [N], of its update
    reported_weight: Tensor  # [N]
    ever: Tensor  # [N], 1 where it ever uploaded


class Bounds(NamedTuple):
    radius: Tensor  # [], the largest norm of an update; 0 before the first round
    reported_weight: Tensor  # [], the largest reported weight; 0 before the first round

    def clipped(self, update: Update) -> Update:
        """The update as the server counts it."""
        norm, weight = update.change.norm(), update.reported_weight
        factor = torch.where(norm > self.radius, self.radius / norm.clamp(min=1e-30), 1)
        clipped_weight = None if weight is None else weight.clamp(min=0).clamp(max=self.reported_weight)
        return update._replace(sent=update.received + factor * update.change, reported_weight=clipped_weight)


class ClipServer(NamedTuple):
    server: Any
    reports: Reports
    bounds: Bounds  # of the next round


class ClipDown(NamedTuple):
    down: Any
    bounds: Bounds  # of this round: some algorithms' clients need to know what the server counts


class ClipTotal(NamedTuple):
    total: Any
    reports: Reports
    clipped: Tensor  # [], the number of updates longer than the radius


@dataclass(frozen=True)
class Clipped(Wrapper):
    """The algorithm with clipped updates and clipped reported weights.

    radius         the largest norm of an update; 0: `norm_factor` times the median of the clients' last
                   norms, which a minority of the clients cannot raise above the honest ones
    weight_factor  the largest reported weight, as a multiple of the median
    """

    radius: float = 0.0
    norm_factor: float = 1.0
    weight_factor: float = 2.0

    wraps: ClassVar[tuple[str, ...]] = ("server", "down")

    def __post_init__(self) -> None:
        at_least(0, radius=self.radius)
        at_least(1e-9, norm_factor=self.norm_factor, weight_factor=self.weight_factor)

    def server_init(self, task: Task, clients: int) -> ClipServer:
        zeros, zero = task.initial.new_zeros(clients), task.initial.new_zeros(())
        reports = Reports(zeros, zeros, zeros)
        return ClipServer(super().server_init(task, clients), reports, Bounds(zero, zero))

    def downlink(self, server: ClipServer, ids: Tensor) -> ClipDown:
        return ClipDown(super().downlink(server, ids), tree.repeat(server.bounds, len(ids)))

    def client_update(self, task: Task, client: Any, down: ClipDown, data: Data, plan: Plan) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        clipped = down.bounds.clipped(update_of(down.down, output.upload))
        return output._replace(client=self.counted(output.client, down, clipped))

    def summand(self, task: Task, server: ClipServer, id: Tensor, upload: Any) -> ClipTotal:
        """The summand of the clipped upload; zero in the round that only measures."""
        update = update_of(received(self.algorithm, server.server, id), upload)
        norm, weight = update.change.norm(), update.reported_weight
        total = super().summand(task, server, id, with_update(upload, server.bounds.clipped(update)))
        measured, one = server.reports.ever.any(), torch.ones_like(norm)
        report = norm, one if weight is None else weight.max().to(norm.dtype), one
        return ClipTotal(
            tree.each(lambda t: torch.where(measured, t, torch.zeros_like(t)), total),
            Reports(*tree.placed(report, id, server.reports.ever.shape[0])),
            (norm > server.bounds.radius).to(norm.dtype),
        )

    def server_update(self, task: Task, server: ClipServer, total: ClipTotal) -> tuple[ClipServer, Metrics]:
        inner, metrics = super().server_update(task, server, total.total)
        now = total.reports.ever > 0
        reports = tree.each(lambda new, old: torch.where(now, new, old), total.reports, server.reports)
        radius = self.norm_factor * median_of(reports.norm, reports.ever)
        if self.radius:
            radius = torch.where(reports.ever.any(), self.radius, 0).to(radius.dtype)
        weight = self.weight_factor * median_of(reports.reported_weight, reports.ever)
        clipped = total.clipped / total.reports.ever.sum().clamp(min=1)
        metrics = {**metrics, "radius": server.bounds.radius, "clipped": clipped}
        return ClipServer(inner, reports, Bounds(radius, weight)), metrics


def median_of(values: Tensor, counts: Tensor) -> Tensor:
    """The median of the values with a positive count, the lower one of two; 0 if there is none."""
    ordered = torch.where(counts > 0, values, torch.inf).sort().values
    place = ((counts > 0).sum() - 1).div(2, rounding_mode="floor").clamp(min=0)
    return torch.where((counts > 0).any(), ordered[place], 0)


class Row(NamedTuple):
    """One client's upload in the table of all uploads."""

    id: Tensor  # [1] int64
    upload: Any
    counts: Tensor  # [1], 0 for a client that is excluded


@dataclass(frozen=True)
class Trimmed(Wrapper):
    """The algorithm with the mean without the `trim` largest and smallest values of every entry."""

    trim: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.trim <= 0.5:
            allowed = "must be at least 0 and at most 0.5: it is the fraction at each end"
            raise UsageError(f"trim={self.trim} {allowed}")

    def summand(self, task: Task, server: Any, id: Tensor, upload: Any) -> Gathered:
        one = torch.ones(1, dtype=task.initial.dtype, device=id.device)
        return Gathered(Row(id[None], tree.each(lambda t: t[None], upload), one))

    def server_update(self, task: Task, server: Any, total: Gathered) -> tuple[Any, Metrics]:
        """The algorithm's own update, as if every client had uploaded the trimmed mean of all uploads.

        The weighted mean of equal vectors is that vector, so this holds for every algorithm that averages;
        scores and masks stay as they were uploaded.
        """
        ids, uploads, counts = total.rows
        rows = [tree.row((ids, uploads), n) for n in counts.nonzero()[:, 0].tolist()]
        if not rows:
            summand = self.algorithm.summand(task, server, ids[0], tree.row(uploads, 0))
            return self.algorithm.server_update(task, server, tree.each(torch.zeros_like, summand))
        updates = [update_of(received(self.algorithm, server, id), upload) for id, upload in rows]
        sent = torch.stack([update.sent for update in updates])
        masks = [update.personal for update in updates]
        shared = [torch.ones_like(sent[0], dtype=torch.bool) if mask is None else ~mask for mask in masks]
        mean = trimmed_mean(sent, torch.stack(shared), self.trim)
        summands = (
            self.algorithm.summand(task, server, id, with_update(upload, update._replace(sent=mean)))
            for (id, upload), update in zip(rows, updates, strict=True)
        )
        return self.algorithm.server_update(task, server, reduce(tree.add, summands))


def trimmed_mean(values: Tensor, present: Tensor, trim: float) -> Tensor:
    """The mean of a column's present values without the largest and smallest `trim`; 0.5 is the median.

    Of c values, floor(trim c) are removed at each end, but never all: one or two stay. A column without any
    gives 0.
    """
    count = present.sum(0)  # [s]
    largest = ((count - 1) // 2).clamp(min=0)
    out = torch.minimum((trim * count).floor().long(), largest)
    ordered = torch.where(present, values, torch.inf).sort(0).values  # [n, s], absent values come last
    place = torch.arange(len(values), device=values.device)[:, None]
    stays = (place >= out) & (place < count - out)
    return torch.where(stays, ordered, 0).sum(0) / (count - 2 * out).clamp(min=1)


def median(algorithm: AnyAlgorithm) -> Trimmed:
    """Entry by entry the median."""
    return Trimmed(algorithm, 0.5)


ROBUST_RULES: dict[str, Callable[..., AnyAlgorithm]] = {
    "clip": Clipped,
    "evidence": ByEvidence,
    "median": median,
    "trimmed_mean": Trimmed,
}
