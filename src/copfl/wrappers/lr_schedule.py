"""A learning rate that falls over the rounds."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core import AnyAlgorithm, ClientOutput, Data, Plan, Scaled, Task, UsageError, at_least
from copfl.wrappers.base import RoundWrapper, Wrapper


class ScheduledDown(NamedTuple):
    down: Any
    lr_factor: Tensor  # [], the factor of the learning rate


@dataclass(frozen=True)
class LrSchedule(RoundWrapper):
    """The algorithm whose learning rate falls from round to round, to zero after `rounds`, or in two steps."""

    schedule: str = "cosine"
    rounds: int = 100

    def __post_init__(self) -> None:
        at_least(1, **{"addons.lr_rounds": self.rounds})
        if self.optimizer is None:
            raise UsageError("addons.lr_schedule: this algorithm has no optimizer; leave lr_schedule out")

    def downlink(self, server: Any, ids: Tensor) -> ScheduledDown:
        done = (server.round.double() / self.rounds).clamp(max=1)
        if self.schedule == "steps":
            lr_factor = 0.1 ** ((done >= 0.5).double() + (done >= 0.75).double())
        else:
            lr_factor = 1 - done if self.schedule == "linear" else (1 + torch.cos(math.pi * done)) / 2
        return ScheduledDown(super().downlink(server, ids), lr_factor.expand(len(ids)))

    def client_update(self, task: Task, client: Any, down: Any, data: Data, plan: Plan) -> ClientOutput:
        lr_factor = down.lr_factor.clamp(0, 1)  # no server can raise the rate that a node has accepted
        algorithm: AnyAlgorithm = _with_lr_factor(self.algorithm, lr_factor.to(task.initial.dtype))
        return algorithm.client_update(task, client, down.down, data, plan)


def _with_lr_factor(algorithm: Any, lr_factor: Tensor) -> Any:
    """The algorithm, also one inside wrappers, with its learning rate multiplied."""
    if isinstance(algorithm, Wrapper):
        return dataclasses.replace(algorithm, algorithm=_with_lr_factor(algorithm.algorithm, lr_factor))
    return dataclasses.replace(algorithm, optimizer=Scaled(algorithm.optimizer, lr_factor))
