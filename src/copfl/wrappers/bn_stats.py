"""Predictions with batch-norm statistics computed on all samples of a client."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Experts, Personal, Plan, Task
from copfl.core.evaluation import with_statistics
from copfl.wrappers.base import Wrapper


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
