"""Frozen parameters, samples of several arrays and random numbers of a model: all engines agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.task import Task, task_of
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine.mapping import Mapping, sequential, vmap
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import UsageError
from tests.kinds import quick

SIZES = (7, 5, 9)


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Adapted(nn.Module):
    """A frozen body with an adapter, dropout in three forms, a frozen and a trained batch norm; dict samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.frozen_norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        self.drop = nn.Dropout(0.25)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)
        for module in (self.embedding, self.body, self.frozen_norm):
            module.requires_grad_(False)

    def forward(self, tokens: Tensor, numbers: Tensor) -> Output:
        x = self.embedding(tokens) + numbers[:, None]
        x = self.body(x) + self.up(self.drop(self.down(x)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.frozen_norm(x.mean(1))
        if self.training:
            x = x * torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.8)
        return Output(self.head(F.dropout(self.norm(x), 0.2, self.training)))


def federation() -> FederatedData:
    rng, count = np.random.default_rng(0), sum(SIZES)
    x: Any = {"tokens": rng.integers(0, 11, (count, 5)), "numbers": rng.normal(size=(count, 8))}
    samples = Samples(x, rng.integers(0, 4, count))
    cuts = tuple(np.split(np.arange(count), np.cumsum(SIZES)[:-1]))
    return FederatedData(
        Dataset("mixed", samples, samples, ("a", "b", "c", "d")), Partition(cuts, cuts, "by hand", {})
    )


def task() -> Task:
    torch.manual_seed(0)
    made = task_of(Adapted(), 4, dtype=torch.float64)
    return made.probed(tree.row(federation().train.rows([0]), 0))


def rounds(task: Task, mapping: Mapping, name: str) -> Tensor:
    algorithm = ALGORITHMS[name](**({"head_epochs": 2} if name == "fedrep" else {}))
    state = begin(algorithm, task, len(SIZES))
    shown = list(
        simulate(Simulation(algorithm, task, federation(), mapping, seed=3, batch=4), state, rounds=2)
    )
    assert all(one.clients["healthy"].all() for one in shown)
    parts = tree.leaves((state.server, state.clients.rows(torch.arange(len(SIZES)))))
    return torch.cat([t.double().flatten() for t in parts])


def test_the_vector_has_the_trained_entries_alone() -> None:
    made = task()
    assert not any(name.startswith(("embedding", "body", "frozen_norm")) for name in made.layout.names)
    assert {name for name in made.layout.names if "running" in name} == {
        "norm.running_mean",
        "norm.running_var",
    }
    assert made.random
    assert made.where("*.weight").sum() < made.d
    assert torch.equal(made.where("up", "down"), made.where("up.*", "down.w*"))


# Quick: masks, phases and a mixture, which call a model in three ways. COPFL_SLOW=1: also a mean and a pull.
@pytest.mark.job
@pytest.mark.parametrize(
    "name", quick(["copfl", "fedavg", "fedrep", "apfl", "ditto"], ("copfl", "fedrep", "apfl"))
)
def test_all_engines_are_equal_with_frozen_parts_and_dropout(name: str) -> None:
    made = task()
    batched = made.with_batching(data=tree.row(federation().train.rows([0]), 0))
    assert batched.batched is not None
    frozen = {n: p.clone() for n, p in made.module.named_parameters() if n not in made.layout.names}
    reference = rounds(made, sequential(), name)
    for one, mapping in ((made, vmap(3)), (batched, vmap(3)), (batched, vmap(2))):
        torch.testing.assert_close(rounds(one, mapping, name), reference, rtol=1e-9, atol=1e-9)
    for n, p in made.module.named_parameters():
        assert n in made.layout.names or torch.equal(p, frozen[n])


def test_dropout_matters_and_is_a_function_of_the_seed() -> None:
    made = task()
    plain = dataclasses.replace(made, random=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        without_key = rounds(plain, sequential(), "fedavg")
    first, second = (rounds(made, sequential(), "fedavg") for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.allclose(first, without_key)


def test_a_model_without_a_trained_parameter_is_refused() -> None:
    with pytest.raises(UsageError, match="no parameter to train"):
        task_of(Adapted().requires_grad_(False), 4)
