"""FedAvg with fine-tuning: the server's model is FedAvg's; each client is evaluated after fine-tuning it."""

from dataclasses import dataclass

from copfl.core import ClientOutput, Data, Plan, Task, begin, train
from copfl.parts.averaging import Averaging, Client, Down, active_part


@dataclass(frozen=True)
class FedAvgFT(Averaging):
    """FedAvg whose evaluated model trains for `tune_epochs` more after the upload is fixed.

    Local training is fine-tuning already: with tune_epochs=0 the evaluated model is the global model after
    this round's training (FedPAC's second accuracy). Further epochs change the evaluated model alone, which
    is neither uploaded nor stored, so the federation is FedAvg's to the last bit.
    """

    # Paper: papers fine-tune once, after the last round; here in every round that is evaluated.
    tune_epochs: int = 0
    tune: str = "all"  # the part that the further epochs train: "all", "head", "body"

    minimum = (("tune_epochs", 0),)
    phases = ("epochs", "tune_epochs")
    fine_tuned = True

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w = self.global_model(task, client, down)
        state = begin(self.optimizer, client.moments, w[: task.d])
        trained = train(task, self.optimizer, w, state, data, plan[: self.epochs])
        # Same optimizer, same state: one training, of which the upload has the first `epochs`.
        tuning, active = plan[self.epochs :], active_part(task, self.tune)
        tuned = train(task, self.optimizer, trained.w, trained.state, data, tuning, active=active)
        return self.output(task, trained, data, predicts=tuned.w)
