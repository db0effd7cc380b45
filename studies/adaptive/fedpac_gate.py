"""FedPAC with gates: what a client's training starts from, and what it predicts with: variants (c)."""

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
    starts: Prior
    ends: Prior
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
    starts: Tensor  # [S]
    ends: Tensor  # [E]


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
    """FedPAC with gates. In the first `explore` rounds every fifth sample is held out, and they are fitted.

    start_gates  "own_head", "mean_head": the head starts from (1 - g - g') combined + g own + g' mean.
                 "own_body": the body starts from (1 - g) mean + g own. With both own parts at 1 a client
                 trains alone
    end_gates    "layers": a client predicts with received + g_l (trained - received) in layer l. "shared": with
                 trained + g (mean - trained) in the head, and trained + g (received - trained) in the body
    """

    explore: int = 20
    start_gates: tuple[str, ...] = ()
    end_gates: str = ""
    memory: float = 0.0  # of a client's gates from round to round

    def _starts(self, task: Task) -> Tensor:
        return task.initial.new_zeros(len(self.start_gates))

    def _ends(self, task: Task) -> Tensor:
        if self.end_gates == "layers":
            return task.initial.new_ones(layer_count(task.layout))
        return task.initial.new_zeros(2 if self.end_gates else 0)

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

    def _start(self, task: Task, client: Client, down: Down, gates: Tensor) -> Tensor:
        """The model that the client's training starts from."""
        head, body = down.head, down.w
        own_head, own_body = task.layout.entries(client.w, "head"), shared_of(task, self.personal, client.w)
        differences = {"own_head": own_head - down.head, "mean_head": down.mean_head - down.head}
        for name, gate in zip(self.start_gates, gates.unbind(), strict=True):
            used = gate if name == "mean_head" else gate * client.started
            if name == "own_body":
                body = body + used * (own_body - body)
            else:
                head = head + used * differences[name]
        return combined(task, self.personal, torch.cat([head, client.personal]), body)

    def _end(self, task: Task, start: Tensor, mean_head: Tensor, w: Tensor, gates: Tensor) -> Tensor:
        """The model that the client predicts with."""
        if self.end_gates == "layers":
            return start + gates[layer_of_entries(task.layout, task.device)] * (w - start)
        head = task.layout.entries(w, "head")
        body = w + gates[1] * (start - w)
        return task.layout.with_entries(body, "head", head + gates[0] * (mean_head - head))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:  # type: ignore[override]
        return self._start(task, client, down, client.starts)

    def client_update(  # type: ignore[override]
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput:
        exploring, held_out = down.round < self.explore, validation_split(data)
        plan = training_split(plan, fold=5 * exploring.to(torch.int64) - 1)  # -1: none is left out
        starts, of_starts = client.starts, _nothing(down.starts)
        if self.start_gates:
            starts, of_starts = fitted(
                task, lambda gates: self._start(task, client, down, gates), down.starts, held_out
            )
            starts = torch.where(exploring, self._gates(starts, client.starts), client.starts)
            if self.start_gates[:2] == ("own_head", "mean_head"):  # they add up to at most 1
                starts = torch.cat([starts[:2] / starts[:2].sum().clamp(min=1), starts[2:]])
        start = self._start(task, client, down, starts)

        before, n = class_sums(task, start, data), data.size.to(start.dtype)
        optimizers = faster(self.optimizer, self.head_speed), self.optimizer
        moments = client.head_moments, client.body_moments
        pulled = aligned(task, down.centroids, down.known, before, self.alignment)
        w, head_moments, body_moments, loss = head_then_body(
            task, optimizers, start, moments, data, plan, self.head_epochs, objective=pulled
        )
        after, body = class_sums(task, w, data), shared_of(task, self.personal, w)
        means, spread = prior_means(before, n)
        head = task.layout.entries(w, "head")

        ends, of_ends, predicts = client.ends, _nothing(down.ends), w
        if self.end_gates:
            ends, of_ends = fitted(
                task, lambda gates: self._end(task, start, down.mean_head, w, gates), down.ends, held_out
            )
            ends = torch.where(exploring, self._gates(ends, client.ends), client.ends)
            predicts = self._end(task, start, down.mean_head, w, ends)
        of_starts, of_ends = tree.each(lambda t: exploring * t, (of_starts, of_ends))
        weight = self.weight(data, w)
        upload = Upload(body, weight, head, means, spread, after.features, after.counts, of_starts, of_ends)
        started = torch.ones_like(client.started)
        kept = Client(personal_of(task, (), w), head_moments, body_moments, w, started, starts, ends)
        metrics = {"loss": loss, "weight": weight}
        metrics |= {f"start_{n}": gate for n, gate in enumerate(starts.unbind())}
        metrics |= {f"end_{n}": gate for n, gate in enumerate(ends.unbind())}
        return ClientOutput(kept, upload, predicts, metrics)

    def _gates(self, fitted: Tensor, before: Tensor) -> Tensor:
        """The client's gates of this round."""
        return self.memory * before + (1 - self.memory) * fitted.clamp(0, 1)

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
