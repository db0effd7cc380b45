from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.core.halves import HALF
from copfl.experiment.analysis import evidence
from copfl.stats import Numbers
from tests.experiment.analysis.test_benefit import balanced


def differences(rng: np.random.Generator, membership: Numbers, effects: Numbers) -> Numbers:
    return membership @ effects + 0.1 * rng.normal(size=membership.shape)


def test_only_who_helps_neither_the_others_nor_itself_is_left_out() -> None:
    rng = np.random.default_rng(0)
    membership, effects = balanced(rng, 40, 8), np.zeros((8, 8))  # [client, judge]
    effects[2], effects[5] = -0.3, -0.3
    np.fill_diagonal(effects, 1.0)
    assert not evidence.harmful(membership, differences(rng, membership, effects)).any()
    effects[5, 5] = -0.5
    found = evidence.harmful(membership, differences(rng, membership, effects))
    np.testing.assert_array_equal(np.flatnonzero(found), [5])
    effects[5, [0, 1, 2, 3, 4, 6, 7]] = 0.0  # as good for the others as the mean client
    effects[2] = 0.0
    assert not evidence.harmful(membership, differences(rng, membership, effects)).any()


def test_before_enough_rounds_nobody_is() -> None:
    rng = np.random.default_rng(0)
    membership, effects = balanced(rng, 7, 8), np.zeros((8, 8))
    effects[5] = -10
    assert not evidence.harmful(membership, differences(rng, membership, effects)).any()
    assert [rounds for rounds in range(1, 33) if evidence.looks(rounds, 8)] == [16, 24, 32]


COMMON: dict[str, Any] = {
    "clients": 6, "rounds": 26, "model": "mlp", "eval_every": 13, "benefit": True, "robust": {"name": "evidence"},
    "attack": {"name": "sign_flip", "fraction": 0.2, "strength": 1.0}, "engine": "vmap",
    "optimizer": "sgd", "lr": 0.1, "batch": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def reversed_updates(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return copfl.run("fedavg", "digits", out=tmp_path_factory.mktemp("evidence") / "run", **COMMON)


@pytest.mark.job
def test_a_client_with_reversed_updates_loses_its_weight(reversed_updates: Any) -> None:
    malicious = reversed_updates.metric("malicious")[0] > 0
    weight = reversed_updates.metric("weight")
    assert (weight[:12] > 0).all()
    np.testing.assert_array_equal(weight[-1] == 0, malicious)
    assert (reversed_updates.metric(HALF)[-1][malicious] == 0).all()
    assert (reversed_updates.metric(HALF)[-1][~malicious] != 0).all()


@pytest.mark.job
def test_a_resumed_run_and_another_engine_decide_alike(reversed_updates: Any, tmp_path: Path) -> None:
    copfl.run("fedavg", "digits", out=tmp_path / "run", **{**COMMON, "rounds": 13})
    copfl.resume(tmp_path / "run", rounds=26)
    lines = [(folder / "rounds.jsonl").read_text() for folder in (reversed_updates.folder, tmp_path / "run")]
    assert lines[0] == lines[1]
    other = copfl.run("fedavg", "digits", **{**COMMON, "engine": "sequential"})
    np.testing.assert_array_equal(other.metric("weight") == 0, reversed_updates.metric("weight") == 0)
