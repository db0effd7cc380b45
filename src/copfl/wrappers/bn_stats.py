"""Predictions with batch-norm statistics computed on all samples of a client."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Experts, Personal, Plan, Task
from copfl.core.evaluation import vectors_of, with_statistics
from copfl.errors import UsageError
from copfl.wrappers.base import Wrapper, initial_model


class BnStatsClient(NamedTuple):
    client: Any
    statistics: (
        Tensor  # [D - d], of its own samples at the end of its last round; of a mixture a row per model
    )
    ever: Tensor  # [] bool, whether it took part before


@dataclass(frozen=True)
class LocalBnStats(Wrapper):
    """The algorithm whose clients predict with the statistics of their samples, not the running ones.

    Each model of a mixture has its own. Without batch norm it changes nothing, and never the global model.
    """

    wraps: ClassVar[tuple[str, ...]] = ("client",)

    def client_init(self, task: Task) -> BnStatsClient:
        client, model = initial_model(self.algorithm, task)
        never = task.initial.new_zeros((), dtype=torch.bool)
        return BnStatsClient(client, vectors_of(model)[..., task.d :], never)

    def client_update(self, task: Task, client: Any, down: Any, data: Data, plan: Plan) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        w = vectors_of(output.trained)
        has_memory = isinstance(output.trained, Experts) and output.trained.memory is not None
        if has_memory and w.shape[-1] > task.d and task.buffers != "local":
            raise UsageError(
                "addons.bn_stats=local would change the features that a client remembers; use bn_stats=running, "
                "or statistics that stay with the client"
            )
        models = [task.with_local_statistics(model, data) for model in w.reshape(-1, w.shape[-1])]
        statistics = torch.stack(models).reshape(w.shape)[..., task.d :]
        after = BnStatsClient(output.client, statistics, torch.ones_like(client.ever))
        return output._replace(client=after, trained=with_statistics(task, output.trained, statistics))

    def personal_model(self, task: Task, client: BnStatsClient, down: Any) -> Personal:
        model = super().personal_model(task, client, down)
        running = vectors_of(model)[..., task.d :]
        return with_statistics(task, model, torch.where(client.ever, client.statistics, running))
