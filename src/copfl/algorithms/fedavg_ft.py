"""FedAvg with fine-tuning: the server's model is FedAvg's; each client is evaluated after fine-tuning it."""

from __future__ import annotations

from dataclasses import dataclass

from copfl.core.algorithm import ClientOutput
from copfl.core.optim import begin
from copfl.core.task import Data, Plan, Task
from copfl.core.train import train
from copfl.errors import at_least
from copfl.parts.averaging import Averaging, Client, Down, Upload, active_part


@dataclass(frozen=True)
class FedAvgFT(Averaging):
    """FedAvg whose evaluated model trains for `tune_epochs` more after the upload is fixed.

    Local training is fine-tuning already: with tune_epochs=0 the evaluated model is the global model after
    this round's training (FedPAC's second accuracy). Further epochs change the evaluated model alone, which
    is neither uploaded nor stored, so the federation is FedAvg's to the last bit.
    """

    tune_epochs: int = 0
    tune: str = "all"  # the part that the further epochs train: "all", "head", "body"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, tune_epochs=self.tune_epochs)

    @property
    def total_epochs(self) -> int:
        return self.epochs + self.tune_epochs

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        w = self.global_model(task, client, down)
        state = begin(self.optimizer, client.moments, w[: task.d])
        trained = train(task, self.optimizer, w, state, data, plan[: self.epochs])
        # Same optimizer, same state: one training of epochs + tune_epochs, of which the upload has the
        # beginning.
        active = active_part(task, self.tune)
        w, state, _ = trained
        tuned = train(task, self.optimizer, w, state, data, plan[self.epochs :], active=active)
        return self.output(task, trained, data, predicts=tuned.w)
