"""Ditto (Li et al. 2021): FedAvg, and for each client a personal model regularised towards the global model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, State
from copfl.core.task import Data, Plan, Task
from copfl.core.train import pull
from copfl.errors import at_least
from copfl.parts import averaging
from copfl.parts.averaging import Down, Upload


class Client(NamedTuple):
    personal: Tensor  # [p], the personal entries of the global model: local statistics
    moments: State  # of the global model
    v: Tensor  # [D], v_n, the personal model
    v_moments: State
    started: Tensor  # [] bool, whether it has trained before


@dataclass(frozen=True)
class Ditto:
    """The global model is FedAvg's; v <- v - eta * (grad f(v) + lam * (v - global model)) on the same batches.

    `epochs` are those of the global model, `personal_epochs` those of v. lam=0 is local training alongside FedAvg.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    lam: float = 1.0  # lambda
    personal_epochs: int = 1

    personal: ClassVar[tuple[str, ...]] = ()
    server_init = averaging.server_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, personal_epochs=self.personal_epochs)
        at_least(0, lam=self.lam)

    @property
    def total_epochs(self) -> int:
        return max(self.epochs, self.personal_epochs)

    def client_init(self, task: Task) -> Client:
        personal, moments = averaging.client_init(self, task)
        return Client(personal, moments, task.initial, moments, task.initial.new_zeros((), dtype=torch.bool))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """v_n; the global model for a new client, which has no v_n yet."""
        # Paper: v_n starts from the initial weights. So it does in round 0; a later client: from the global model.
        return torch.where(client.started, client.v, averaging.personal_model(self, task, client, down))

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        w, v = averaging.personal_model(self, task, client, down), self.personal_model(task, client, down)
        towards = pull(self.lam, w[: task.d])  # the global model as received, not as trained below
        own_plan = plan[: self.personal_epochs]
        personal = averaging.fit(self, task, v, client.v_moments, data, own_plan, adjust=towards)
        trained = averaging.fit(self, task, w, client.moments, data, plan[: self.epochs])
        global_part, upload, *_ = averaging.output(self, task, trained, data)
        after = Client(*global_part, personal.w, personal.state, torch.ones_like(client.started))
        metrics = {"loss": personal.loss, "weight": upload.size, "global_loss": trained.loss}
        return ClientOutput(after, upload, personal.w, metrics)
