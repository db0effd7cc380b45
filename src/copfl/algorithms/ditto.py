"""Ditto (Li et al. 2021): FedAvg, and personal models regularised towards the global model."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Plan, State, Task, pull
from copfl.parts.averaging import Averaging, Down


class Client(NamedTuple):
    personal: Tensor  # [p], the personal entries of the global model: local statistics
    moments: State  # of the global model
    v: Tensor  # [D], v_n, the personal model
    v_moments: State
    started: Tensor  # [] bool, whether it has trained before


@dataclass(frozen=True)
class Ditto(Averaging):
    """FedAvg for the global model w; v <- v - eta * (grad f(v) + lam * (v - w)) on the same batches.

    `epochs` are those of the global model, `personal_epochs` those of v. lam=0 is local training alongside
    FedAvg.
    """

    # Paper: the released code averages w evenly; weights="equal" restores it.
    lam: float = 1.0  # lambda
    personal_epochs: int = 1

    minimum = (("lam", 0), ("personal_epochs", 1))

    @property
    def total_epochs(self) -> int:
        return max(self.epochs, self.personal_epochs)

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        return Client(personal, moments, task.initial, moments, task.initial.new_zeros((), dtype=torch.bool))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """v_n; the global model for a new client, which has no v_n yet."""
        # Paper: v_n starts from the initial weights. Here it does in round 0, later from the global model.
        return torch.where(client.started, client.v, self.global_model(task, client, down))

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w, v = self.global_model(task, client, down), self.personal_model(task, client, down)
        towards = pull(self.lam, w[: task.d])  # the global model as received, not as trained below
        personal = self.fit(task, v, client.v_moments, data, plan[: self.personal_epochs], adjust=towards)
        trained = self.fit(task, w, client.moments, data, plan[: self.epochs])
        (local, moments), upload, *_ = self.output(task, trained, data)
        after = Client(local, moments, personal.w, personal.state, torch.ones_like(client.started))
        metrics = {"loss": personal.loss, "weight": upload.size, "global_loss": trained.loss}
        return ClientOutput(after, upload, personal.w, metrics)
