"""FedRep (Collins et al. 2021): fit a head to the shared body, then improve the body for that head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from copfl.algorithms import averaging
from copfl.algorithms.algorithm import Turn
from copfl.algorithms.averaging import Down, Upload
from copfl.errors import at_least
from copfl.optim import Optimizer, Sgd, State, begin, kept, train
from copfl.task import Data, Plan, Task


class Client(NamedTuple):
    own: Tensor  # [h], the head (and local statistics)
    head_moments: State
    body_moments: State


@dataclass(frozen=True)
class FedRep:
    """`head_epochs` on the head with the body frozen, then `epochs` on the body with the head frozen.

    Each phase has an optimizer state of its own: one common step count would make Adam's first body steps three times
    too large.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    head_epochs: int = 10

    keeps: ClassVar[tuple[str, ...]] = ("head",)
    server_init = averaging.server_init
    downlink = averaging.downlink
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, head_epochs=self.head_epochs)

    @property
    def passes(self) -> int:
        return self.head_epochs + self.epochs

    def client_init(self, task: Task) -> Client:
        own, moments = averaging.client_init(self, task)
        return Client(own, moments, moments)

    def personal(self, task: Task, client: Client, down: Down) -> Tensor:
        return averaging.joined(task, self.keeps, client.own, down.w)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> Turn[Client, Upload]:
        w = self.personal(task, client, down)
        heads, bodies = (begin(self.optimizer, m, w[: task.d]) for m in (client.head_moments, client.body_moments))
        first, second = plan[: self.head_epochs], plan[self.head_epochs :]
        w, heads, _ = train(task, self.optimizer, w, heads, data, first, active=averaging.only(task, "head"))
        w, bodies, loss = train(task, self.optimizer, w, bodies, data, second, active=averaging.only(task, "body"))
        own = averaging.part(task, self.keeps, w, home=True)
        after = Client(own, kept(self.optimizer, heads), kept(self.optimizer, bodies))
        upload = averaging.upload(self, task, w, data.size)
        return Turn(after, upload, w, {"loss": loss, "weight": upload.size})


def fedrep(optimizer: Optimizer = Sgd(), epochs: int = 1, head_epochs: int = 10) -> FedRep:
    """The body is shared, the head is not; `epochs` are the body's, 1, and the head's 10 as published."""
    return FedRep(optimizer, epochs, head_epochs)
