"""The features of a client's samples by class, and an objective that aligns them to class centroids."""

from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.criteria import mean_of_valid
from copfl.core.task import STATISTICS_BATCH, Data, Objective, Task
from copfl.errors import UsageError, how_to_set


class Sums(NamedTuple):
    features: Tensor  # [C, f]
    squares: Tensor  # [], of the features' lengths
    counts: Tensor  # [C]


def class_sums(task: Task, w: Tensor, data: Data) -> Sums:
    """The sums of one client's features, of their squared lengths, and the number of samples of each class.

    Batch norm uses the statistics of these samples: the running statistics of a new network do not normalise
    yet, and aligning to centroids computed with them makes a ResNet diverge in the first rounds.
    """
    parts = []
    for x, y, valid in data.in_parts(STATISTICS_BATCH):
        _, features = task.forward(w, task.numbers(x), training=True, valid=valid)
        members = ((y[:, None] == torch.arange(task.classes, device=y.device)) & valid[:, None]).to(w.dtype)
        squares = torch.where(valid, (features * features).sum(1), 0).sum()
        parts.append(Sums(members.T @ features, squares, members.sum(0)))
    return tree.total(tree.stack(parts))


def class_shares(task: Task, data: Data) -> Tensor:
    """[C], the share of each class in a client's samples."""
    is_valid = torch.arange(len(data.y), device=data.y.device) < data.size
    is_member = (data.y[:, None] == torch.arange(task.classes, device=data.y.device)) & is_valid[:, None]
    return is_member.sum(0).to(task.initial.dtype) / data.size.clamp(min=1)


def table_shape(task: Task) -> tuple[int, ...]:
    """[C, f], the classes and the features, the shape of the head's matrix."""
    if task.criterion.kind != "classification":
        raise UsageError(
            f"fedpac aligns the features of classes; this task is {task.criterion.kind}. "
            "Choose another algorithm"
        )
    shape = task.layout.head_shape
    if len(shape) != 2:
        raise UsageError(
            f'fedpac\'s class centroids need a Linear head; "{task.layout.head}" is none. Name one: '
            f"{how_to_set('model.head', 'fc')}"
        )
    return shape


def centroids_of(sums: Tensor, counts: Tensor, otherwise: Tensor) -> Tensor:
    """The mean feature of each class [C, f], from sums [C, f] and counts [C]; `otherwise` without samples."""
    return torch.where((counts > 0)[:, None], sums / counts.clamp(min=1)[:, None], otherwise)


def prior_means(sums: Sums, size: Tensor) -> tuple[Tensor, Tensor]:
    """h[c] = (n_c / n) * mean feature of class c [C, f], and its variance: (E |feature|^2 - |h|^2) / n."""
    means = sums.features / size
    return means, ((sums.squares / size - (means * means).sum()) / size).clamp(min=0)


def aligned(task: Task, centroids: Tensor, known: Tensor, own: Sums, strength: float) -> Objective:
    """The task's objective + strength * mean squared distance of features to their class's centroid.

    Where the class has no centroid, `known` [C] is False, to the client's own mean; without any centroid the
    term is 0.
    """
    target = torch.where(known[:, None], centroids, own.features / own.counts.clamp(min=1)[:, None])
    weight = strength * known.any()

    def loss(logits: Tensor, features: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
        distance = ((features - target[labels]) ** 2).mean(1)
        return task.objective(logits, features, labels, valid) + weight * mean_of_valid(distance, valid)

    return loss
