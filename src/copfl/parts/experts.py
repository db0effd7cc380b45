"""An ensemble with weights that fall by exp(-rate * loss): a pair, a bank of models, and the two as halves.

prediction = c (a own + b mean) + d sum_k s_k stored_k         (a + b = c + d = sum s = 1)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.task import Data, Experts, Personal, Task


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
