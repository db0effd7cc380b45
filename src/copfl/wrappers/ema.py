"""Predictions with an exponential moving average of the weights that a client's rounds ended in."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Personal, Plan, Task, tree
from copfl.errors import below_one
from copfl.wrappers.base import Wrapper, initial_model


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
        client, model = initial_model(self.algorithm, task)
        return EmaClient(client, tree.each(torch.zeros_like, model), task.initial.new_zeros(()))

    def client_update(self, task: Task, client: EmaClient, down: Any, data: Data, plan: Plan) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        sum = tree.each(self._added, client.sum, output.trained)
        weight = self.decay * client.weight + (1 - self.decay)
        averaged = tree.each(partial(_mean, weight=weight), sum)
        return output._replace(client=EmaClient(output.client, sum, weight), trained=averaged)

    def personal_model(self, task: Task, client: EmaClient, down: Any) -> Personal:
        current, trained = super().personal_model(task, client, down), client.weight > 0
        weight = torch.where(trained, client.weight, 1)
        model: Personal = tree.each(
            lambda s, c: torch.where(trained, _mean(s, weight), c), client.sum, current
        )
        return model

    def _added(self, sum: Tensor, new: Tensor) -> Tensor:
        return self.decay * sum + (1 - self.decay) * new if new.is_floating_point() else new


def _mean(sum: Tensor, weight: Tensor) -> Tensor:
    """What is no number, such as which places of a memory are used, is that of the last round."""
    return sum / weight if sum.is_floating_point() else sum
