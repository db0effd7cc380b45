"""A gate per client and layer between its own and the shared values: variant (b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import (
    ClientOutput,
    Data,
    Metrics,
    Plan,
    State,
    Task,
    fresh,
    training_split,
    tree,
    validation_split,
)
from copfl.parts.averaging import Averaging, shared_of, weighted_mean, with_shared
from copfl.parts.layers import layer_count, layer_of_entries

from .fedrod_gate import Server, Upload, prior_metrics
from .gates import first_prior, fitted, next_prior


class Client(NamedTuple):
    w: Tensor  # [D], after its last training
    moments: State
    gates: Tensor  # [L], 0: shared, 1: own


@dataclass(frozen=True)
class BlockGate(Averaging):
    """The mean of all models. A client starts from w + g_l (own - w) in layer l and trains everything.

    All gates 0 are FedAvg with fine-tuning, that of the head 1 FedPer, all 1 training alone. In the first
    `explore` rounds every fifth sample is held out, and the gates are fitted; then all samples train.
    """

    explore: int = 20
    first_head_gate: float = 0.5

    def _first(self, task: Task) -> Tensor:
        body = task.initial.new_zeros(layer_count(task.layout) - 1)
        return torch.cat([body, task.initial.new_full((1,), self.first_head_gate)])

    def server_init(self, task: Task, clients: int) -> Server:
        w = shared_of(task, (), task.initial)
        return Server(w, first_prior(self._first(task)), w.new_zeros((), dtype=torch.int64))

    def client_init(self, task: Task) -> Client:
        return Client(task.initial, fresh(self.optimizer, task), self._first(task))

    def downlink(self, server: Server, ids: Tensor) -> Server:
        return tree.repeat(server, len(ids))

    def _mixed(self, task: Task, client: Client, down: Server, gates: Tensor) -> Tensor:
        shared = with_shared(task, (), client.w, down.w)
        own_part = gates[layer_of_entries(task.layout, task.device)]
        return shared + own_part * (client.w - shared)

    def personal_model(self, task: Task, client: Client, down: Server) -> Tensor:
        return self._mixed(task, client, down, client.gates)

    def global_statistics(self, task: Task, client: Client) -> Tensor:
        return client.w[task.d :]

    def client_update(self, task: Task, client: Client, down: Server, data: Data, plan: Plan) -> ClientOutput:
        exploring = down.round < self.explore

        def at(gates: Tensor) -> Tensor:
            return self._mixed(task, client, down, gates)

        gates, evidence = fitted(task, at, down.prior, validation_split(data))
        gates = torch.where(exploring, gates.clamp(0, 1), client.gates)
        evidence = tree.each(lambda t: exploring * t, evidence)
        plan = training_split(plan, fold=5 * exploring.to(torch.int64) - 1)
        trained = self.fit(task, at(gates), client.moments, data, plan)
        weight = self.weight(data, trained.w)
        upload = Upload(shared_of(task, (), trained.w), weight, evidence)
        metrics = {"loss": trained.loss, "weight": weight}
        metrics |= {f"gate_{n}": gate for n, gate in enumerate(gates.unbind())}
        return ClientOutput(Client(trained.w, trained.state, gates), upload, trained.w, metrics)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Upload:
        return Upload(upload.size * upload.w, upload.size, upload.evidence)

    def server_update(self, task: Task, server: Server, total: Upload) -> tuple[Server, Metrics]:
        w = weighted_mean(total.w, total.size, server.w)
        prior = next_prior(server.prior, self._first(task), total.evidence)
        return Server(w, prior, server.round + 1), prior_metrics(prior)
