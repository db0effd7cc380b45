"""What a model remembers beside its weights: features of samples, the nearest of which vote on a new one."""

from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.criteria import Criterion

NO_VOTE = -1e30  # a finite logarithm of 0: a memory without samples gives no nan


class Memory(NamedTuple):
    """Samples by their features and targets, and how much their vote counts.

    It is derived from samples of one client, sample by sample: it stays where they are.
    """

    features: Tensor  # [m, f], in the mixture's first model
    targets: Tensor  # [m, C]: 1 at the class, the labels, or the values
    used: Tensor  # [m] bool; the other places are empty
    nearest: Tensor  # [] int64, how many vote
    width: Tensor  # [], the squared distance at which a vote has fallen to 1/e
    share: Tensor  # [], of the vote in a prediction; the rest is the mixture's


def vote(memory: Memory, features: Tensor, besides: Tensor | None = None) -> Tensor:
    """[b, C], the mean of the nearest samples' targets, each weighted by exp(-squared distance / width).

    Samples that are as near as the last of the nearest vote too.

    Args:
        memory: The samples.
        features: [b, f], of those that are predicted.
        besides: [b], the place in the memory that has no vote on each; -1: all have one.
    """
    stored, places = memory.features, torch.arange(memory.features.shape[0], device=features.device)
    squares = (features**2).sum(1, keepdim=True) + (stored**2).sum(1) - 2 * features @ stored.T
    is_left_out = ~memory.used if besides is None else ~memory.used | (places == besides[:, None])
    distances = torch.where(is_left_out, -NO_VOTE, squares.clamp(min=0))  # [b, m]
    last = (memory.nearest - 1).clamp(0, len(places) - 1)
    reach = distances.sort(1)[0].index_select(1, last.reshape(1))
    logs = torch.where((distances <= reach) & ~is_left_out, -distances / memory.width, NO_VOTE)
    mean: Tensor = logs.softmax(1) @ memory.targets
    return mean


def recalled(criterion: Criterion, voted: Tensor, predictions: Tensor, share: Tensor) -> Tensor:
    """The predictions mixed with a vote, as `Task.predict` returns them."""
    if criterion.logarithmic:
        voted = voted.clamp(min=torch.finfo(voted.dtype).tiny).log()
    return criterion.mixed(
        torch.stack([predictions, voted.view_as(predictions)]), torch.stack([1 - share, share])
    )
