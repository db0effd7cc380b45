"""APFL (Deng et al. 2020): a mixture of a personal and the global model, with a share that each client learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.algorithms import averaging
from copfl.algorithms.averaging import Down, Upload
from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, State, begin, descend, kept, mean_loss
from copfl.core.task import Data, Personal, Plan, Task
from copfl.errors import UsageError, at_least, one_of
from copfl.parts.mixtures import MIXTURES


class Client(NamedTuple):
    own: Tensor  # [h], what stays home of the global model: local statistics
    moments: State  # of the global half
    v: Tensor  # [D], v_n, the personal model
    v_moments: State
    share: Tensor  # [], alpha_n
    started: Tensor  # [] bool, whether it has trained before


@dataclass(frozen=True)
class APFL:
    """w is FedAvg's; v descends the loss of share * v + (1 - share) * w, and once a round so does the share.

    mixture  "predictions": the two models' probabilities are mixed (the authors' code mixes answers too). "weights":
             their parameters are (Paper: Algorithm 1).
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    share: float = 0.5  # alpha before the first round
    share_rate: float = 0.01  # of alpha's own step; 0 keeps it
    mixture: str = "predictions"

    personal: ClassVar[tuple[str, ...]] = ()
    total_epochs = property(averaging.total_epochs)
    server_init = averaging.server_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, share_rate=self.share_rate)
        one_of(MIXTURES, mixture=self.mixture)
        if not 0 <= self.share <= 1:
            raise UsageError(f"share={self.share} must be between 0, all global, and 1, all personal")

    def client_init(self, task: Task) -> Client:
        own, moments = averaging.client_init(self, task)
        share, never = (
            task.initial.new_full((), self.share),
            torch.zeros((), dtype=torch.bool, device=task.device),
        )
        return Client(own, moments, task.initial, moments, share, never)

    def personal_model(self, task: Task, client: Client, down: Down) -> Personal:
        return MIXTURES[self.mixture].personal_model(task, *self._models(task, client, down), client.share)

    def _models(self, task: Task, client: Client, down: Down) -> tuple[Tensor, Tensor]:
        """v_n and w; a newcomer has no v_n yet and takes the broadcast for it."""
        w = averaging.personal_model(self, task, client, down)
        return torch.where(client.started, client.v, w), w

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        mixture, (v, w) = MIXTURES[self.mixture], self._models(task, client, down)
        v_moments = begin(self.optimizer, client.v_moments, v[: task.d])
        moments = begin(self.optimizer, client.moments, w[: task.d])
        batches, losses = [batch for batches in plan for batch in batches], []
        slope = mixture.slope(task, v, w, client.share, data, batches[0])
        share = (client.share - self.share_rate * slope).clamp(0, 1)
        for batch in batches:
            how = mixture.how(task, w, share, data, batch)  # both step from the same v and w
            v, v_moments, loss = descend(task, self.optimizer, v, v_moments, data, (batch,), **how)
            w, moments, _ = descend(task, self.optimizer, w, moments, data, (batch,))
            losses.append(loss)
        half = averaging.after(self, task, w, moments)
        after = Client(*half, v, kept(self.optimizer, v_moments), share, torch.ones_like(client.started))
        upload = averaging.upload(self, task, w, data.size)
        metrics = {"loss": mean_loss(losses, batches), "weight": upload.size, "share": share}
        return ClientOutput(after, upload, mixture.personal_model(task, v, w, share), metrics)


def apfl(
    optimizer: Optimizer = Sgd(),
    epochs: int = 1,
    share: float = 0.5,
    share_rate: float = 0.01,
    mixture: str = "predictions",
) -> APFL:
    """FedAvg, a personal model beside it, and both answer together; share_rate=0 fixes the share."""
    return APFL(optimizer, epochs, share, share_rate, mixture)
