"""FedRep (Collins et al. 2021): fit a head to the shared body, then improve the body for that head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from copfl.algorithms import averaging
from copfl.algorithms.averaging import Down, Upload
from copfl.core.algorithm import ClientOutput
from copfl.core.optim import Optimizer, Sgd, State
from copfl.core.task import Data, Plan, Task
from copfl.errors import at_least
from copfl.parts.phases import fresh_head, head_then_body
from copfl.parts.sharing import part


class Client(NamedTuple):
    own: Tensor  # [h], the head (and local statistics)
    head_moments: State
    body_moments: State


@dataclass(frozen=True)
class FedRep:
    """`head_epochs` on the head with the body frozen, then `epochs` on the body with the head frozen.

    Each phase has an optimizer state of its own, see `head_then_body`.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    head_epochs: int = 10

    personal: ClassVar[tuple[str, ...]] = ("head",)
    server_init = averaging.server_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update
    personal_model = averaging.personal_model

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, head_epochs=self.head_epochs)

    @property
    def total_epochs(self) -> int:
        return self.head_epochs + self.epochs

    def client_init(self, task: Task) -> Client:
        own, moments = averaging.client_init(self, task)
        return Client(own, fresh_head(self.optimizer, task), moments)

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        start, optimizers = self.personal_model(task, client, down), (self.optimizer, self.optimizer)
        moments = client.head_moments, client.body_moments
        w, heads, bodies, loss = head_then_body(
            task, optimizers, start, moments, data, plan, self.head_epochs
        )
        after = Client(part(task, self.personal, w, local=True), heads, bodies)
        upload = averaging.upload(self, task, w, data.size)
        return ClientOutput(after, upload, w, {"loss": loss, "weight": upload.size})


def fedrep(optimizer: Optimizer = Sgd(), epochs: int = 1, head_epochs: int = 10) -> FedRep:
    """The body is shared, the head is not; `epochs` are the body's, 1, and the head's 10 as published."""
    return FedRep(optimizer, epochs, head_epochs)
