from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.audit import replay

FOLDER = Path(__file__).parents[2] / "studies" / "benefit"


@pytest.fixture
def subsets(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("subsets")
    for name, value in {"CLIENTS": 4, "ROUNDS": 2, "EVAL_EVERY": 1}.items():
        monkeypatch.setattr(module.study, name, value)
    return module


def test_the_federation_of_a_set_is_the_run_without_the_others(subsets: Any) -> None:
    job = subsets.study.Job("fedper, 4 classes", "reversed updates", 10, 0)
    made, _ = subsets.study.experiment(job, "cpu")
    losses = subsets.losses_of_sets(made)
    for missing, number in (([], 0b1111), ([2], 0b1011), ([0, 3], 0b0110)):
        run = replay.without(made, missing)
        for name, table in losses.items():
            np.testing.assert_allclose(table[number], run.metric(name)[-1], rtol=1e-5)


def test_values_to_the_others_of_an_additive_game(subsets: Any) -> None:
    worth = np.random.default_rng(0).normal(size=(4, 4))  # [client, judge]
    sets = [[client for client in range(4) if number >> client & 1] for number in range(16)]
    losses = np.stack([-worth[members].sum(0) for members in sets])
    expected = [np.delete(worth[client], client).mean() for client in range(4)]
    for values in subsets.to_the_others(losses).values():
        np.testing.assert_allclose(values, expected, rtol=1e-3)
