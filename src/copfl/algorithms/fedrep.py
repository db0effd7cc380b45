"""FedRep (Collins et al. 2021): train a head for the shared body, then the body for that head."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from copfl.core import ClientOutput, Data, Plan, State, Task, Trained
from copfl.parts.averaging import Averaging, Down
from copfl.parts.phases import fresh_head, head_then_body


class Client(NamedTuple):
    personal: Tensor  # [p], the head (and local statistics)
    head_moments: State
    body_moments: State


@dataclass(frozen=True)
class FedRep(Averaging):
    """`head_epochs` on the head with the body frozen, then `epochs` on the body with the head frozen.

    Each phase has an optimizer state of its own, see `head_then_body`. Published: 10 epochs of the head, 1 of
    the body.
    """

    # Paper: one optimizer for both phases. After the last round it trains the heads for ten epochs more, and
    # shows the mean of ten rounds. The released code averages evenly; weights="equal" restores it.
    head_epochs: int = 10

    personal = ("head",)
    minimum = (("head_epochs", 0),)
    phases = ("head_epochs", "epochs")

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        return Client(personal, fresh_head(self.optimizer, task), moments)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        start, optimizers = self.global_model(task, client, down), (self.optimizer, self.optimizer)
        moments = client.head_moments, client.body_moments
        done = head_then_body(task, optimizers, start, moments, data, plan, self.head_epochs)
        output = self.output(task, Trained(done.w, done.body_moments, done.loss), data)
        after = Client(output.client.personal, done.head_moments, done.body_moments)
        return ClientOutput(after, *output[1:])
