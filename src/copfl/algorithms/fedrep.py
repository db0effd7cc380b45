"""FedRep (Collins et al. 2021): train a head for the shared body, then the body for that head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, State
from copfl.core.task import Data, Plan, Task
from copfl.errors import at_least
from copfl.parts import averaging
from copfl.parts.averaging import Down, Upload
from copfl.parts.phases import fresh_head, head_then_body


class Client(NamedTuple):
    personal: Tensor  # [p], the head (and local statistics)
    head_moments: State
    body_moments: State


@dataclass(frozen=True)
class FedRep:
    """`head_epochs` on the head with the body frozen, then `epochs` on the body with the head frozen.

    Each phase has an optimizer state of its own, see `head_then_body`. Published: 10 epochs of the head, 1 of the body.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    head_epochs: int = 10

    personal: ClassVar[tuple[str, ...]] = ("head",)
    server_init = averaging.server_init
    downlink = averaging.downlink
    personal_model = averaging.personal_model
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, head_epochs=self.head_epochs)

    @property
    def total_epochs(self) -> int:
        return self.head_epochs + self.epochs

    def client_init(self, task: Task) -> Client:
        personal, moments = averaging.client_init(self, task)
        return Client(personal, fresh_head(self.optimizer, task), moments)

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        start, optimizers = self.personal_model(task, client, down), (self.optimizer, self.optimizer)
        moments = client.head_moments, client.body_moments
        done = head_then_body(task, optimizers, start, moments, data, plan, self.head_epochs)
        personal = averaging.personal_of(task, self.personal, done.w)
        upload = averaging.upload(self, task, done.w, data)
        after = Client(personal, done.head_moments, done.body_moments)
        return ClientOutput(after, upload, done.w, {"loss": done.loss, "weight": upload.size})
