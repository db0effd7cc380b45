"""Two models that answer together, share * v + (1 - share) * w: what is mixed, and how it is descended.

A mixture says what a client predicts with, how v descends the mixture's loss, and the loss's derivative by the share.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.core.task import Batch, Data, Experts, Personal, Task, mean_of_valid


class Mixture(Protocol):
    """share * v + (1 - share) * w, in one sense or another."""

    def personal_model(self, task: Task, v: Tensor, w: Tensor, share: Tensor) -> Personal:
        """What predicts."""

    def how(self, task: Task, w: Tensor, share: Tensor, data: Data, batch: Batch) -> dict[str, Any]:
        """How v descends the mixture's loss on this batch while w stands still: keywords for `descend`."""

    def slope(self, task: Task, v: Tensor, w: Tensor, share: Tensor, data: Data, batch: Batch) -> Tensor:
        """The derivative of the mixture's loss on this batch by the share."""


class Predictions:
    """Probabilities are mixed: the loss is -log(share p_v + (1 - share) p_w) of the right label."""

    def personal_model(self, task: Task, v: Tensor, w: Tensor, share: Tensor) -> Personal:
        return Experts(torch.stack([v, w]), torch.stack([share, 1 - share]))

    def how(self, task: Task, w: Tensor, share: Tensor, data: Data, batch: Batch) -> dict[str, Any]:
        other = log_right(task, w, data, batch) + (1 - share).log()  # [b]

        def objective(logits: Tensor, features: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
            mine = -F.cross_entropy(logits, labels, reduction="none") + share.log()
            return mean_of_valid(-torch.logaddexp(mine, other), valid)

        return {"objective": objective}

    def slope(self, task: Task, v: Tensor, w: Tensor, share: Tensor, data: Data, batch: Batch) -> Tensor:
        """The mean of (p_w - p_v) / mixture."""
        mine, other = (log_right(task, model, data, batch).exp() for model in (v, w))
        mixed = share * mine + (1 - share) * other
        return mean_of_valid((other - mine) / mixed.clamp(min=1e-6), batch.valid)


class Weights:
    """Parameters are mixed: the loss is f(share v + (1 - share) w), and v's gradient has the chain rule's share."""

    def personal_model(self, task: Task, v: Tensor, w: Tensor, share: Tensor) -> Personal:
        return torch.cat(
            [self._mixed(task, v, w, share), v[task.d :]]
        )  # v's statistics are gathered in the mixture

    def how(self, task: Task, w: Tensor, share: Tensor, data: Data, batch: Batch) -> dict[str, Any]:
        rest = (1 - share) * w[: task.d]
        return {"at": lambda v: share * v + rest, "adjust": lambda v, grad: share * grad}

    def slope(self, task: Task, v: Tensor, w: Tensor, share: Tensor, data: Data, batch: Batch) -> Tensor:
        """<grad f(mixture), v - w>."""
        x, y = task.batch(data, batch)
        grad = task.gradient(self._mixed(task, v, w, share), v[task.d :], x, y, batch.valid)[0]
        return (grad * (v - w)[: task.d]).sum()

    def _mixed(self, task: Task, v: Tensor, w: Tensor, share: Tensor) -> Tensor:
        return share * v[: task.d] + (1 - share) * w[: task.d]


MIXTURES: dict[str, Mixture] = {"predictions": Predictions(), "weights": Weights()}


def log_right(task: Task, w: Tensor, data: Data, batch: Batch) -> Tensor:
    """The log-probability of each sample's label [b], as the model in training sees it."""
    x, y = task.batch(data, batch)
    return -F.cross_entropy(task.forward(w, x, True, batch.valid)[0], y, reduction="none")
