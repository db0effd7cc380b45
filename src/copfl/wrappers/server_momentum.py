"""Momentum at the server: FedAvgM (Hsu et al. 2019)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import Metrics, Task, UsageError
from copfl.errors import below_one
from copfl.wrappers.base import Wrapper


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
                "weights; leave server_momentum out; over a run file: --set addons.server_momentum=0"
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
