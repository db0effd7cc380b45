"""Mean-regularised multi-task learning: each client's own model, regularised towards the mean of all."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Plan, State, Task, fresh, pull
from copfl.parts.averaging import Averaging, Down, with_shared


class Client(NamedTuple):
    w: Tensor  # [D], w_n
    moments: State
    started: Tensor  # [] bool, whether it has trained before


@dataclass(frozen=True)
class MRMTL(Averaging):
    """w_n <- w_n - eta * (grad f_n(w_n) + lam * (w_n - mean)), where mean is that of all clients' models.

    The mean is never trained: no client starts from it but a new one. lam=0 is local training. Published by
    Evgeniou and Pontil (KDD 2004) for kernels; as federated learning by Liu et al. (NeurIPS 2022).

    CO-PFL's "PMFL" is described as local models that may not deviate too far from a global consensus. Its
    reference cannot be identified; this is the published method with that description.
    """

    # Paper: all clients are in every mean, and start from the same weights. Here the mean is over the clients
    # of the round, and one that joins later starts from it.
    lam: float = 1.0  # lambda
    weights: str = field(default="equal", kw_only=True)

    minimum = (("lam", 0),)

    def client_init(self, task: Task) -> Client:
        never = task.initial.new_zeros((), dtype=torch.bool)
        return Client(task.initial, fresh(self.optimizer, task), never)

    def global_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return with_shared(task, self.personal, client.w, down.w)

    def global_statistics(self, task: Task, client: Client) -> Tensor:
        return client.w[task.d :]

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """w_n; the mean for a new client, which has no w_n yet."""
        return torch.where(client.started, client.w, self.global_model(task, client, down))

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w, mean = self.personal_model(task, client, down), self.global_model(task, client, down)
        towards = pull(self.lam, mean[: task.d])
        trained = self.fit(task, w, client.moments, data, plan, adjust=towards)
        after = Client(trained.w, trained.state, torch.ones_like(client.started))
        return ClientOutput(after, *self.output(task, trained, data)[1:])
