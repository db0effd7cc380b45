"""Training add-ons: what can be added to every algorithm, so that a comparison can give all of them the same.

server_momentum  The server continues its last step: FedAvgM (Hsu et al. 2019).
ema              A client predicts with an exponential moving average of the weights that its rounds ended in.
lr_schedule      The learning rate falls over the rounds.
bn_stats         A client predicts with batch-norm statistics computed on all its samples.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import Data, Experts, Personal, Plan, Scaled, Task, tree
from copfl.core.algorithm import AnyAlgorithm, ClientOutput, Metrics
from copfl.core.task import with_statistics
from copfl.errors import UsageError, at_least, below_one, one_of
from copfl.wrappers.base import RoundWrapper, Wrapper

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
    one_of(SCHEDULES, **{"addons.lr_schedule": lr_schedule})
    one_of(STATISTICS, **{"addons.bn_stats": bn_stats})
    if server_momentum:
        algorithm = ServerMomentum(algorithm, server_momentum)
    if lr_schedule != "constant":
        algorithm = LrSchedule(algorithm, lr_schedule, lr_rounds)
    if bn_stats == "local":
        algorithm = LocalBnStats(algorithm)
    if ema:
        algorithm = Ema(algorithm, ema)
    return algorithm


class MomentumServer(NamedTuple):
    server: Any
    speed: Tensor  # [s], the decaying sum of the server's steps


@dataclass(frozen=True)
class ServerMomentum(Wrapper):
    """The algorithm with momentum at the server: v = beta v + (w' - w), w + v."""

    momentum: float = 0.9

    wraps: ClassVar[tuple[str, ...]] = ("server",)

    def __post_init__(self) -> None:
        below_one(**{"addons.server_momentum": self.momentum})

    def server_init(self, task: Task, clients: int) -> MomentumServer:
        server = self.algorithm.server_init(task, clients)
        if not getattr(server, "w", torch.zeros(0)).numel():
            raise UsageError(
                f"addons.server_momentum: the server of {type(self.algorithm).__name__.lower()} has no "
                "weights; leave server_momentum out"
            )
        if task.buffers == "average" and task.initial.shape[0] > task.d:
            raise UsageError(
                "addons.server_momentum would extrapolate averaged variances below zero; keep batch-norm "
                "statistics local: --set run.buffers=local"
            )
        return MomentumServer(server, torch.zeros_like(server.w))

    def server_update(self, task: Task, server: MomentumServer, total: Any) -> tuple[MomentumServer, Metrics]:
        after, metrics = self.algorithm.server_update(task, server.server, total)
        speed = self.momentum * server.speed + (after.w - server.server.w)
        return MomentumServer(after._replace(w=server.server.w + speed), speed), metrics


class EmaClient(NamedTuple):
    client: Any
    sum: Any  # the decaying sum of the models that its rounds ended in
    weight: Tensor  # [], the sum of their weights; 0 before the first round


@dataclass(frozen=True)
class Ema(Wrapper):
    """The algorithm whose clients predict with a moving average of their models; training does not change."""

    decay: float = 0.95

    wraps: ClassVar[tuple[str, ...]] = ("client",)

    def __post_init__(self) -> None:
        below_one(**{"addons.ema": self.decay})

    def client_init(self, task: Task) -> EmaClient:
        client = self.algorithm.client_init(task)
        ids = torch.zeros(1, dtype=torch.int64, device=task.device)
        down = tree.row(self.algorithm.downlink(self.algorithm.server_init(task, 1), ids), 0)
        model = self.algorithm.personal_model(task, client, down)  # one vector, or a mixture
        return EmaClient(client, tree.each(torch.zeros_like, model), task.initial.new_zeros(()))

    def client_update(self, task: Task, client: EmaClient, down: Any, data: Data, plan: Plan) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        sum = tree.each(lambda s, t: self.decay * s + (1 - self.decay) * t, client.sum, output.trained)
        weight = self.decay * client.weight + (1 - self.decay)
        averaged = tree.each(lambda s: s / weight, sum)
        return output._replace(client=EmaClient(output.client, sum, weight), trained=averaged)

    def personal_model(self, task: Task, client: EmaClient, down: Any) -> Personal:
        current, trained = super().personal_model(task, client, down), client.weight > 0
        weight = torch.where(trained, client.weight, 1)
        model: Personal = tree.each(lambda s, c: torch.where(trained, s / weight, c), client.sum, current)
        return model


class ScheduledDown(NamedTuple):
    down: Any
    lr_factor: Tensor  # [], the factor of the learning rate


@dataclass(frozen=True)
class LrSchedule(RoundWrapper):
    """The algorithm whose learning rate falls from round to round, to zero after `rounds`."""

    schedule: str = "cosine"
    rounds: int = 100

    def __post_init__(self) -> None:
        at_least(1, **{"addons.lr_rounds": self.rounds})
        if self.optimizer is None:
            raise UsageError("addons.lr_schedule: this algorithm has no optimizer; leave lr_schedule out")

    def downlink(self, server: Any, ids: Tensor) -> ScheduledDown:
        done = (server.round.double() / self.rounds).clamp(max=1)
        lr_factor = 1 - done if self.schedule == "linear" else (1 + torch.cos(math.pi * done)) / 2
        return ScheduledDown(super().downlink(server, ids), lr_factor.expand(len(ids)))

    def client_update(self, task: Task, client: Any, down: Any, data: Data, plan: Plan) -> ClientOutput:
        algorithm: AnyAlgorithm = _with_lr_factor(self.algorithm, down.lr_factor.to(task.initial.dtype))
        return algorithm.client_update(task, client, down.down, data, plan)


def _with_lr_factor(algorithm: Any, lr_factor: Tensor) -> Any:
    """The algorithm, also one inside wrappers, with its learning rate multiplied."""
    if isinstance(algorithm, Wrapper):
        return dataclasses.replace(algorithm, algorithm=_with_lr_factor(algorithm.algorithm, lr_factor))
    return dataclasses.replace(algorithm, optimizer=Scaled(algorithm.optimizer, lr_factor))


class BnStatsClient(NamedTuple):
    client: Any
    statistics: Tensor  # [D - d], of its own samples at the end of its last round
    ever: Tensor  # [] bool, whether it took part before


@dataclass(frozen=True)
class LocalBnStats(Wrapper):
    """The algorithm whose clients predict with the statistics of their samples, not the running ones.

    Without batch norm it changes nothing.
    """

    wraps: ClassVar[tuple[str, ...]] = ("client",)

    def client_init(self, task: Task) -> BnStatsClient:
        never = task.initial.new_zeros((), dtype=torch.bool)
        return BnStatsClient(self.algorithm.client_init(task), task.initial[task.d :], never)

    def client_update(self, task: Task, client: Any, down: Any, data: Data, plan: Plan) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        w = task.with_local_statistics(_one_of(output.trained), data)
        after = BnStatsClient(output.client, w[task.d :], torch.ones_like(client.ever))
        return output._replace(client=after, trained=with_statistics(task, output.trained, w))

    def personal_model(self, task: Task, client: BnStatsClient, down: Any) -> Personal:
        model = super().personal_model(task, client, down)
        w = _one_of(model)
        statistics = torch.where(client.ever, client.statistics, w[task.d :])
        return with_statistics(task, model, torch.cat([w[: task.d], statistics]))


def _one_of(model: Personal) -> Tensor:
    """The vector, or the first of several."""
    return model.w[0] if isinstance(model, Experts) else model
