"""Your own algorithm in about forty lines.

    python examples/own_algorithm.py

FedMix is FedAvg in which each client starts from a mixture of its last model and the global model. The last model is in
`Client`, so it never leaves the client. Only `Down` and `Upload` are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

import copfl
from copfl.core import ClientOutput, Data, Metrics, Optimizer, Plan, Sgd, Task, train


class Client(NamedTuple):
    personal: Tensor  # [D], its last model


class Message(NamedTuple):  # Server and Down
    w: Tensor  # [D]


class Upload(NamedTuple):  # and Total: both fields are sums
    w: Tensor  # [D], times the samples
    samples: Tensor  # []


@dataclass(frozen=True)
class FedMix:
    """FedAvg; each client keeps the fraction `keep` of its last model."""

    optimizer: Optimizer = field(default_factory=lambda: Sgd(lr=0.1))
    keep: float = 0.5
    total_epochs: int = 1  # local epochs

    def server_init(self, task: Task, clients: int) -> Message:
        return Message(task.initial)

    def client_init(self, task: Task) -> Client:
        return Client(task.initial)

    def downlink(self, server: Message, ids: Tensor) -> Message:
        return Message(server.w.expand(len(ids), -1))

    def personal_model(self, task: Task, client: Client, down: Message) -> Tensor:
        mixed = self.keep * client.personal + (1 - self.keep) * down.w
        return torch.where(task.local(), client.personal, mixed)  # batch-norm statistics, if any, are local

    def client_update(
        self, task: Task, client: Client, down: Message, data: Data, plan: Plan
    ) -> ClientOutput:
        w = self.personal_model(task, client, down)
        w, _, loss = train(task, self.optimizer, w, self.optimizer.init(w[: task.d]), data, plan)
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
    print(f"FedMix passes the contract; accuracy {100 * result.accuracy[-1].mean():.1f} %")
