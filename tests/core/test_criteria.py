"""Losses: what they do not depend on has no gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from copfl.algorithms import FedAvg
from copfl.core.criteria import survival
from copfl.core.optim import Adam
from copfl.core.task import task_of
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import RISK, SURVIVAL, Dataset, Samples
from copfl.engine.mapping import sequential, vmap
from tests.toys import rounds_of


def risks(engine: Any, start: float) -> tuple[Tensor, Tensor]:
    """Of a linear model of survival after Adam's steps in single precision: its risks, and its intercept."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 3)).astype("float32")
    y = np.stack([rng.exponential(np.exp(-x[:, 0])), rng.random(40) < 0.7], 1).astype("float32")
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(start)
    task = task_of(model, 1, criterion=survival())
    parts = tuple(np.split(np.arange(40), 2))
    dataset = Dataset("toy", Samples(x, y), Samples(x, y), RISK, kind=SURVIVAL)
    federation = FederatedData(dataset, Partition(parts, parts, "by hand"))
    state, _ = rounds_of(FedAvg(Adam(lr=0.1)), task, federation, 8, engine, batch=7)
    w = state.server.w
    return task.forward(w, torch.from_numpy(x))[0], task.layout.split(w[: task.d])["bias"]


def test_what_no_loss_depends_on_does_not_move() -> None:
    """A constant cancels in Cox's likelihood; by rounding alone Adam moved it, in each engine elsewhere."""
    (one, bias), (other, same) = (risks(engine, 0.3) for engine in (sequential(), vmap(2)))
    assert bias.item() == same.item() == np.float32(0.3)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_the_gradient_of_relative_risks_sums_to_zero_exactly(count: int, seed: int, spread: float) -> None:
    random = torch.Generator().manual_seed(seed)
    outputs = (spread * torch.randn(count, 1, generator=random)).requires_grad_()
    seen = torch.rand(count, generator=random) < 0.6
    y = torch.stack([torch.rand(count, generator=random), seen.float()], 1)
    (grad,) = torch.autograd.grad(survival().losses(outputs, y).mean(), outputs)
    wide = outputs.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(survival().losses(wide, y.double()).mean(), wide)
    for _ in range(3):
        assert grad[torch.randperm(count, generator=random)].sum() == 0
    torch.testing.assert_close(grad.double(), exact, rtol=0, atol=2e-6 * float(exact.abs().sum()) + 1e-6)
