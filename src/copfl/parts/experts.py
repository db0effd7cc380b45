"""Models that answer together, with weights that fall by exp(-rate * loss): a pair, a bank, and the two as halves.

answer = c (a own + b mean) + d sum_k s_k stored_k         (a + b = c + d = sum s = 1)
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
    halves: Tensor  # [2], of those two answering together and of the bank answering together


def even(like: Tensor, stored: int) -> Logs:
    """Everybody counts the same."""
    return Logs(like.new_zeros(2), like.new_zeros(stored), like.new_zeros(2))


def shares(logs: Logs, there: Tensor) -> Tensor:
    """[2 + M], what each model's answer counts: c a, c b, d s_1, ...; places of the bank not yet `there` count 0."""
    halves, pair, bank = logs.halves.softmax(0), logs.pair.softmax(0), _filled(logs.bank, there).softmax(0)
    return torch.cat([halves[0] * pair, halves[1] * bank])


class Losses(NamedTuple):
    single: Tensor  # [2 + M], of each model alone
    halves: Tensor  # [2], of the pair answering together and of the bank


def losses(task: Task, w: Tensor, logs: Logs, there: Tensor, data: Data) -> Losses:
    """The mean loss of each model w[k] and of each half on these samples."""
    groups = [(w[:2], logs.pair), (w[2:], _filled(logs.bank, there))]
    together = [task.evaluate(Experts(some, weights.softmax(0)), data)[0] for some, weights in groups]
    return Losses(torch.stack([task.evaluate(one, data)[0] for one in w]), torch.stack(together))


def fallen(logs: Logs, found: Losses, rate: float) -> Logs:
    """weight <- weight * exp(-rate * loss), for each model and each half."""
    single, halves = rate * found.single, rate * found.halves
    return Logs(logs.pair - single[:2], logs.bank - single[2:], logs.halves - halves)


def _filled(logs: Tensor, there: Tensor) -> Tensor:
    return torch.where(there, logs, -torch.inf)
