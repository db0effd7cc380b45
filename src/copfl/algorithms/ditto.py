"""Ditto (Li et al. 2021): FedAvg, and beside it a personal model that is pulled towards it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.algorithms import averaging
from copfl.algorithms.averaging import Down, Upload
from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, State, begin, kept, pull, train
from copfl.core.task import Data, Plan, Task
from copfl.errors import at_least


class Client(NamedTuple):
    own: Tensor  # [h], what stays home of the global model: local statistics
    moments: State  # of the global half
    v: Tensor  # [D], v_n, the personal model
    v_moments: State
    started: Tensor  # [] bool, whether it has trained before


@dataclass(frozen=True)
class Ditto:
    """The global half is FedAvg; v <- v - eta * (grad f(v) + pull * (v - broadcast)) on the same batches."""

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    pull: float = 1.0  # lambda
    personal_epochs: int = 1

    personal: ClassVar[tuple[str, ...]] = ()
    server_init = averaging.server_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, personal_epochs=self.personal_epochs)
        at_least(0, pull=self.pull)

    @property
    def total_epochs(self) -> int:
        return max(self.epochs, self.personal_epochs)

    def client_init(self, task: Task) -> Client:
        own, moments = averaging.client_init(self, task)
        return Client(
            own, moments, task.initial, moments, torch.zeros((), dtype=torch.bool, device=task.device)
        )

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """v_n; a newcomer has none yet and takes the broadcast."""
        # Paper: v_n starts from the first weights. So it does in round 0; who joins later starts from the broadcast.
        return torch.where(client.started, client.v, averaging.personal_model(self, task, client, down))

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        w, v = averaging.personal_model(self, task, client, down), self.personal_model(task, client, down)
        held = pull(self.pull, w[: task.d])  # towards the broadcast, not towards the half that trains below
        v_moments = begin(self.optimizer, client.v_moments, v[: task.d])
        mine = plan[: self.personal_epochs]
        v, v_moments, loss = train(task, self.optimizer, v, v_moments, data, mine, adjust=held)
        moments = begin(self.optimizer, client.moments, w[: task.d])
        w, moments, global_loss = train(task, self.optimizer, w, moments, data, plan[: self.epochs])
        half = averaging.after(self, task, w, moments)
        after = Client(*half, v, kept(self.optimizer, v_moments), torch.ones_like(client.started))
        upload = averaging.upload(self, task, w, data.size)
        return ClientOutput(
            after, upload, v, {"loss": loss, "weight": upload.size, "global_loss": global_loss}
        )


def ditto(
    optimizer: Optimizer = Sgd(), epochs: int = 1, pull: float = 1.0, personal_epochs: int = 1
) -> Ditto:
    """`epochs` for the global half, `personal_epochs` for the personal one; pull=0 is local training beside FedAvg."""
    return Ditto(optimizer, epochs, pull, personal_epochs)
