"""FedProx (Li et al. 2020): FedAvg with a proximal term that limits the drift from the global model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd
from copfl.core.task import Data, Plan, Task
from copfl.core.train import pull
from copfl.errors import at_least
from copfl.parts import averaging
from copfl.parts.averaging import Client, Down, Upload


@dataclass(frozen=True)
class FedProx:
    """Local training of f(w) + mu / 2 * |w - global model|^2, then the mean weighted by samples; mu=0 is FedAvg."""

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    mu: float = 0.1  # the authors name no default and tune over 0.001, 0.01, 0.1, 0.5, 1

    personal: ClassVar[tuple[str, ...]] = ()
    total_epochs = property(averaging.total_epochs)
    server_init = averaging.server_init
    client_init = averaging.client_init
    downlink = averaging.downlink
    personal_model = averaging.personal_model
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, mu=self.mu)

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        w = self.personal_model(task, client, down)
        proximal = pull(self.mu, w[: task.d])
        trained = averaging.fit(self, task, w, client.moments, data, plan, adjust=proximal)
        return averaging.output(self, task, trained, data)
