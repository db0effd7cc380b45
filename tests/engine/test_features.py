"""Features of a frozen front: found where they can be, equal to the whole model, and never wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import copfl
from copfl.core import tree
from copfl.core.front import MEMORY, front_of
from copfl.core.task import Data, task_of
from copfl.engine import features


class Network(nn.Module):
    """Convolutions, a batch norm, and a classifier of two layers with dropout between them."""

    def __init__(self, pool: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(4, 6, 2), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 10))
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.nn.functional.avg_pool2d(x, 1) * 2 if self.pool else x
        logits: Tensor = self.classifier(self.second(x).flatten(1))
        return logits


class Mixing(nn.Module):
    """Its frozen layer sees the mean of a batch, so that a sample has no features of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 4), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x.flatten(1))
        logits: Tensor = self.head(x - x.mean(0))
        return logits


def trained(model: nn.Module, *parts: str) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(parts))
    return model


def data() -> Data:
    x = torch.randint(0, 256, (9, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Data(x, torch.arange(9) % 10, torch.tensor(9))


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        (trained(Network(), "classifier.3"), "classifier.2"),  # the dropout is drawn in every step
        (trained(Network(), "classifier"), "classifier.0"),
        (trained(Network(), "second", "classifier"), "second.0"),
        (trained(Network(), "first.0"), None),  # nothing comes before it
        (trained(Network(), ""), None),
        (trained(Network(pool=True), "second", "classifier"), None),  # a step outside of its modules
        (trained(Network(pool=True), "classifier"), "classifier.0"),
        (trained(Mixing(), "head"), None),
    ],
)
def test_the_cut_is_before_the_first_trained_or_random_module(model: nn.Module, cut: str | None) -> None:
    task = task_of(model, 10)
    found = front_of(task.probed(data()), data())
    assert (found and found.cut) == cut


def test_no_random_numbers_are_in_the_front() -> None:
    model = Network()
    model.first.insert(2, nn.Dropout(0.1))
    found = front_of(task_of(trained(model, "classifier"), 10), data())
    assert found is not None
    assert found.cut == "first.2"
    model.first.insert(0, nn.Dropout(0.1))
    assert front_of(task_of(trained(model, "classifier"), 10), data()) is None


def run(folder: Path, cache: str, **settings: Any) -> copfl.Result:
    model = trained(Network(), "second", "classifier.3")
    usual: dict[str, Any] = {"rounds": 3, "clients": 5, "precision": "fp64", "model": model}
    return copfl.run("fedper", "digits", out=folder, cache_features=cache, **{**usual, **settings})


@pytest.mark.job
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_a_run_with_cached_features_equals_one_without(tmp_path: Path, engine: str) -> None:
    on, off = (run(tmp_path / cache, cache, engine=engine) for cache in ("on", "off"))
    for name in ("accuracy", "test_loss", "loss"):
        np.testing.assert_allclose(on.metric(name), off.metric(name), rtol=1e-9, atol=1e-9)
    ids = torch.arange(5)
    pairs = zip(*(tree.leaves(r.state.clients.rows(ids)) for r in (on, off)), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs)
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(on.model(1)(x), off.model(1)(x), rtol=1e-9, atol=1e-9)
    about = [json.loads((tmp_path / cache / "environment.json").read_text()) for cache in ("on", "off")]
    samples = len(on.experiment.federation.train.y) + len(on.experiment.federation.test.y)
    assert about[0]["cached_features"] == {"of": "second.0", "bytes": samples * 4 * 3 * 3 * 8}
    assert "cached_features" not in about[1]


@pytest.mark.job
def test_a_resumed_run_with_cached_features_is_equal_byte_for_byte(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "auto", rounds=4, checkpoint_every=2)
    run(tmp_path / "part", "auto", rounds=2, checkpoint_every=2)
    resumed = copfl.resume(tmp_path / "part", rounds=4, model=trained(Network(), "second", "classifier.3"))
    assert resumed.experiment.training.front is not None
    assert whole.experiment.settings.cache_features == "on"
    lines = [(tmp_path / name / "rounds.jsonl").read_bytes() for name in ("whole", "part")]
    assert lines[0] == lines[1]


def test_features_over_the_limit_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(trained(Network(), "classifier"), 10)
    federation = copfl.run("local", "digits", rounds=1, clients=2).experiment.federation
    assert features.training_of(task, federation, "auto").front is not None
    monkeypatch.setitem(MEMORY, "cpu", 1000)
    assert features.training_of(task, federation, "auto").front is None
    assert features.training_of(task, federation, "on").front is not None
    assert features.training_of(task, federation, "off").front is None
