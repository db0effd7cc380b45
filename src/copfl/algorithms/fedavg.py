"""FedAvg (McMahan et al. 2017): everybody trains the same model, the server averages."""

from __future__ import annotations

from dataclasses import dataclass, field

from copfl.algorithms import averaging
from copfl.algorithms.averaging import Client, Down, Upload
from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, begin, train
from copfl.core.task import Data, Plan, Task
from copfl.errors import at_least


@dataclass(frozen=True)
class FedAvg:
    """The mean of all models, weighted by their samples; the parts it `keeps` stay with each client.

    keeps=("head",) is FedPer, ("body", "buffers") LG-FedAvg, ("norms", "buffers") FedBN, all of it local training.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    personal: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)

    total_epochs = property(averaging.total_epochs)
    server_init = averaging.server_init
    client_init = averaging.client_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update
    personal_model = averaging.personal_model

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        w = self.personal_model(task, client, down)
        moments = begin(self.optimizer, client.moments, w[: task.d])
        w, moments, loss = train(task, self.optimizer, w, moments, data, plan)
        upload = averaging.upload(self, task, w, data.size)
        return ClientOutput(
            averaging.after(self, task, w, moments), upload, w, {"loss": loss, "weight": upload.size}
        )


def fedavg(optimizer: Optimizer = Sgd(), epochs: int = 1) -> FedAvg:
    """Everything is shared."""
    return FedAvg(optimizer, epochs)
