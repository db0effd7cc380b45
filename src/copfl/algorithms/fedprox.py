"""FedProx (Li et al. 2020): FedAvg whose clients are held back from drifting away from the broadcast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from copfl.algorithms import averaging
from copfl.algorithms.averaging import Client, Down, Upload
from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, begin, pull, train
from copfl.core.task import Data, Plan, Task
from copfl.errors import at_least


@dataclass(frozen=True)
class FedProx:
    """Local training of f(w) + pull / 2 * |w - broadcast|^2, then the mean weighted by samples."""

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    pull: float = 0.1  # mu; the authors name no default and tune over 0.001, 0.01, 0.1, 0.5, 1

    personal: ClassVar[tuple[str, ...]] = ()
    total_epochs = property(averaging.total_epochs)
    server_init = averaging.server_init
    client_init = averaging.client_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update
    personal_model = averaging.personal_model

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, pull=self.pull)

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        start = self.personal_model(task, client, down)
        moments = begin(self.optimizer, client.moments, start[: task.d])
        held = pull(self.pull, start[: task.d])
        w, moments, loss = train(task, self.optimizer, start, moments, data, plan, adjust=held)
        upload = averaging.upload(self, task, w, data.size)
        return ClientOutput(
            averaging.after(self, task, w, moments), upload, w, {"loss": loss, "weight": upload.size}
        )


def fedprox(optimizer: Optimizer = Sgd(), epochs: int = 1, pull: float = 0.1) -> FedProx:
    """FedAvg with a proximal pull towards the broadcast; pull=0 is FedAvg."""
    return FedProx(optimizer, epochs, pull)
