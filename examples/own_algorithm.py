"""An algorithm of your own, in about forty lines: everybody averages, and everybody keeps a part of its own.

    python examples/own_algorithm.py

FedMix is FedAvg in which each client goes on from a mixture of its own last model and the broadcast. A client's own
model is in `Client`, so it never leaves it; what travels is in `Down` and `Upload`, and nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

import copfl
from copfl.core.algorithm import ClientOutput, Metrics
from copfl.core.optim import Optimizer, Sgd, begin
from copfl.core.task import Data, Plan, Task
from copfl.core.train import train


class Client(NamedTuple):
    own: Tensor  # [D], its last model


class Message(NamedTuple):  # Server and Down
    w: Tensor  # [D]


class Upload(NamedTuple):  # and Total: both fields add up
    w: Tensor  # [D], times the samples
    samples: Tensor  # []


@dataclass(frozen=True)
class FedMix:
    """Everybody averages; everybody keeps `keep` of its own."""

    optimizer: Optimizer = field(default_factory=lambda: Sgd(lr=0.1))
    keep: float = 0.5
    epochs: int = 1  # over the client's data in a turn

    def server_init(self, task: Task, clients: int) -> Message:
        return Message(task.initial)

    def client_init(self, task: Task) -> Client:
        return Client(task.initial)

    def downlink(self, server: Message, ids: Tensor) -> Message:
        return Message(server.w.expand(len(ids), -1))

    def personal_model(self, task: Task, client: Client, down: Message) -> Tensor:
        mixed = self.keep * client.own + (1 - self.keep) * down.w
        return torch.where(task.local(), client.own, mixed)  # batch-norm statistics, if any, stay at home

    def client_update(
        self, task: Task, client: Client, down: Message, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        w = self.personal_model(task, client, down)
        moments = begin(self.optimizer, self.optimizer.init(w[: task.d]), w[: task.d])
        w, _, loss = train(task, self.optimizer, w, moments, data, plan)
        samples = data.size.to(w.dtype)
        shared = torch.where(task.local(), 0, w)
        return ClientOutput(
            Client(w), Upload(samples * shared, samples), w, {"loss": loss, "weight": samples}
        )

    def summand(self, task: Task, server: Message, id: Tensor, upload: Upload) -> Upload:
        return upload

    def server_update(self, task: Task, server: Message, total: Upload) -> tuple[Message, Metrics]:
        mean = total.w / total.samples.clamp(min=1)
        return Message(torch.where(total.samples > 0, mean, server.w)), {}


if __name__ == "__main__":
    copfl.check_algorithm(FedMix())
    result = copfl.run(FedMix(), "digits")
    print(f"FedMix obeys the laws; accuracy {100 * result.accuracy[-1].mean():.1f} %")
