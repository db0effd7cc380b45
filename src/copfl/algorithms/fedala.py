"""FedALA (Zhang et al. 2023): each client learns, entry by entry, how much of the broadcast's last layers to take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.algorithms import averaging
from copfl.algorithms.averaging import Down, Upload
from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, State, begin, fresh, kept, train
from copfl.core.task import Data, Epoch, Plan, Task
from copfl.errors import at_least, share_of
from copfl.parts.sharing import joined, part


class Client(NamedTuple):
    w: Tensor  # [D], as its last training left it
    mix: Tensor  # [t], W in [0, 1]: how much of the broadcast, for each entry of the last tensors
    moments: State
    turns: Tensor  # [] int64, how often it took part


@dataclass(frozen=True)
class FedALA:
    """The mean of all models; where a client starts from is its own mixture of that mean and its last model.

    Paper: W is trained to convergence the first time and for one epoch in every later round. Clients trained side by
    side take the same steps: here it is `mix_epochs` every time, and W, which is kept, converges over the rounds.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    tensors: int = 2  # p: how many of the last parameter tensors are mixed; 2 are the head's matrix and bias
    share: float = 0.8  # s: how much of the client's samples W is learnt on
    step: float = 1.0  # eta, of W
    mix_epochs: int = 1

    personal: ClassVar[tuple[str, ...]] = ()
    server_init = averaging.server_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, tensors=self.tensors)
        at_least(0, mix_epochs=self.mix_epochs, step=self.step)
        share_of("the samples", share=self.share)

    @property
    def total_epochs(self) -> int:
        return self.mix_epochs + self.epochs

    def client_init(self, task: Task) -> Client:
        mix, never = (
            torch.ones_like(task.initial[self._last(task)]),
            torch.zeros_like(task.initial[0], dtype=torch.int64),
        )
        return Client(task.initial, mix, fresh(self.optimizer, task), never)

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return self._mixed(task, client, down, client.mix)

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        mix = client.mix
        for batches in plan[: self.mix_epochs]:
            mix = self._learnt(task, client, down, data, batches, mix)
        mix = torch.where(client.turns > 0, mix, client.mix)  # a newcomer has no model to mix with
        w = self._mixed(task, client, down, mix)
        moments = begin(self.optimizer, client.moments, w[: task.d])
        w, moments, loss = train(task, self.optimizer, w, moments, data, plan[self.mix_epochs :])
        upload = averaging.upload(self, task, w, data.size)
        metrics = {"loss": loss, "weight": upload.size, "taken": mix.mean()}
        return ClientOutput(
            Client(w, mix, kept(self.optimizer, moments), client.turns + 1), upload, w, metrics
        )

    def _last(self, task: Task) -> slice:
        """Where the last tensors lie in w: at the end of the parameters."""
        sizes = task.layout.sizes[: task.layout.trained]
        return slice(task.d - sum(sizes[-self.tensors :]), task.d)

    def _mixed(self, task: Task, client: Client, down: Down, mix: Tensor) -> Tensor:
        """The broadcast, but in the last tensors own + (broadcast - own) * W."""
        last = self._last(task)
        w, mine = (
            joined(task, self.personal, part(task, self.personal, client.w, local=True), down.w),
            client.w[last],
        )
        return torch.cat([w[: last.start], mine + (w[last] - mine) * mix, w[last.stop :]])

    def _learnt(
        self, task: Task, client: Client, down: Down, data: Data, batches: Epoch, mix: Tensor
    ) -> Tensor:
        """W after a descent over the first `share` of a shuffled pass: W - eta gradient (broadcast - own), clipped."""
        last, seen = self._last(task), 0
        apart = self._mixed(task, client, down, torch.ones_like(mix))[last] - client.w[last]
        for batch in batches:
            place = torch.arange(seen, seen + batch.index.shape[0], device=batch.index.device)
            seen += batch.index.shape[0]
            chosen = place < torch.round(self.share * data.size).clamp(min=1)
            valid = chosen if batch.valid is None else chosen & batch.valid
            w, (x, y) = self._mixed(task, client, down, mix), task.batch(data, batch)
            grad, _, _ = task.gradient(w[: task.d], w[task.d :], x, y, valid)
            mix = torch.where(valid.any(), (mix - self.step * grad[last] * apart).clamp(0, 1), mix)
        return mix


def fedala(
    optimizer: Optimizer = Sgd(),
    epochs: int = 1,
    tensors: int = 2,
    share: float = 0.8,
    step: float = 1.0,
    mix_epochs: int = 1,
) -> FedALA:
    """Published: 2 tensors, 80 % of the samples, eta 1; Sgd(lr=0.005, momentum=0, weight_decay=0) in batches of 10."""
    return FedALA(optimizer, epochs, tensors, share, step, mix_epochs)
