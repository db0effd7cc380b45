"""APFL (Deng et al. 2020): a mixture of a personal and the global model, with a share that each client learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.algorithms import averaging
from copfl.algorithms.algorithm import Turn
from copfl.algorithms.averaging import Down, Upload
from copfl.errors import UsageError, at_least, unknown
from copfl.optim import Optimizer, Sgd, State, begin, descend, kept, mean_loss
from copfl.task import Batch, Data, Experts, Personal, Plan, Task, mean_of_real

MIXTURES = ("predictions", "weights")


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

    keeps: ClassVar[tuple[str, ...]] = ()
    server_init = averaging.server_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, share_rate=self.share_rate)
        if not 0 <= self.share <= 1:
            raise UsageError(f"share={self.share} must be between 0, all global, and 1, all personal")
        if self.mixture not in MIXTURES:
            raise unknown("mixture", self.mixture, MIXTURES)

    @property
    def passes(self) -> int:
        return self.epochs

    def client_init(self, task: Task) -> Client:
        own, moments = averaging.client_init(self, task)
        share, never = task.first.new_full((), self.share), torch.zeros((), dtype=torch.bool, device=task.device)
        return Client(own, moments, task.first, moments, share, never)

    def personal(self, task: Task, client: Client, down: Down) -> Personal:
        return self._mixed(task, *self._models(task, client, down), client.share)

    def _models(self, task: Task, client: Client, down: Down) -> tuple[Tensor, Tensor]:
        """v_n and w; a newcomer has no v_n yet and takes the broadcast for it."""
        w = averaging.joined(task, self.keeps, client.own, down.w)
        return torch.where(client.started, client.v, w), w

    def _mixed(self, task: Task, v: Tensor, w: Tensor, share: Tensor) -> Personal:
        if self.mixture == "predictions":
            return Experts(torch.stack([v, w]), torch.stack([share, 1 - share]))
        mixed = share * v[: task.d] + (1 - share) * w[: task.d]
        return torch.cat([mixed, v[task.d :]])  # v's statistics are gathered in the mixture

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> Turn[Client, Upload]:
        v, w = self._models(task, client, down)
        v_moments = begin(self.optimizer, client.v_moments, v[: task.d])
        moments = begin(self.optimizer, client.moments, w[: task.d])
        batches, losses = [batch for batches in plan for batch in batches], []
        slope = self._slope(task, v, w, client.share, data, batches[0])
        share = (client.share - self.share_rate * slope).clamp(0, 1)
        for batch in batches:
            how = self._how(task, w, share, data, batch)  # both step from the same v and w
            v, v_moments, loss = descend(task, self.optimizer, v, v_moments, data, (batch,), **how)
            w, moments, _ = descend(task, self.optimizer, w, moments, data, (batch,))
            losses.append(loss)
        after = Client(
            averaging.part(task, self.keeps, w, home=True), kept(self.optimizer, moments),
            v, kept(self.optimizer, v_moments), share, torch.ones_like(client.started),
        )  # fmt: skip
        upload = averaging.upload(self, task, w, data.size)
        figures = {"loss": mean_loss(losses, batches), "weight": upload.size, "share": share}
        return Turn(after, upload, self._mixed(task, v, w, share), figures)

    def _how(self, task: Task, w: Tensor, share: Tensor, data: Data, batch: Batch) -> dict[str, Any]:
        """How v descends the mixture's loss on this batch, for `descend`."""
        if self.mixture == "weights":
            rest = (1 - share) * w[: task.d]
            return {"at": lambda v: share * v + rest, "adjust": lambda v, grad: share * grad}
        other = self._log_right(task, w, data, batch) + (1 - share).log()  # [b]

        def objective(logits: Tensor, features: Tensor, labels: Tensor, real: Tensor | None) -> Tensor:
            mine = -F.cross_entropy(logits, labels, reduction="none") + share.log()
            return mean_of_real(-torch.logaddexp(mine, other), real)

        return {"objective": objective}

    def _slope(self, task: Task, v: Tensor, w: Tensor, share: Tensor, data: Data, batch: Batch) -> Tensor:
        """The derivative of the mixture's loss by the share."""
        if self.mixture == "weights":
            x, y = task.batch(data, batch)
            mixed = share * v[: task.d] + (1 - share) * w[: task.d]
            grad = task.gradient(mixed, v[task.d :], x, y, batch.real)[0]
            return (grad * (v - w)[: task.d]).sum()
        mine, other = (self._log_right(task, model, data, batch).exp() for model in (v, w))
        mixed = share * mine + (1 - share) * other
        return mean_of_real((other - mine) / mixed.clamp(min=1e-6), batch.real)

    def _log_right(self, task: Task, w: Tensor, data: Data, batch: Batch) -> Tensor:
        """The log-probability of each sample's label [b], as the model in training sees it."""
        x, y = task.batch(data, batch)
        return -F.cross_entropy(task.forward(w, x, True, batch.real)[0], y, reduction="none")


def apfl(
    optimizer: Optimizer = Sgd(),
    epochs: int = 1,
    share: float = 0.5,
    share_rate: float = 0.01,
    mixture: str = "predictions",
) -> APFL:
    """FedAvg, a personal model beside it, and both answer together; share_rate=0 fixes the share."""
    return APFL(optimizer, epochs, share, share_rate, mixture)
