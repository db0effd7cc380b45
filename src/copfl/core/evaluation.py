"""Accuracy and loss of a client's model and of the global model, on the client's test samples."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from copfl.core.task import Data, Personal, Task, with_statistics

# The models of an evaluation, by the suffix of their metrics' names: the client's model after its local
# update, before it, and the global model. Each is one more pass over the test samples.
EvalModels = tuple[str, ...]
EVAL_MODELS: dict[str, EvalModels] = {
    "all": ("", "_before", "_global"),
    "personal": ("", "_before"),
    "final": ("",),
}


class Personalised(Protocol):
    """The part of an Algorithm that returns models."""

    def client_init(self, task: Task) -> Any: ...

    def personal_model(self, task: Task, client: Any, down: Any) -> Personal: ...


def evaluate(
    algorithm: Personalised,
    task: Task,
    client: Any,
    down: Any,
    trained: Personal,
    test: Data,
    models: EvalModels = EVAL_MODELS["all"],
) -> dict[str, Tensor]:
    """Accuracy and loss of these models on a client's test samples."""

    def model(name: str) -> Personal:
        if name == "_before":
            return algorithm.personal_model(task, client, down)
        if name == "_global":
            global_model = algorithm.personal_model(task, algorithm.client_init(task), down)
            return with_statistics(task, global_model, trained) if task.buffers == "local" else global_model
        return trained

    metrics = {}
    for name in models:
        loss, accuracy = task.evaluate(model(name), test)
        defined = torch.isfinite(loss) & (test.size > 0)  # nan without samples, or after divergence
        metrics[f"accuracy{name}"] = torch.where(defined, accuracy.double(), torch.nan)
        metrics[f"test_loss{name}"] = torch.where(defined, loss.double(), torch.nan)
    return metrics
