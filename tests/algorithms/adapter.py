"""A model of four numbers with an adapter, h * (base + 2 * b * a) * x, and its derivatives by hand."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from copfl.core import Task, task_of
from copfl.testing import LoRALinear
from tests.algorithms.chain import off

SCALING = 2.0


class Numbers(NamedTuple):
    """The numbers in the order of w; base is first there, where it is trained."""

    base: float
    a: float
    b: float
    head: float

    def stepped(self, x: float, y: int, lr: float) -> Numbers:
        """After one step on one sample, of all numbers but the base."""
        miss = off(self.head * (self.base + SCALING * self.b * self.a) * x, y) * x
        a = self.a - lr * miss * self.head * SCALING * self.b
        b = self.b - lr * miss * self.head * SCALING * self.a
        return Numbers(self.base, a, b, self.head - lr * miss * (self.base + SCALING * self.b * self.a))


class Chain(nn.Module):
    """Two answers, [0, h * (base + 2 b a) * x]."""

    def __init__(self, numbers: Numbers, train_base: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(LoRALinear(nn.Linear(1, 1, bias=False), r=1, scaling=SCALING))
        self.head = nn.Linear(1, 1, bias=False)
        for parameter, value in zip(self.parameters(), numbers, strict=True):
            nn.init.constant_(parameter, value)
        next(self.parameters()).requires_grad_(train_base)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.body(x))
        return torch.cat([torch.zeros_like(answer), answer], 1)


def adapted(numbers: Numbers, train_base: bool = False) -> Task:
    """w = [a, b, head], or [base, a, b, head], in float64."""
    return task_of(Chain(numbers, train_base), 2, dtype=torch.float64)
