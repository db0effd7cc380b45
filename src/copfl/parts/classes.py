"""What one client's samples look like to the model, class by class."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from copfl import tree
from copfl.task import PASS, Data, Task


class Sums(NamedTuple):
    features: Tensor  # [C, f]
    squares: Tensor  # [], of the features' lengths
    counts: Tensor  # [C]


def class_sums(task: Task, w: Tensor, data: Data) -> Sums:
    """The sums of one client's features, of their squared lengths, and the number of samples of each class.

    Batch norm looks at the client's own samples here: the running statistics of a young network do not normalise yet,
    and centroids made with them are so far away that aligning to them makes a ResNet diverge in the first rounds.
    """
    parts = []
    for start in range(0, data.y.shape[0], PASS):
        y = data.y[start : start + PASS]
        real = torch.arange(start, start + y.shape[0], device=y.device) < data.size
        _, features = task.forward(w, task.numbers(data.x[start : start + PASS]), training=True, real=real)
        members = ((y[:, None] == torch.arange(task.classes, device=y.device)) & real[:, None]).to(w.dtype)
        squares = torch.where(real, (features * features).sum(1), 0).sum()
        parts.append(Sums(members.T @ features, squares, members.sum(0)))
    return tree.total(tree.stack(parts))
