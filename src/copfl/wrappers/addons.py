"""What may be added to every algorithm, so that no algorithm owes its place in a comparison to having it alone.

momentum     The server keeps moving the way it went: FedAvgM (Hsu et al. 2019).
average      A client predicts with a moving average of the weights that its rounds ended in.
schedule     The learning rate falls over the rounds.
statistics   A client predicts with the batch-norm statistics of its own samples, all looked at together.

Each is an algorithm around an algorithm; see `around`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, Figures, Turn
from copfl.core.optim import Scaled
from copfl.core.task import Data, Experts, Personal, Plan, Task, with_statistics
from copfl.errors import UsageError, at_least, unknown
from copfl.wrappers import base

SCHEDULES = ("constant", "cosine", "linear")
STATISTICS = ("running", "own")


def levered(
    algorithm: AnyAlgorithm,
    momentum: float = 0.0,
    average: float = 0.0,
    schedule: str = "constant",
    over: int = 0,
    statistics: str = "running",
) -> AnyAlgorithm:
    """The algorithm with these levers; at their defaults it is left as it is.

    `over` is the number of rounds in which the learning rate falls to nothing.
    """
    if schedule not in SCHEDULES:
        raise unknown("levers.schedule", schedule, SCHEDULES)
    if statistics not in STATISTICS:
        raise unknown("levers.statistics", statistics, STATISTICS)
    if momentum:
        algorithm = Moving(algorithm, momentum)
    if schedule != "constant":
        algorithm = Scheduled(algorithm, schedule, over)
    if statistics == "own":
        algorithm = Restated(algorithm)
    if average:
        algorithm = Averaged(algorithm, average)
    return algorithm


# -- momentum ----------------------------------------------------------------------------------------------------------


class MovingServer(NamedTuple):
    server: Any
    speed: Tensor  # [s], the running sum of the server's steps


@dataclass(frozen=True)
class Moving:
    """The algorithm, whose server goes on by `momentum` times its last step: v = beta v + (w' - w), w + v."""

    algorithm: AnyAlgorithm
    momentum: float = 0.9

    passes = property(base.passes)
    optimizer = property(base.optimizer)
    client_init = base.client_init
    client_update = base.client_update
    downlink = base.downlink_of_server
    personal = base.personal
    summand = base.summand_within

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UsageError(f"levers.momentum={self.momentum} must be at least 0 and below 1")

    def server_init(self, task: Task, clients: int) -> MovingServer:
        server = self.algorithm.server_init(task, clients)
        if not getattr(server, "w", torch.zeros(0)).numel():
            raise UsageError(
                f"levers.momentum: the server of {type(self.algorithm).__name__.lower()} holds no weights that could "
                "keep moving; leave it out there"
            )
        if task.buffers == "average" and task.first.shape[0] > task.d:
            raise UsageError(
                "levers.momentum would carry averaged variances below zero; keep batch-norm statistics local: "
                "--set run.buffers=local"
            )
        return MovingServer(server, torch.zeros_like(server.w))

    def server_update(self, task: Task, server: MovingServer, total: Any) -> tuple[MovingServer, Figures]:
        after, figures = self.algorithm.server_update(task, server.server, total)
        speed = self.momentum * server.speed + (after.w - server.server.w)
        return MovingServer(after._replace(w=server.server.w + speed), speed), figures


# -- average -----------------------------------------------------------------------------------------------------------


class AveragedClient(NamedTuple):
    client: Any
    sum: Any  # of the models that its rounds ended in, older ones fading
    weight: Tensor  # [], what they weigh together; 0 before the first round


@dataclass(frozen=True)
class Averaged:
    """The algorithm, whose clients predict with a moving average of their models; training knows nothing of it."""

    algorithm: AnyAlgorithm
    decay: float = 0.95

    passes = property(base.passes)
    optimizer = property(base.optimizer)
    server_init = base.server_init
    downlink = base.downlink
    summand = base.summand
    server_update = base.server_update

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise UsageError(f"levers.average={self.decay} must be at least 0 and below 1")

    def client_init(self, task: Task) -> AveragedClient:
        client = self.algorithm.client_init(task)
        first = torch.zeros(1, dtype=torch.int64, device=task.device)
        down = tree.row(self.algorithm.downlink(self.algorithm.server_init(task, 1), first), 0)
        model = self.algorithm.personal(task, client, down)  # one vector, or a mixture
        return AveragedClient(client, tree.each(torch.zeros_like, model), task.first.new_zeros(()))

    def client_update(self, task: Task, client: AveragedClient, down: Any, data: Data, plan: Plan) -> Turn[Any, Any]:
        turn = self.algorithm.client_update(task, client.client, down, data, plan)
        sum = tree.each(lambda s, t: self.decay * s + (1 - self.decay) * t, client.sum, turn.trained)
        weight = self.decay * client.weight + (1 - self.decay)
        return turn._replace(
            client=AveragedClient(turn.client, sum, weight), trained=tree.each(lambda s: s / weight, sum)
        )

    def personal(self, task: Task, client: AveragedClient, down: Any) -> Personal:
        fresh, weight = self.algorithm.personal(task, client.client, down), client.weight
        model: Personal = tree.each(
            lambda s, f: torch.where(weight > 0, s / torch.where(weight > 0, weight, 1), f), client.sum, fresh
        )
        return model


# -- schedule ----------------------------------------------------------------------------------------------------------


class ScheduledServer(NamedTuple):
    server: Any
    round: Tensor  # [] int64


class ScheduledDown(NamedTuple):
    down: Any
    pace: Tensor  # [], what the learning rate is multiplied by


@dataclass(frozen=True)
class Scheduled:
    """The algorithm, whose clients take smaller steps from round to round, down to none after `over` rounds."""

    algorithm: AnyAlgorithm
    schedule: str = "cosine"
    over: int = 100

    passes = property(base.passes)
    optimizer = property(base.optimizer)
    client_init = base.client_init
    personal = base.personal_within
    summand = base.summand_within

    def __post_init__(self) -> None:
        at_least(1, **{"levers.over": self.over})
        if base.optimizer(self) is None:
            raise UsageError("levers.schedule: this algorithm has no optimizer whose steps could shrink")

    def server_init(self, task: Task, clients: int) -> ScheduledServer:
        start = torch.zeros((), dtype=torch.int64, device=task.device)
        return ScheduledServer(self.algorithm.server_init(task, clients), start)

    def downlink(self, server: ScheduledServer, ids: Tensor) -> ScheduledDown:
        done = (server.round.double() / self.over).clamp(max=1)
        pace = 1 - done if self.schedule == "linear" else (1 + torch.cos(math.pi * done)) / 2
        return ScheduledDown(self.algorithm.downlink(server.server, ids), pace.expand(len(ids)))

    def client_update(self, task: Task, client: Any, down: ScheduledDown, data: Data, plan: Plan) -> Turn[Any, Any]:
        slower = _slower(self.algorithm, down.pace.to(task.first.dtype))
        turn: Turn[Any, Any] = slower.client_update(task, client, down.down, data, plan)
        return turn

    def server_update(self, task: Task, server: ScheduledServer, total: Any) -> tuple[ScheduledServer, Figures]:
        after, figures = self.algorithm.server_update(task, server.server, total)
        return ScheduledServer(after, server.round + 1), figures


# -- statistics --------------------------------------------------------------------------------------------------------


def _slower(algorithm: Any, pace: Tensor) -> Any:
    """The algorithm, also one within others, with its optimizer's steps multiplied."""
    if isinstance(algorithm, Moving):
        return dataclasses.replace(algorithm, algorithm=_slower(algorithm.algorithm, pace))
    return dataclasses.replace(algorithm, optimizer=Scaled(algorithm.optimizer, pace))


class RestatedClient(NamedTuple):
    client: Any
    statistics: Tensor  # [D - d], of its own samples at the end of its last round
    ever: Tensor  # [] bool


@dataclass(frozen=True)
class Restated:
    """The algorithm, whose clients predict with the statistics of their own samples instead of the running ones.

    Without batch norm it changes nothing.
    """

    algorithm: AnyAlgorithm

    passes = property(base.passes)
    optimizer = property(base.optimizer)
    server_init = base.server_init
    downlink = base.downlink
    summand = base.summand
    server_update = base.server_update

    def client_init(self, task: Task) -> RestatedClient:
        never = torch.zeros((), dtype=torch.bool, device=task.device)
        return RestatedClient(self.algorithm.client_init(task), task.first[task.d :], never)

    def client_update(self, task: Task, client: RestatedClient, down: Any, data: Data, plan: Plan) -> Turn[Any, Any]:
        turn = self.algorithm.client_update(task, client.client, down, data, plan)
        model = turn.trained.w[0] if isinstance(turn.trained, Experts) else turn.trained
        own = task.restated(model, data)
        stays = RestatedClient(turn.client, own[task.d :], torch.ones_like(client.ever))
        return turn._replace(client=stays, trained=with_statistics(task, turn.trained, own))

    def personal(self, task: Task, client: RestatedClient, down: Any) -> Personal:
        model = self.algorithm.personal(task, client.client, down)
        one = model.w[0] if isinstance(model, Experts) else model
        chosen = torch.where(client.ever, client.statistics, one[task.d :])
        return with_statistics(task, model, torch.cat([one[: task.d], chosen]))
