"""APFL (Deng et al. 2020): a mixture of a personal and the global model, with a weight that each client learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, State, begin, kept
from copfl.core.task import Data, Personal, Plan, Task
from copfl.core.train import descend, mean_loss
from copfl.errors import UsageError, at_least, one_of
from copfl.parts import averaging
from copfl.parts.averaging import Down, Upload
from copfl.parts.mixtures import MIXTURES


class Client(NamedTuple):
    personal: Tensor  # [p], the personal entries of the global model: local statistics
    moments: State  # of the global model
    v: Tensor  # [D], v_n, the personal model
    v_moments: State
    alpha: Tensor  # [], alpha_n
    started: Tensor  # [] bool, whether it has trained before


@dataclass(frozen=True)
class APFL:
    """w is FedAvg's; v descends the loss of alpha * v + (1 - alpha) * w, and once a round so does alpha.

    mixture  "predictions": the two models' probabilities are mixed (the authors' code mixes outputs too). "weights":
             their parameters are (Paper: Algorithm 1)
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    alpha: float = 0.5  # before the first round
    alpha_rate: float = 0.01  # the step size of alpha; 0 keeps it fixed
    mixture: str = "predictions"

    personal: ClassVar[tuple[str, ...]] = ()
    total_epochs = property(averaging.total_epochs)
    server_init = averaging.server_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, alpha_rate=self.alpha_rate)
        one_of(MIXTURES, mixture=self.mixture)
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"alpha={self.alpha} must be between 0, all global, and 1, all personal")

    def client_init(self, task: Task) -> Client:
        personal, moments = averaging.client_init(self, task)
        alpha = task.initial.new_full((), self.alpha)
        never = task.initial.new_zeros((), dtype=torch.bool)
        return Client(personal, moments, task.initial, moments, alpha, never)

    def personal_model(self, task: Task, client: Client, down: Down) -> Personal:
        return MIXTURES[self.mixture].personal_model(task, *self._models(task, client, down), client.alpha)

    def _models(self, task: Task, client: Client, down: Down) -> tuple[Tensor, Tensor]:
        """v_n and w; a new client has no v_n yet and takes the global model."""
        w = averaging.personal_model(self, task, client, down)
        return torch.where(client.started, client.v, w), w

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        mixture, (v, w) = MIXTURES[self.mixture], self._models(task, client, down)
        v_moments = begin(self.optimizer, client.v_moments, v[: task.d])
        moments = begin(self.optimizer, client.moments, w[: task.d])
        batches, losses = [batch for batches in plan for batch in batches], []
        slope = mixture.slope(task, v, w, client.alpha, data, batches[0])
        alpha = (client.alpha - self.alpha_rate * slope).clamp(0, 1)
        for batch in batches:
            options = mixture.options(task, w, alpha, data, batch)  # both step from the same v and w
            v, v_moments, loss = descend(task, self.optimizer, v, v_moments, data, (batch,), **options)
            w, moments, _ = descend(task, self.optimizer, w, moments, data, (batch,))
            losses.append(loss)
        global_part = averaging.client_after(self, task, w, moments)
        v_state, started = kept(self.optimizer, v_moments), torch.ones_like(client.started)
        upload = averaging.upload(self, task, w, data)
        metrics = {"loss": mean_loss(losses, batches), "weight": upload.size, "alpha": alpha}
        model = mixture.personal_model(task, v, w, alpha)
        return ClientOutput(Client(*global_part, v, v_state, alpha, started), upload, model, metrics)
