"""FedBABU (Oh et al. 2022): the body is learned under a head that never moves; clients tune before they predict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from copfl.algorithms import averaging
from copfl.algorithms.averaging import Client, Down, Upload
from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, begin, train
from copfl.core.task import Data, Plan, Task
from copfl.errors import at_least
from copfl.parts.sharing import only


@dataclass(frozen=True)
class FedBABU:
    """FedAvg of the body under a head that never moves.

    The evaluated model is the broadcast after `tune_epochs` of fine-tuning on the client's data. It is never uploaded
    and never kept. With tune_epochs=0 it is the broadcast itself.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    tune_epochs: int = 5
    tune: str = "all"  # the part that fine-tuning moves: "all", "head", "body"

    personal: ClassVar[tuple[str, ...]] = ("head",)  # everybody holds the same first head: it need not travel
    server_init = averaging.server_init
    client_init = averaging.client_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update
    personal_model = averaging.personal_model

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, tune_epochs=self.tune_epochs)

    @property
    def total_epochs(self) -> int:
        return self.epochs + self.tune_epochs

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        start = self.personal_model(task, client, down)
        moments = begin(self.optimizer, client.moments, start[: task.d])
        body, parameters = only(task, "body"), start[: task.d]
        w, moments, loss = train(task, self.optimizer, start, moments, data, plan[: self.epochs], active=body)
        # Fine-tuning is a run of its own from the broadcast, as after the last round, with moments of its own.
        active, fresh = only(task, self.tune), self.optimizer.init(parameters)
        tuned = train(task, self.optimizer, start, fresh, data, plan[self.epochs :], active=active).w
        upload = averaging.upload(self, task, w, data.size)
        return ClientOutput(
            averaging.after(self, task, w, moments), upload, tuned, {"loss": loss, "weight": upload.size}
        )


def fedbabu(
    optimizer: Optimizer = Sgd(), epochs: int = 1, tune_epochs: int = 5, tune: str = "all"
) -> FedBABU:
    """The body is learned together, the head by each client at the end; 5 epochs of the whole model as published."""
    return FedBABU(optimizer, epochs, tune_epochs, tune)
