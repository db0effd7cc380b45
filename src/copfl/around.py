"""The verbs of an algorithm that stands around another one and leaves them as they are there.

`attacks`, `robust` and `privacy` each make an algorithm out of an algorithm. They take these functions as methods, so
their own files hold what is their own. A client's record is always that of the algorithm inside: checkpoints, models
and reports need not know what is around it.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from copfl.algorithms.algorithm import AnyAlgorithm, Figures, Turn
from copfl.optim import Optimizer
from copfl.task import Data, Personal, Plan, Task


class Around(Protocol):
    """An algorithm with another inside; its Server has that one's as `server`."""

    @property
    def algorithm(self) -> AnyAlgorithm: ...


def passes(self: Around) -> int:
    return self.algorithm.passes


def optimizer(self: Around) -> Optimizer | None:
    return getattr(self.algorithm, "optimizer", None)


def client_init(self: Around, task: Task) -> Any:
    return self.algorithm.client_init(task)


# -- where the message to the client has something added: it is a record with the message inside as `down` -------------


def personal_within(self: Around, task: Task, client: Any, down: Any) -> Personal:
    return self.algorithm.personal(task, client, down.down)


def summand_within(self: Around, task: Task, server: Any, id: Tensor, upload: Any) -> Any:
    return self.algorithm.summand(task, server.server, id, upload)


# -- where only the server does something: the message is that of the algorithm inside ---------------------------------


def downlink_of_server(self: Around, server: Any, ids: Tensor) -> Any:
    return self.algorithm.downlink(server.server, ids)


def client_update(self: Around, task: Task, client: Any, down: Any, data: Data, plan: Plan) -> Turn[Any, Any]:
    return self.algorithm.client_update(task, client, down, data, plan)


def personal(self: Around, task: Task, client: Any, down: Any) -> Personal:
    return self.algorithm.personal(task, client, down)


__all__ = [
    "Around", "Figures", "client_init", "client_update", "downlink_of_server", "optimizer", "passes", "personal",
    "personal_within", "summand_within",
]  # fmt: skip
