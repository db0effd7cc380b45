"""FedRoD whose personal head has a gate per client: variant (a)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.algorithms.fedrod import Client as RodClient
from copfl.algorithms.fedrod import FedRoD, with_head
from copfl.core import ClientOutput, Data, Metrics, Plan, Task, training_split, tree, validation_split
from copfl.parts.averaging import Down, weighted_mean

from .gates import Evidence, Prior, first_prior, fitted, next_prior


class Server(NamedTuple):
    w: Tensor  # [D]
    prior: Prior
    round: Tensor  # [] int64


class Client(NamedTuple):
    personal: Tensor
    moments: object
    head: Tensor
    head_moments: object
    gates: Tensor  # [1]


class Upload(NamedTuple):
    w: Tensor
    size: Tensor
    evidence: Evidence


@dataclass(frozen=True)
class FedRoDGate(FedRoD):
    """A client predicts with the shared head plus g_n times its personal head.

    In the first `explore` rounds every fifth sample is held out, and the gates are fitted; then all samples
    train.
    """

    explore: int = 20

    def server_init(self, task: Task, clients: int) -> Server:  # type: ignore[override]
        one = task.initial.new_ones(1)
        return Server(
            super().server_init(task, clients).w, first_prior(one), one.new_zeros((), dtype=torch.int64)
        )

    def client_init(self, task: Task) -> Client:  # type: ignore[override]
        return Client(*super().client_init(task), task.initial.new_ones(1))

    def downlink(self, server: Server, ids: Tensor) -> Server:
        return tree.repeat(server, len(ids))

    def personal_model(self, task: Task, client: Client, down: Server) -> Tensor:  # type: ignore[override]
        return with_head(task, self.global_model(task, client, down), client.gates * client.head)

    def client_update(  # type: ignore[override]
        self, task: Task, client: Client, down: Server, data: Data, plan: Plan
    ) -> ClientOutput:
        exploring = down.round < self.explore
        plan = training_split(plan, fold=5 * exploring.to(torch.int64) - 1)
        after, upload, trained, metrics = super().client_update(
            task, RodClient(*client[:4]), Down(down.w), data, plan
        )
        assert isinstance(trained, Tensor)
        shared = with_head(task, trained, -after.head)

        def at(gates: Tensor) -> Tensor:
            return with_head(task, shared, gates * after.head)

        gates, evidence = fitted(task, at, down.prior, validation_split(data))
        gates = torch.where(exploring, gates.clamp(0, 1), client.gates)
        evidence = tree.each(lambda t: exploring * t, evidence)
        metrics = {**metrics, "gate_0": gates[0]}
        kept = Client(after.personal, after.moments, after.head, after.head_moments, gates)
        return ClientOutput(kept, Upload(upload.w, upload.size, evidence), at(gates), metrics)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Upload:
        return Upload(upload.size * upload.w, upload.size, upload.evidence)

    def server_update(self, task: Task, server: Server, total: Upload) -> tuple[Server, Metrics]:
        w, prior = weighted_mean(total.w, total.size, server.w), server.prior
        prior = next_prior(prior, torch.ones_like(prior.mean[:-1]), total.evidence)
        return Server(w, prior, server.round + 1), prior_metrics(prior)


def prior_metrics(prior: Prior, name: str = "mu") -> Metrics:
    """mu and tau of each gate."""
    means = {f"{name}_{n}": value for n, value in enumerate(prior.mean.unbind())}
    return means | {f"{name}_tau_{n}": value.sqrt() for n, value in enumerate(prior.variance.unbind())}
