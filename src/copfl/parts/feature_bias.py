"""A bias on the features of a model, trained with its parameters, and the mean of the features."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from copfl.core.task import STATISTICS_BATCH, Batch, Data, KeyedInputs, Task
from copfl.errors import UsageError, how_to_set


@dataclass(frozen=True, eq=False)
class Biased:
    """The task whose vector is w's parameters, the bias of the features, and w's statistics."""

    task: Task

    @property
    def d(self) -> int:
        return self.task.d + feature_count(self.task)

    def batch(self, data: Data, batch: Batch) -> tuple[KeyedInputs, Tensor]:
        """The samples and labels of one step."""
        return self.task.batch(data, batch)

    def gradient(self, both: Tensor, buffers: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """By the chain rule, from the gradient G, g of the head's matrix W and bias b at W, b + W bias.

        d/dW = G + g biasᵀ, d/db = g, d/dbias = Wᵀ g.
        """
        layout, d, matrix = self.task.layout, self.task.d, f"{self.task.layout.head}.weight"
        w, bias = torch.cat([both[:d], buffers]), both[d:]
        grad, loss, after = self.task.gradient(shifted(self.task, w, bias)[:d], buffers, *rest)
        grad = torch.cat([grad, torch.zeros_like(buffers)])
        slope = layout.entries(grad, f"{layout.head}.bias")
        of_matrix = layout.entries(grad, matrix) + torch.outer(slope, bias).reshape(-1)
        of_bias = layout.entries(w, matrix).view(head_shape(self.task)).T @ slope
        return torch.cat([layout.with_entries(grad, matrix, of_matrix)[:d], of_bias]), loss, after


def shifted(task: Task, w: Tensor, bias: Tensor) -> Tensor:
    """w whose head sees every feature with this bias: b + W bias in place of b."""
    layout = task.layout
    moved = layout.entries(w, f"{layout.head}.weight").view(head_shape(task)) @ bias
    name = f"{layout.head}.bias"
    return layout.with_entries(w, name, layout.entries(w, name) + moved)


def mean_feature(task: Task, w: Tensor, data: Data) -> Tensor:
    """[f], of one client's samples; batch norm uses their statistics, as in training."""
    total = w.new_zeros(feature_count(task))
    for x, _, valid in data.in_parts(STATISTICS_BATCH):
        _, features = task.forward(w, task.numbers(x), training=True, valid=valid)
        total = total + torch.where(valid[:, None], features, 0).sum(0)
    return total / data.size.clamp(min=1)


def head_shape(task: Task) -> tuple[int, int]:
    """[C, f] of the head's matrix."""
    shape, name = task.layout.head_shape, task.layout.head
    if len(shape) != 2 or f"{name}.bias" not in task.layout.names or task.criterion.kind == "next_token":
        raise UsageError(
            f'feddbe shifts the features of a Linear head with a bias; "{name}" is none, or predicts tokens. '
            f"Name another head, such as {how_to_set('model.head', 'fc')}, or choose another algorithm"
        )
    return shape[0], shape[1]


def feature_count(task: Task) -> int:
    """f, the number of features that the head sees."""
    return head_shape(task)[1]
