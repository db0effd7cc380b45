"""Federations small enough to follow by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from copfl.core.algorithm import AnyAlgorithm, traits
from copfl.core.task import Batch, Data, Plan, Task, task_of
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine.mapping import Mapping, sequential
from copfl.engine.rounds import Round, State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.models import MLP
from copfl.testing import add_lora


class Slopes(nn.Module):
    """Two answers, [0, a·x]: as many parameters as the samples have entries, and a gradient one can write down.

    The cross-entropy of one sample is log(1 + exp(s)), s = a·x if y = 0 and s = -a·x if y = 1.
    """

    def __init__(self, first: Sequence[float]) -> None:
        super().__init__()
        self.head = nn.Linear(len(first), 1, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([list(first)]))

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(x)
        return torch.cat([torch.zeros_like(answer), answer], 1)


def adapted_mlp(shape: tuple[int, ...], classes: int, width: int = 4) -> nn.Module:
    """An MLP with an adapter, for the algorithms that need one; the adapted layer's W is trained too."""
    model = MLP(shape, classes, width)
    add_lora(cast(nn.Sequential, model.body), ("*.base_layer.weight",))
    return model


def slopes(*first: float) -> Task:
    """The task of `Slopes` in float64."""
    return task_of(Slopes(first), 2, dtype=torch.float64)


Vector = tuple[float, ...]


def sigma(z: float) -> float:
    """1 / (1 + exp(-z)): the probability of class 1 where the model answers [0, z]."""
    return 1 / (1 + math.exp(-z))


def dot(a: Vector, x: Vector) -> float:
    return sum(p * q for p, q in zip(a, x, strict=True))


def loss(a: Vector, x: Vector) -> float:
    """Of `Slopes` with the parameters a, for the sample x with label 1."""
    return math.log(1 + math.exp(-dot(a, x)))


def federation_of(*clients: tuple[Sequence[Sequence[float]], Sequence[int]]) -> FederatedData:
    """A federation of clients given as (samples, labels); they are tested on what they train on."""
    x = np.concatenate([np.asarray(x, np.float64) for x, _ in clients])
    y = np.concatenate([np.asarray(y, np.int64) for _, y in clients])
    return divided(x, y, [len(y) for _, y in clients])


def divided(x: NDArray[Any], y: NDArray[np.int64], sizes: Sequence[int]) -> FederatedData:
    """The samples dealt out in the order they stand, this many to each client."""
    samples = Samples(x, y)
    parts = tuple(np.split(np.arange(len(y), dtype=np.int64), np.cumsum(sizes)[:-1]))
    classes = tuple(str(label) for label in range(int(y.max()) + 1))
    return FederatedData(Dataset("toy", samples, samples, classes), Partition(parts, parts, "by hand"))


def everything(data: Data, epochs: int) -> Plan:
    """A plan of one batch per pass that holds all samples in order."""
    return ((Batch(torch.arange(len(data.y)), None, None, None),),) * epochs


def only_model(algorithm: Any) -> str:
    """The only model that an algorithm trains; "" if it trains any."""
    return "linear" if traits(algorithm).head_only else traits(algorithm).trains


def rounds_of(
    algorithm: AnyAlgorithm,
    task: Task,
    federation: FederatedData,
    rounds: int,
    mapping: Mapping | None = None,
    seed: int = 0,
    batch: int = 32,
    **how: Any,
) -> tuple[State, list[Round]]:
    """The state after these rounds, and what they showed; unless `how` says otherwise, the last one is evaluated."""
    state = begin(algorithm, task, federation.clients)
    return state, list(
        simulate(
            Simulation(algorithm, task, federation, mapping or sequential(), seed, batch),
            state,
            rounds=rounds,
            **{"eval_every": rounds, **how},
        )
    )
