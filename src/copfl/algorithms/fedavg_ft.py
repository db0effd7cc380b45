"""FedAvg with fine-tuning: the server's model is FedAvg's; each client is evaluated after fine-tuning it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, begin
from copfl.core.task import Data, Plan, Task
from copfl.core.train import train
from copfl.errors import at_least
from copfl.parts import averaging
from copfl.parts.averaging import Client, Down, Upload


@dataclass(frozen=True)
class FedAvgFT:
    """FedAvg whose evaluated model trains for `tune_epochs` more after the upload is fixed.

    Local training is fine-tuning already: with tune_epochs=0 the evaluated model is the global model after this round's
    training (FedPAC's second accuracy). Further epochs change the evaluated model alone, which is neither uploaded nor
    stored, so the federation is FedAvg's to the last bit.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    tune_epochs: int = 0
    tune: str = "all"  # the part that the further epochs train: "all", "head", "body"

    personal: ClassVar[tuple[str, ...]] = ()
    server_init = averaging.server_init
    client_init = averaging.client_init
    downlink = averaging.downlink
    personal_model = averaging.personal_model
    summand = averaging.summand
    server_update = averaging.server_update

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
        state = begin(self.optimizer, client.moments, w[: task.d])
        trained = train(task, self.optimizer, w, state, data, plan[: self.epochs])
        # Same optimizer, same state: one training of epochs + tune_epochs, of which the upload has the beginning.
        active = averaging.active(task, self.tune)
        w, state, _ = trained
        tuned = train(task, self.optimizer, w, state, data, plan[self.epochs :], active=active)
        return averaging.output(self, task, trained, data, predicts=tuned.w)
