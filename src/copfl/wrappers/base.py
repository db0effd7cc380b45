"""The base of an algorithm around another one: attacks, training add-ons, robust aggregation, privacy."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core.algorithm import (
    AnyAlgorithm,
    ClientOutput,
    Metrics,
    leave_out,
    next_message,
    received,
    steps_done,
)
from copfl.core.evaluation import global_statistics
from copfl.core.optim import Optimizer
from copfl.core.payload import Update, counted
from copfl.core.task import Data, Personal, Plan, Task


@dataclass(frozen=True)
class Wrapper:
    """An algorithm that delegates every method to the one inside; a subclass overrides what it changes.

    A subclass that adds to a record puts the inner one into a field of its own record, called "server",
    "down" or "client", and names the field in `wraps`. The methods here then pass on the inner record.
    """

    algorithm: AnyAlgorithm

    wraps: ClassVar[tuple[str, ...]] = ()

    def inner(self, field: str, record: Any) -> Any:
        """The record of the algorithm inside."""
        return getattr(record, field) if field in self.wraps else record

    @property
    def total_epochs(self) -> int:
        return self.algorithm.total_epochs

    @property
    def optimizer(self) -> Optimizer | None:
        return getattr(self.algorithm, "optimizer", None)

    def server_init(self, task: Task, clients: int) -> Any:
        return self.algorithm.server_init(task, clients)

    def client_init(self, task: Task) -> Any:
        return self.algorithm.client_init(task)

    def downlink(self, server: Any, ids: Tensor) -> Any:
        return self.algorithm.downlink(self.inner("server", server), ids)

    def personal_model(self, task: Task, client: Any, down: Any) -> Personal:
        return self.algorithm.personal_model(task, self.inner("client", client), self.inner("down", down))

    def global_statistics(self, task: Task, client: Any) -> Tensor | None:
        return global_statistics(self.algorithm, task, self.inner("client", client))

    def client_update(self, task: Task, client: Any, down: Any, data: Data, plan: Plan) -> ClientOutput:
        client, down = self.inner("client", client), self.inner("down", down)
        return self.algorithm.client_update(task, client, down, data, plan)

    def counted(self, client: Any, down: Any, update: Update) -> Any:
        inside = counted(self.algorithm, self.inner("client", client), self.inner("down", down), update)
        return client._replace(client=inside) if "client" in self.wraps else inside

    def summand(self, task: Task, server: Any, id: Tensor, upload: Any) -> Any:
        return self.algorithm.summand(task, self.inner("server", server), id, upload)

    def server_update(self, task: Task, server: Any, total: Any) -> tuple[Any, Metrics]:
        return self.algorithm.server_update(task, self.inner("server", server), total)

    def steps_done(self, client: Any) -> Tensor:
        return steps_done(self.algorithm, self.inner("client", client))

    def leave_out(self, server: Any, clients: Tensor) -> Any:
        inside = leave_out(self.algorithm, self.inner("server", server), clients)
        return server._replace(server=inside) if "server" in self.wraps else inside

    def next_message(self, task: Task, down: Any, upload: Any) -> Any:
        message = next_message(self.algorithm, task, self.inner("down", down), upload)
        return down._replace(down=message) if "down" in self.wraps else message


def initial_model(algorithm: AnyAlgorithm, task: Task) -> tuple[Any, Personal]:
    """The record of a client before the first round, and its model: one vector, or a mixture."""
    client, first = algorithm.client_init(task), torch.zeros((), dtype=torch.int64, device=task.device)
    down = received(algorithm, algorithm.server_init(task, 1), first)
    return client, algorithm.personal_model(task, client, down)


class RoundServer(NamedTuple):
    server: Any
    round: Tensor  # [] int64


@dataclass(frozen=True)
class RoundWrapper(Wrapper):
    """A wrapper whose server counts the rounds and whose message to a client has a further field."""

    wraps: ClassVar[tuple[str, ...]] = ("server", "down")

    def server_init(self, task: Task, clients: int) -> Any:
        start = torch.zeros((), dtype=torch.int64, device=task.device)
        return RoundServer(self.algorithm.server_init(task, clients), start)

    def server_update(self, task: Task, server: Any, total: Any) -> tuple[Any, Metrics]:
        inner, metrics = self.algorithm.server_update(task, server.server, total)
        return RoundServer(inner, server.round + 1), metrics
