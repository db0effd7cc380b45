"""The diagonal of the Fisher information on a few samples, and the weight of two such estimates."""

from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.task import Batch, Data, Epoch, Task


class Curvature(NamedTuple):
    fisher: Tensor  # [d], the diagonal of the empirical Fisher information
    gradient: Tensor  # [d], the mean


def groups_of(epoch: Epoch, samples: int, together: int) -> tuple[Batch, ...]:
    """The first samples of an epoch, which are random ones, in groups of this size."""
    index = torch.cat([batch.index for batch in epoch])[:samples]
    is_valid = [
        torch.ones_like(batch.index, dtype=torch.bool) if batch.valid is None else batch.valid
        for batch in epoch
    ]
    both = (torch.split(vector, together) for vector in (index, torch.cat(is_valid)[:samples]))
    return tuple(Batch(part, valid, None, None) for part, valid in zip(*both, strict=True))


def curvature(task: Task, w: Tensor, data: Data, groups: tuple[Batch, ...]) -> Curvature:
    """The mean over the groups of (samples in it) * (mean gradient)^2, and the mean gradient.

    With one sample in a group this is the mean of the squared gradients of single samples; with several it
    has the same expectation where the gradients' mean is zero, at a fraction of the cost. Batch norm has the
    statistics of w: those of a group, which may be one sample, would be others.
    """
    fisher = gradient = torch.zeros_like(w[: task.d])
    used = samples = w.new_zeros(())
    for group in groups:
        x, y = task.batch(data, group)
        grad, _, _ = task.gradient(w[: task.d], w[task.d :], x, y, group.valid, training=False)
        assert group.valid is not None
        count = group.valid.sum().to(w.dtype)
        grad = torch.where(count > 0, grad, 0)
        fisher, gradient = fisher + count * grad.square(), gradient + count * grad
        used, samples = used + (count > 0), samples + count
    return Curvature(fisher / used.clamp(min=1), gradient / samples.clamp(min=1))


def merging_weight(first: Curvature, second: Curvature, damping: float) -> Tensor:
    """[] in 0..1, the weight of the first in the mixture of two estimates with the smallest variance.

    (b - c) / (a + b - 2 c): a and b are the traces of the inverse Fisher informations, c that of the
    covariance, the correlation of the two gradients, from 0 to 1, times sqrt(a b). Half where the variances
    are the same.
    """
    scale = (first.fisher.mean() + second.fisher.mean()) / 2
    damped = damping * torch.where(scale > 0, scale, 1)
    a, b = ((1 / (one.fisher + damped)).sum() for one in (first, second))
    lengths = first.gradient.norm() * second.gradient.norm()
    correlation = (first.gradient * second.gradient).sum() / torch.where(lengths > 0, lengths, 1)
    c = correlation.clamp(0, 1) * (a * b).sqrt()
    total = a + b - 2 * c
    is_defined = total > 1e-6 * (a + b)
    return torch.where(is_defined, (b - c) / torch.where(is_defined, total, 1), 0.5).clamp(0, 1)
