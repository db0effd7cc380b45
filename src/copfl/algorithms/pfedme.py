"""pFedMe (T. Dinh et al. 2020): each client descends the Moreau envelope of its loss."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import Data, Plan, State, Task, begin, kept
from copfl.core.algorithm import ClientOutput, Metrics
from copfl.core.train import Trained, descend, fresh, has_valid, mean_loss, pull
from copfl.parts.averaging import Averaging, Down, Server, Total, with_shared


class Client(NamedTuple):
    theta: Tensor  # [D], theta_n, the personal model
    moments: State  # of the inner steps
    started: Tensor  # [] bool, whether it has trained before


@dataclass(frozen=True)
class PFedMe(Averaging):
    """Per batch: `inner_steps` to theta = argmin f + lam / 2 * |theta - w_n|^2, then w_n moves to theta.

    The optimizer takes the inner steps. The published one is Sgd(lr=0.09, momentum=0, weight_decay=0.001),
    its lr tuned between 0.01 and 0.1.
    """

    # Paper: averages evenly (weights="equal" restores it; the released code weighs by samples). All clients
    # train in every round and some are averaged; here those that take part train. It counts
    # steps, not epochs.
    rate: float = 0.005  # eta, of w_n
    lam: float = 15.0  # lambda
    inner_steps: int = 5  # K
    server_rate: float = 1.0  # beta

    minimum = (("rate", 0), ("lam", 0), ("inner_steps", 1), ("server_rate", 0))
    fine_tuned = True

    def client_init(self, task: Task) -> Client:
        never = task.initial.new_zeros((), dtype=torch.bool)
        return Client(task.initial, fresh(self.optimizer, task), never)

    def global_statistics(self, task: Task, client: Client) -> Tensor:
        return client.theta[task.d :]

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """theta_n; the global model for a new client, which has no theta_n yet."""
        return torch.where(client.started, client.theta, self.global_model(task, client, down))

    def global_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return with_shared(task, self.personal, client.theta, down.w)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        theta = self.global_model(task, client, down)  # where w_n and theta start; theta is not reset
        w = theta[: task.d]
        moments = begin(self.optimizer, client.moments, w)
        batches, losses = [batch for batches in plan for batch in batches], []
        for batch in batches:
            steps, towards = (batch,) * self.inner_steps, pull(self.lam, w)
            theta, moments, loss = descend(task, self.optimizer, theta, moments, data, steps, adjust=towards)
            # The envelope's gradient is lambda * (w - theta): w <- w - eta * lambda * (w - theta).
            w = torch.where(has_valid(batch), w - self.rate * self.lam * (w - theta[: task.d]), w)
            losses.append(loss)
        trained = Trained(torch.cat([w, theta[task.d :]]), moments, mean_loss(losses, batches))
        after = Client(theta, kept(self.optimizer, moments), torch.ones_like(client.started))
        return ClientOutput(after, *self.output(task, trained, data, predicts=theta)[1:])

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """w <- (1 - beta) w + beta * mean."""
        mean, metrics = super().server_update(task, server, total)
        mixed = (1 - self.server_rate) * server.w + self.server_rate * mean.w
        # Shared statistics take the mean: a variance that is extrapolated beyond it may turn negative.
        return Server(torch.cat([mixed[: task.d], mean.w[task.d :]])), metrics
