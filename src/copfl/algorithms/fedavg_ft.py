"""FedAvg with fine-tuning: the server's model is FedAvg's; each client is judged by what it makes of it."""

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
class FedAvgFT:
    """FedAvg whose evaluated model trains on for `tune_epochs` after the upload is settled.

    The local epochs are fine-tuning already: with tune_epochs=0 the evaluated model is the broadcast after this round's
    training (FedPAC's second accuracy). More passes go to `trained` alone, which nobody uploads or keeps, so the
    federation is FedAvg's to the last bit whatever is tuned.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    tune_epochs: int = 0
    tune: str = "all"  # the part that the extra passes move: "all", "head", "body"

    personal: ClassVar[tuple[str, ...]] = ()
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
        w = self.personal_model(task, client, down)
        moments = begin(self.optimizer, client.moments, w[: task.d])
        w, moments, loss = train(task, self.optimizer, w, moments, data, plan[: self.epochs])
        # Same optimizer, same state: one fine-tuning of epochs + tune_epochs, of which the upload saw the beginning.
        active = only(task, self.tune)
        tuned = train(task, self.optimizer, w, moments, data, plan[self.epochs :], active=active).w
        upload = averaging.upload(self, task, w, data.size)
        return ClientOutput(
            averaging.after(self, task, w, moments), upload, tuned, {"loss": loss, "weight": upload.size}
        )


def fedavg_ft(
    optimizer: Optimizer = Sgd(), epochs: int = 1, tune_epochs: int = 0, tune: str = "all"
) -> FedAvgFT:
    """FedAvg, judged after local training and `tune_epochs` more."""
    return FedAvgFT(optimizer, epochs, tune_epochs, tune)
