"""A model of two numbers, h * (b * x), whose every step is arithmetic: the derivative of the loss by s is off(s, y)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from copfl.core import Batch, Data, Plan, Sgd, Task, task_of

LR = 0.5
PLAIN = Sgd(lr=LR, momentum=0.0, weight_decay=0.0)


class Chain(nn.Module):
    """Two answers, [0, h * b * x]: b is the body, h the head."""

    def __init__(self, body: float, head: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.body.weight, body)
        nn.init.constant_(self.head.weight, head)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.body(x))
        return torch.cat([torch.zeros_like(answer), answer], 1)


def chain(body: float, head: float) -> Task:
    """w = [body, head], in float64."""
    return task_of(Chain(body, head), 2, dtype=torch.float64)


def off(s: float, y: int) -> float:
    """By how much the probability of class 1 misses the label: dloss/ds for the answers [0, s]."""
    return 1 / (1 + math.exp(-s)) - y


def samples(*pairs: tuple[float, int]) -> Data:
    """One client's samples, each one number and its label."""
    x = torch.tensor([[x] for x, _ in pairs], dtype=torch.float64)
    return Data(x, torch.tensor([y for _, y in pairs]), torch.tensor(len(pairs)))


def one_at_a_time(*epochs: Sequence[int]) -> Plan:
    """Passes of one-sample batches, given by the samples' places; -1 stands for a batch without a real sample."""
    return tuple(
        tuple(
            Batch(torch.tensor([max(i, 0)]), None if i >= 0 else torch.tensor([False]), None, None)
            for i in indices
        )
        for indices in epochs
    )


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def numbers(*values: float) -> Any:
    """What a tensor of these numbers is compared with."""
    return pytest.approx(list(values), rel=1e-12, abs=1e-12)


def steps(
    start: tuple[float, float],
    pairs: Sequence[tuple[float, int]],
    *,
    lam: float = 0.0,
    anchor: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, float]:
    """Body and head after a step on each pair by hand, with the penalty lam / 2 * |w - anchor|^2."""
    body, head = start
    for x, y in pairs:
        miss = off(head * body * x, y)
        body, head = (
            body - LR * (miss * head * x + lam * (body - anchor[0])),
            head - LR * (miss * body * x + lam * (head - anchor[1])),
        )
    return body, head
