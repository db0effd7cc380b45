"""FedPAC with gates: where a client's head starts, and how far each layer goes from the received one: variant (c)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.algorithms.fedpac import FedPAC
from copfl.core import (
    ClientOutput,
    Data,
    Metrics,
    Plan,
    State,
    Task,
    faster,
    training_split,
    tree,
    validation_split,
)
from copfl.parts.averaging import combined, personal_of, shared_of, weighted_mean
from copfl.parts.classes import aligned, centroids_of, class_sums, prior_means
from copfl.parts.layers import layer_count, layer_of_entries
from copfl.parts.phases import head_then_body
from copfl.parts.quadratic import combination

from .fedrod_gate import prior_metrics
from .gates import Evidence, Prior, first_prior, fitted, next_prior


class Server(NamedTuple):
    w: Tensor  # [s], the body
    heads: Tensor  # [N, h], each client's combined head
    mean_head: Tensor  # [h], the mean by samples
    centroids: Tensor  # [C, f]
    known: Tensor  # [C] bool
    starts: Prior  # of the gates of the head: its own and the mean head, each against the combined one
    ends: Prior  # of the gates of the layers: trained against received
    round: Tensor  # [] int64


class Down(NamedTuple):
    w: Tensor
    head: Tensor  # [h], combined for this client
    mean_head: Tensor
    centroids: Tensor
    known: Tensor
    starts: Prior
    ends: Prior
    round: Tensor


class Client(NamedTuple):
    personal: Tensor
    head_moments: State
    body_moments: State
    w: Tensor  # [D], as it was trained last
    started: Tensor  # [] bool
    starts: Tensor  # [2] or [3]
    ends: Tensor  # [L]


class Upload(NamedTuple):
    w: Tensor
    size: Tensor
    head: Tensor
    means: Tensor
    spread: Tensor
    features: Tensor
    counts: Tensor
    starts: Evidence
    ends: Evidence


class Total(NamedTuple):
    w: Tensor
    size: Tensor
    head: Tensor  # [h], sum of size * head
    heads: Tensor
    means: Tensor
    spread: Tensor
    reported: Tensor
    features: Tensor
    counts: Tensor
    starts: Evidence
    ends: Evidence


@dataclass(frozen=True)
class FedPACGate(FedPAC):
    """FedPAC whose head starts from (1 - g_0 - g_1) combined + g_0 own + g_1 mean.

    With `body_gate` the body starts from (1 - g_2) mean + g_2 own; g_0 = g_2 = 1 is training alone, in two phases.
    With `end_gates` a client predicts with received + g_l (trained - received) in layer l. In the first `explore`
    rounds every fifth sample is held out, and the gates are fitted; then all samples train.
    """

    explore: int = 20
    start_gates: bool = True
    body_gate: bool = False
    end_gates: bool = False
    memory: float = 0.0  # of a client's gates from round to round
    common: bool = False  # all clients have the federation's gates

    def _starts(self, task: Task) -> Tensor:
        return task.initial.new_zeros(3 if self.body_gate else 2)

    def _ends(self, task: Task) -> Tensor:
        return task.initial.new_ones(layer_count(task.layout))

    def server_init(self, task: Task, clients: int) -> Server:  # type: ignore[override]
        w, heads, centroids, known = super().server_init(task, clients)
        priors = first_prior(self._starts(task)), first_prior(self._ends(task))
        return Server(w, heads, heads[0], centroids, known, *priors, w.new_zeros((), dtype=torch.int64))

    def client_init(self, task: Task) -> Client:  # type: ignore[override]
        never = task.initial.new_zeros((), dtype=torch.bool)
        return Client(*super().client_init(task), task.initial, never, self._starts(task), self._ends(task))

    def downlink(self, server: Server, ids: Tensor) -> Down:  # type: ignore[override]
        rows = tree.repeat(server._replace(heads=server.mean_head), len(ids))
        return Down(*rows._replace(heads=server.heads[ids]))

    def _gates(self, fitted: Tensor, prior: Prior, before: Tensor) -> Tensor:
        gates = prior.mean[:-1] if self.common else fitted
        return self.memory * before + (1 - self.memory) * gates.clamp(0, 1)

    def _start(self, task: Task, client: Client, down: Down, gates: Tensor) -> Tensor:
        own = torch.where(client.started, task.layout.entries(client.w, "head"), down.head)
        head = down.head + gates[0] * (own - down.head) + gates[1] * (down.mean_head - down.head)
        body = down.w
        if self.body_gate:
            own_body = torch.where(client.started, shared_of(task, self.personal, client.w), down.w)
            body = down.w + gates[2] * (own_body - down.w)
        return combined(task, self.personal, torch.cat([head, client.personal]), body)

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:  # type: ignore[override]
        return self._start(task, client, down, client.starts)

    def client_update(  # type: ignore[override]
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput:
        exploring, held_out = down.round < self.explore, validation_split(data)
        plan = training_split(plan, fold=5 * exploring.to(torch.int64) - 1)
        starts, of_starts = client.starts, _nothing(down.starts)
        if self.start_gates:
            starts, of_starts = fitted(
                task, lambda gates: self._start(task, client, down, gates), down.starts, held_out
            )
            starts = self._gates(starts, down.starts, client.starts)
            heads = starts[:2] / starts[:2].sum().clamp(min=1)
            starts = torch.where(exploring, torch.cat([heads, starts[2:]]), client.starts)
        start = self._start(task, client, down, starts)

        before, n = class_sums(task, start, data), data.size.to(start.dtype)
        optimizers = faster(self.optimizer, self.head_speed), self.optimizer
        moments = client.head_moments, client.body_moments
        pulled = aligned(task, down.centroids, down.known, before, self.alignment)
        w, *states, loss = head_then_body(
            task, optimizers, start, moments, data, plan, self.head_epochs, objective=pulled
        )
        after, body = class_sums(task, w, data), shared_of(task, self.personal, w)
        means, spread = prior_means(before, n)
        head = task.layout.entries(w, "head")

        def at(gates: Tensor) -> Tensor:
            reached = gates[layer_of_entries(task.layout, task.device)]
            return start + reached * (w - start)

        ends, of_ends, predicts = client.ends, _nothing(down.ends), w
        if self.end_gates:
            ends, of_ends = fitted(task, at, down.ends, held_out)
            ends = torch.where(exploring, self._gates(ends, down.ends, client.ends), client.ends)
            predicts = at(ends)
        of_starts, of_ends = tree.each(lambda t: exploring * t, (of_starts, of_ends))
        weight = self.weight(data, w)
        upload = Upload(body, weight, head, means, spread, after.features, after.counts, of_starts, of_ends)
        kept = Client(personal_of(task, (), w), *states, w, torch.ones_like(client.started), starts, ends)
        metrics = {"loss": loss, "weight": weight}
        metrics |= {f"start_{n}": gate for n, gate in enumerate(starts.unbind())}
        metrics |= {f"end_{n}": gate for n, gate in enumerate(ends.unbind())}
        return ClientOutput(kept, upload, predicts, metrics)

    def next_message(self, task: Task, down: Down, upload: Upload) -> Down:  # type: ignore[override]
        return down._replace(head=upload.head)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:  # type: ignore[override]
        rows = (upload.head, upload.means, upload.spread, torch.ones_like(upload.spread))
        tables = tree.placed(rows, id, server.heads.shape[0])
        sums = upload.features, upload.counts, upload.starts, upload.ends
        return Total(upload.size * upload.w, upload.size, upload.size * upload.head, *tables, *sums)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:  # type: ignore[override]
        body = weighted_mean(total.w, total.size, server.w)
        mean_head = weighted_mean(total.head, total.size, server.mean_head)
        centroids = centroids_of(total.features, total.counts, server.centroids)
        who = total.reported.nonzero()[:, 0]
        weights = combination(total.means[who].flatten(1), total.spread[who]).to(server.w.dtype)
        heads = server.heads.index_copy(0, who, weights @ total.heads[who])
        starts = next_prior(server.starts, self._starts(task), total.starts)
        ends = next_prior(server.ends, self._ends(task), total.ends)
        metrics = {"own_head_weight": weights.diagonal().sum() / max(len(who), 1)}
        metrics |= prior_metrics(starts, "start_mu") | prior_metrics(ends, "end_mu")
        known = server.known | (total.counts > 0)
        return Server(body, heads, mean_head, centroids, known, starts, ends, server.round + 1), metrics


def _nothing(prior: Prior) -> Evidence:
    zeros = torch.zeros_like(prior.mean)
    return Evidence(zeros, zeros[:, None] * zeros, zeros, zeros)
