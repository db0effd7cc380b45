"""FedBABU (Oh et al. 2022): the body is trained under a fixed head; clients fine-tune before predicting."""

from dataclasses import dataclass

from copfl.core import ClientOutput, Data, Plan, Task, train
from copfl.parts.averaging import Averaging, Client, Down, active_part


@dataclass(frozen=True)
class FedBABU(Averaging):
    """FedAvg of the body under a head that never changes.

    The evaluated model is the global model after `tune_epochs` of fine-tuning on the client's data. It is
    never uploaded and never stored. With tune_epochs=0 it is the global model itself. Published: 5 epochs of
    the whole model.
    """

    # Paper: fine-tunes once, after the last round; here in every round, to have a curve. The released code
    # averages participants evenly (weights="equal" restores it), and batch-norm statistics with the body
    # (buffers="average" of the task).
    tune_epochs: int = 5
    tune: str = "all"  # the part that fine-tuning trains: "all", "head", "body"

    personal = ("head",)  # the same initial head everywhere: it is never sent
    minimum = (("tune_epochs", 0),)
    phases = ("epochs", "tune_epochs")

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        start, body = self.global_model(task, client, down), active_part(task, "body")
        trained = self.fit(task, start, client.moments, data, plan[: self.epochs], active=body)
        # Fine-tuning starts from the global model, as after the last round, with a state of its own.
        active, state = active_part(task, self.tune), self.optimizer.init(start[: task.d])
        tuned = train(task, self.optimizer, start, state, data, plan[self.epochs :], active=active)
        return self.output(task, trained, data, predicts=tuned.w)
