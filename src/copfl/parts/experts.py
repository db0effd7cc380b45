"""An ensemble with weights that fall by exp(-rate * loss): a pair, a bank of models, and the two as halves.

prediction = c (a own + b mean) + d sum_k s_k stored_k         (a + b = c + d = sum s = 1)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.task import Data, Experts, Task


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


class Losses(NamedTuple):
    single: Tensor  # [2 + M], of each model alone
    halves: Tensor  # [2], of the pair and of the bank


def losses(task: Task, w: Tensor, logs: Logs, stored: Tensor, data: Data) -> Losses:
    """The mean loss of each model w[k] and of each half on these samples."""
    groups = [(w[:2], logs.pair), (w[2:], _masked(logs.bank, stored))]
    of_halves = [task.evaluate(Experts(some, weights.softmax(0)), data)[0] for some, weights in groups]
    return Losses(torch.stack([task.evaluate(one, data)[0] for one in w]), torch.stack(of_halves))


def fallen(logs: Logs, found: Losses, rate: float) -> Logs:
    """weight <- weight * exp(-rate * loss), for each model and each half."""
    single, halves = rate * found.single, rate * found.halves
    return Logs(logs.pair - single[:2], logs.bank - single[2:], logs.halves - halves)


def _masked(logs: Tensor, stored: Tensor) -> Tensor:
    return torch.where(stored, logs, -torch.inf)
