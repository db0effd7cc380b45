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
from copfl.core.algorithm import AnyAlgorithm, ClientOutput, Metrics
from copfl.core.optim import Scaled
from copfl.core.task import Data, Experts, Personal, Plan, Task, with_statistics
from copfl.errors import UsageError, at_least, unknown
from copfl.wrappers import base

SCHEDULES = ("constant", "cosine", "linear")
STATISTICS = ("running", "local")


def with_addons(
    algorithm: AnyAlgorithm,
    server_momentum: float = 0.0,
    ema: float = 0.0,
    lr_schedule: str = "constant",
    lr_rounds: int = 0,
    bn_stats: str = "running",
) -> AnyAlgorithm:
    """The algorithm with these training add-ons; at their defaults it is unchanged.

    The learning rate falls to zero in `lr_rounds` rounds.
    """
    if lr_schedule not in SCHEDULES:
        raise unknown("addons.lr_schedule", lr_schedule, SCHEDULES)
    if bn_stats not in STATISTICS:
        raise unknown("addons.bn_stats", bn_stats, STATISTICS)
    if server_momentum:
        algorithm = ServerMomentum(algorithm, server_momentum)
    if lr_schedule != "constant":
        algorithm = LrSchedule(algorithm, lr_schedule, lr_rounds)
    if bn_stats == "local":
        algorithm = LocalBnStats(algorithm)
    if ema:
        algorithm = Ema(algorithm, ema)
    return algorithm


# -- momentum ----------------------------------------------------------------------------------------------------------


class MomentumServer(NamedTuple):
    server: Any
    speed: Tensor  # [s], the running sum of the server's steps


@dataclass(frozen=True)
class ServerMomentum:
    """The algorithm, whose server goes on by `momentum` times its last step: v = beta v + (w' - w), w + v."""

    algorithm: AnyAlgorithm
    momentum: float = 0.9

    total_epochs = property(base.total_epochs)
    optimizer = property(base.optimizer)
    client_init = base.client_init
    client_update = base.client_update
    downlink = base.downlink_of_server
    personal_model = base.personal_model
    summand = base.summand_within

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UsageError(f"addons.server_momentum={self.momentum} must be at least 0 and below 1")

    def server_init(self, task: Task, clients: int) -> MomentumServer:
        server = self.algorithm.server_init(task, clients)
        if not getattr(server, "w", torch.zeros(0)).numel():
            raise UsageError(
                f"addons.server_momentum: the server of {type(self.algorithm).__name__.lower()} has no weights; "
                "leave server_momentum out"
            )
        if task.buffers == "average" and task.initial.shape[0] > task.d:
            raise UsageError(
                "addons.server_momentum would carry averaged variances below zero; keep batch-norm statistics local: "
                "--set run.buffers=local"
            )
        return MomentumServer(server, torch.zeros_like(server.w))

    def server_update(self, task: Task, server: MomentumServer, total: Any) -> tuple[MomentumServer, Metrics]:
        after, metrics = self.algorithm.server_update(task, server.server, total)
        speed = self.momentum * server.speed + (after.w - server.server.w)
        return MomentumServer(after._replace(w=server.server.w + speed), speed), metrics


# -- average -----------------------------------------------------------------------------------------------------------


class EmaClient(NamedTuple):
    client: Any
    sum: Any  # of the models that its rounds ended in, older ones fading
    weight: Tensor  # [], what they weigh together; 0 before the first round


@dataclass(frozen=True)
class Ema:
    """The algorithm, whose clients predict with a moving average of their models; training knows nothing of it."""

    algorithm: AnyAlgorithm
    decay: float = 0.95

    total_epochs = property(base.total_epochs)
    optimizer = property(base.optimizer)
    server_init = base.server_init
    downlink = base.downlink
    summand = base.summand
    server_update = base.server_update

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise UsageError(f"addons.ema={self.decay} must be at least 0 and below 1")

    def client_init(self, task: Task) -> EmaClient:
        client = self.algorithm.client_init(task)
        first = torch.zeros(1, dtype=torch.int64, device=task.device)
        down = tree.row(self.algorithm.downlink(self.algorithm.server_init(task, 1), first), 0)
        model = self.algorithm.personal_model(task, client, down)  # one vector, or a mixture
        return EmaClient(client, tree.each(torch.zeros_like, model), task.initial.new_zeros(()))

    def client_update(
        self, task: Task, client: EmaClient, down: Any, data: Data, plan: Plan
    ) -> ClientOutput[Any, Any]:
        turn = self.algorithm.client_update(task, client.client, down, data, plan)
        sum = tree.each(lambda s, t: self.decay * s + (1 - self.decay) * t, client.sum, turn.trained)
        weight = self.decay * client.weight + (1 - self.decay)
        return turn._replace(
            client=EmaClient(turn.client, sum, weight), trained=tree.each(lambda s: s / weight, sum)
        )

    def personal_model(self, task: Task, client: EmaClient, down: Any) -> Personal:
        fresh, weight = self.algorithm.personal_model(task, client.client, down), client.weight
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
    lr_factor: Tensor  # [], what the learning rate is multiplied by


@dataclass(frozen=True)
class LrSchedule:
    """The algorithm, whose clients take smaller steps from round to round, down to none after `over` rounds."""

    algorithm: AnyAlgorithm
    schedule: str = "cosine"
    over: int = 100

    total_epochs = property(base.total_epochs)
    optimizer = property(base.optimizer)
    client_init = base.client_init
    personal_model = base.personal_model_within
    summand = base.summand_within

    def __post_init__(self) -> None:
        at_least(1, **{"addons.lr_rounds": self.over})
        if base.optimizer(self) is None:
            raise UsageError("addons.lr_schedule: this algorithm has no optimizer whose steps could shrink")

    def server_init(self, task: Task, clients: int) -> ScheduledServer:
        start = torch.zeros((), dtype=torch.int64, device=task.device)
        return ScheduledServer(self.algorithm.server_init(task, clients), start)

    def downlink(self, server: ScheduledServer, ids: Tensor) -> ScheduledDown:
        done = (server.round.double() / self.over).clamp(max=1)
        lr_factor = 1 - done if self.schedule == "linear" else (1 + torch.cos(math.pi * done)) / 2
        return ScheduledDown(self.algorithm.downlink(server.server, ids), lr_factor.expand(len(ids)))

    def client_update(
        self, task: Task, client: Any, down: ScheduledDown, data: Data, plan: Plan
    ) -> ClientOutput[Any, Any]:
        slower = _slower(self.algorithm, down.lr_factor.to(task.initial.dtype))
        turn: ClientOutput[Any, Any] = slower.client_update(task, client, down.down, data, plan)
        return turn

    def server_update(
        self, task: Task, server: ScheduledServer, total: Any
    ) -> tuple[ScheduledServer, Metrics]:
        after, metrics = self.algorithm.server_update(task, server.server, total)
        return ScheduledServer(after, server.round + 1), metrics


# -- statistics --------------------------------------------------------------------------------------------------------


def _slower(algorithm: Any, lr_factor: Tensor) -> Any:
    """The algorithm, also one within others, with its optimizer's steps multiplied."""
    if isinstance(algorithm, ServerMomentum):
        return dataclasses.replace(algorithm, algorithm=_slower(algorithm.algorithm, lr_factor))
    return dataclasses.replace(algorithm, optimizer=Scaled(algorithm.optimizer, lr_factor))


class BnStatsClient(NamedTuple):
    client: Any
    statistics: Tensor  # [D - d], of its own samples at the end of its last round
    ever: Tensor  # [] bool


@dataclass(frozen=True)
class LocalBnStats:
    """The algorithm, whose clients predict with the statistics of their own samples instead of the running ones.

    Without batch norm it changes nothing.
    """

    algorithm: AnyAlgorithm

    total_epochs = property(base.total_epochs)
    optimizer = property(base.optimizer)
    server_init = base.server_init
    downlink = base.downlink
    summand = base.summand
    server_update = base.server_update

    def client_init(self, task: Task) -> BnStatsClient:
        never = torch.zeros((), dtype=torch.bool, device=task.device)
        return BnStatsClient(self.algorithm.client_init(task), task.initial[task.d :], never)

    def client_update(
        self, task: Task, client: BnStatsClient, down: Any, data: Data, plan: Plan
    ) -> ClientOutput[Any, Any]:
        turn = self.algorithm.client_update(task, client.client, down, data, plan)
        model = turn.trained.w[0] if isinstance(turn.trained, Experts) else turn.trained
        own = task.with_local_statistics(model, data)
        stays = BnStatsClient(turn.client, own[task.d :], torch.ones_like(client.ever))
        return turn._replace(client=stays, trained=with_statistics(task, turn.trained, own))

    def personal_model(self, task: Task, client: BnStatsClient, down: Any) -> Personal:
        model = self.algorithm.personal_model(task, client.client, down)
        one = model.w[0] if isinstance(model, Experts) else model
        chosen = torch.where(client.ever, client.statistics, one[task.d :])
        return with_statistics(task, model, torch.cat([one[: task.d], chosen]))
