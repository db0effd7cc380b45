"""FedProx (Li et al. 2020): FedAvg with a proximal term that limits the drift from the global model."""

from __future__ import annotations

from dataclasses import dataclass

from copfl.core.algorithm import ClientOutput
from copfl.core.task import Data, Plan, Task
from copfl.core.train import pull
from copfl.errors import at_least
from copfl.parts.averaging import Averaging, Client, Down, Upload


@dataclass(frozen=True)
class FedProx(Averaging):
    """FedAvg with local training of f(w) + mu / 2 * |w - global model|^2; mu=0 is FedAvg."""

    mu: float = 0.1  # the authors name no default and tune over 0.001, 0.01, 0.1, 0.5, 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, mu=self.mu)

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        w = self.global_model(task, client, down)
        proximal = pull(self.mu, w[: task.d])
        trained = self.fit(task, w, client.moments, data, plan, adjust=proximal)
        return self.output(task, trained, data)
