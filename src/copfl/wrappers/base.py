"""The verbs of an algorithm that stands around another one and leaves them as they are there.

`attacks`, `levers`, `robust` and `privacy` each make an algorithm out of an algorithm. They take these functions as
methods, so their own files hold what is their own. A client's record is that of the algorithm inside, or has it as
`client` where a lever changes what a client predicts with.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from copfl.core.algorithm import AnyAlgorithm, ClientOutput, Metrics
from copfl.core.optim import Optimizer
from copfl.core.task import Data, Personal, Plan, Task


class Around(Protocol):
    """An algorithm with another inside; its Server has that one's as `server`."""

    @property
    def algorithm(self) -> AnyAlgorithm: ...


def total_epochs(self: Around) -> int:
    return self.algorithm.total_epochs


def optimizer(self: Around) -> Optimizer | None:
    return getattr(self.algorithm, "optimizer", None)


def client_init(self: Around, task: Task) -> Any:
    return self.algorithm.client_init(task)


# -- where the message to the client has something added: it is a record with the message inside as `down` -------------


def personal_model_within(self: Around, task: Task, client: Any, down: Any) -> Personal:
    return self.algorithm.personal_model(task, client, down.down)


def summand_within(self: Around, task: Task, server: Any, id: Tensor, upload: Any) -> Any:
    return self.algorithm.summand(task, server.server, id, upload)


# -- where only the server does something: the message is that of the algorithm inside ---------------------------------


def downlink_of_server(self: Around, server: Any, ids: Tensor) -> Any:
    return self.algorithm.downlink(server.server, ids)


def client_update(
    self: Around, task: Task, client: Any, down: Any, data: Data, plan: Plan
) -> ClientOutput[Any, Any]:
    return self.algorithm.client_update(task, client, down, data, plan)


def personal_model(self: Around, task: Task, client: Any, down: Any) -> Personal:
    return self.algorithm.personal_model(task, client, down)


# -- where only the client does something: the server is that of the algorithm inside ----------------------------------


def server_init(self: Around, task: Task, clients: int) -> Any:
    return self.algorithm.server_init(task, clients)


def downlink(self: Around, server: Any, ids: Tensor) -> Any:
    return self.algorithm.downlink(server, ids)


def summand(self: Around, task: Task, server: Any, id: Tensor, upload: Any) -> Any:
    return self.algorithm.summand(task, server, id, upload)


def server_update(self: Around, task: Task, server: Any, total: Any) -> tuple[Any, Metrics]:
    return self.algorithm.server_update(task, server, total)
