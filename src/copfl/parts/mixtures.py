"""Mixtures of models. Two models, alpha * v + (1 - alpha) * w: of their predictions, or of their weights.

Each kind of mixture of two has three methods:

personal_model  what a client predicts with
options         the keywords with which `descend` trains v on the mixture's loss on this batch while w is fixed
slope           the derivative of the mixture's loss on this batch by alpha
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.core.task import Batch, Data, Experts, Personal, Task, mean_of_valid


class Predictions:
    """Probabilities are mixed: the loss is -log(alpha p_v + (1 - alpha) p_w) of the right label."""

    def personal_model(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor) -> Personal:
        return Experts(torch.stack([v, w]), torch.stack([alpha, 1 - alpha]))

    def options(self, task: Task, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> dict[str, Any]:
        log_w = log_right(task, w, data, batch) + (1 - alpha).log()  # [b]

        def objective(logits: Tensor, features: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
            log_v = -F.cross_entropy(logits, labels, reduction="none") + alpha.log()
            return mean_of_valid(-torch.logaddexp(log_v, log_w), valid)

        return {"objective": objective}

    def slope(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> Tensor:
        """The mean of (p_w - p_v) / mixture."""
        p_v, p_w = (log_right(task, model, data, batch).exp() for model in (v, w))
        mixed = alpha * p_v + (1 - alpha) * p_w
        return mean_of_valid((p_w - p_v) / mixed.clamp(min=1e-6), batch.valid)


class Weights:
    """Parameters are mixed: the loss is f(alpha v + (1 - alpha) w), and v's gradient has the factor alpha."""

    def personal_model(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor) -> Personal:
        # v's statistics are those of the mixture.
        return torch.cat([self._mixed(task, v, w, alpha), v[task.d :]])

    def options(self, task: Task, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> dict[str, Any]:
        rest = (1 - alpha) * w[: task.d]
        return {"at": lambda v: alpha * v + rest, "adjust": lambda v, grad: alpha * grad}

    def slope(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor, data: Data, batch: Batch) -> Tensor:
        """<grad f(mixture), v - w>."""
        x, y = task.batch(data, batch)
        grad = task.gradient(self._mixed(task, v, w, alpha), v[task.d :], x, y, batch.valid)[0]
        return (grad * (v - w)[: task.d]).sum()

    def _mixed(self, task: Task, v: Tensor, w: Tensor, alpha: Tensor) -> Tensor:
        return alpha * v[: task.d] + (1 - alpha) * w[: task.d]


MIXTURES: dict[str, Predictions | Weights] = {"predictions": Predictions(), "weights": Weights()}


def log_right(task: Task, w: Tensor, data: Data, batch: Batch) -> Tensor:
    """The log-probability of each sample's label [b] with the model in training mode."""
    x, y = task.batch(data, batch)
    return -F.cross_entropy(task.forward(w, x, True, batch.valid)[0], y, reduction="none")


# -- an ensemble with weights that fall by exp(-rate * loss): a pair, a bank of models, and the two as halves --
#
# prediction = c (a own + b mean) + d sum_k s_k stored_k         (a + b = c + d = sum s = 1)


class Logs(NamedTuple):
    """Logarithms of the multiplicative weights; only differences within a field count."""

    pair: Tensor  # [2], of the own model and the mean
    bank: Tensor  # [M], of the stored means
    halves: Tensor  # [2], of the pair and of the bank


def even(like: Tensor, places: int) -> Logs:
    """Equal weights."""
    return Logs(like.new_zeros(2), like.new_zeros(places), like.new_zeros(2))


def shares(logs: Logs, stored: Tensor) -> Tensor:
    """[2 + M], the weight of each model: c a, c b, d s_1, ...; 0 for empty places of the bank."""
    halves, pair, bank = logs.halves.softmax(0), logs.pair.softmax(0), _masked(logs.bank, stored).softmax(0)
    return torch.cat([halves[0] * pair, halves[1] * bank])


def losses(task: Task, models: Iterable[Personal], data: Data) -> Tensor:
    """The mean loss of each model on these samples."""
    return torch.stack([task.evaluate(model, data)[0] for model in models])


def losses_of_halves(task: Task, w: Tensor, logs: Logs, stored: Tensor, data: Data) -> Tensor:
    """[2], the mean loss of the pair and of the bank, each mixed by these weights."""
    pair = Experts(w[:2], logs.pair.softmax(0))
    bank = Experts(w[2:], _masked(logs.bank, stored).softmax(0))
    return losses(task, (pair, bank), data)


def fallen(logs: Logs, single: Tensor, halves: Tensor, rate: float) -> Logs:
    """weight <- weight * exp(-rate * loss), for each model and each half."""
    return Logs(logs.pair - rate * single[:2], logs.bank - rate * single[2:], logs.halves - rate * halves)


def _masked(logs: Tensor, stored: Tensor) -> Tensor:
    return torch.where(stored, logs, -torch.inf)
