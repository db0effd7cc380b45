"""Where a torch lacks a private name that copfl uses, runs take the public way: slower, and not wrong."""

from __future__ import annotations

import importlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import copfl
from copfl.core.optim import Adam
from copfl.kernels import private_torch
from copfl.kernels.fused import LONG, over_rows
from tests.slow import some


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as if it had none of the private names."""
    monkeypatch.setattr(private_torch, "USABLE", False)


def test_this_torch_has_every_private_name() -> None:
    """Fails first when a release of torch moves one: copfl is then slower, and not broken."""
    for module, names in private_torch.NAMES.items():
        loaded = importlib.import_module(module)
        assert [name for name in names if not hasattr(loaded, name)] == [], module
    assert private_torch.USABLE


def test_the_gradient_is_the_same(public: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (a * a * b).sum(), b

    at = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    without = private_torch.gradient(function, *at)
    monkeypatch.setattr(private_torch, "USABLE", True)
    for one, other in zip(without[0], private_torch.gradient(function, *at)[0], strict=True):
        assert torch.equal(one, other)
    assert without[0][0].tolist() == [6.0, 16.0]  # 2 a b


def test_the_backward_pass_is_the_same(public: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> Any:
        a, unused = torch.tensor([1.0, 2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        return private_torch.backward([a * a], [torch.ones(2)], [a, unused])

    without = gradients()
    monkeypatch.setattr(private_torch, "USABLE", True)
    assert without[0].tolist() == gradients()[0].tolist() == [2.0, 4.0]
    assert without[1] is None


def test_functions_of_rows_are_the_same_inside_vmap_and_outside(public: None) -> None:
    @over_rows
    def doubled(rows: Tensor, factor: float) -> Tensor:
        return factor * rows

    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.func.vmap(lambda row: doubled(row, 2.0))(x), 2 * x)
    assert torch.equal(doubled(x[0], 2.0), 2 * x[0])


def test_a_long_step_of_adam_is_the_same_up_to_rounding(
    public: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    w, grad = (torch.randn(LONG + 1, generator=generator) for _ in range(2))
    optimizer = Adam(lr=0.01)
    without, _ = optimizer.step(w, grad, optimizer.init(w), None)
    monkeypatch.setattr(private_torch, "USABLE", True)
    torch.testing.assert_close(without, optimizer.step(w, grad, optimizer.init(w), None)[0])


@pytest.mark.job
@pytest.mark.parametrize(
    ("algorithm", "engine"),
    some(
        product(["copfl", "fedpac", "apfl", "scaffold"], ["vmap", "sequential"]),
        [
            ("copfl", "vmap"),
            ("copfl", "sequential"),
            ("fedpac", "vmap"),
            ("apfl", "vmap"),
            ("scaffold", "vmap"),
        ],
    ),
)
def test_a_run_is_the_same_up_to_rounding(
    algorithm: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(name: str) -> Any:
        options: dict[str, Any] = {"rounds": 2, "clients": 3, "engine": engine, "out": tmp_path / name}
        result = copfl.run(algorithm, "digits", local_baseline=False, **options)
        return [record["mean"]["test_loss"] for record in result.records]

    usual = losses("private")
    monkeypatch.setattr(private_torch, "USABLE", False)
    np.testing.assert_allclose(losses("public"), usual, rtol=1e-4)
