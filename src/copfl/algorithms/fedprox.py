"""FedProx (Li et al. 2020): FedAvg with a proximal term that limits the drift from the global model."""

from dataclasses import dataclass

from copfl.core import ClientOutput, Data, Plan, Task, pull
from copfl.parts.averaging import Averaging, Client, Down


@dataclass(frozen=True)
class FedProx(Averaging):
    """FedAvg with local training of f(w) + mu / 2 * |w - global model|^2; mu=0 is FedAvg."""

    # Paper: draws clients in proportion to their samples and averages them evenly; here they are drawn evenly
    # and weighed by samples. Slow clients may make fewer epochs there; here all make `epochs`.
    mu: float = 0.1  # the authors name no default and tune over 0.001, 0.01, 0.1, 0.5, 1

    minimum = (("mu", 0),)
    fine_tuned = True

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w = self.global_model(task, client, down)
        trained = self.fit(task, w, client.moments, data, plan, adjust=pull(self.mu, w[: task.d]))
        return self.output(task, trained, data)
