"""Boosted trees over a network, with plain and with secure sums: the simulation's trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from copfl.core import tree
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets.datasets import load
from copfl.engine.mapping import vmap
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import UsageError
from copfl.federation.protocol.settings import settings_of
from tests.federation.network import CONFIG, client_of, farthest, play, simulated, write_nodes

ROUNDS = 10  # three for the bins, six of three shared trees; in the last each site grows its own
CONFIGURED: dict[str, Any] = {
    key: value for key, value in CONFIG.items() if not key.startswith(("optimizer", "model"))
} | {
    "run.rounds": ROUNDS,
    "run.eval_every": ROUNDS,
    "algorithm.name": "trees",
    "algorithm.own": 2,
    "algorithm.own_rate": 0.5,
    "model.name": "trees",
    "model.trees": 5,
    "model.depth": 2,
    "samples.kind": "regression",
    "samples.shape": [10],
    "samples.mean": [],
    "samples.std": [],
    "samples.classes": 1,
    "samples.target_mean": 150,
    "samples.target_std": 75,
}


@pytest.fixture(scope="module")
def federation() -> FederatedData:
    dataset = load("diabetes")
    return FederatedData(dataset, SCHEMES["iid"](dataset, 3, seed=1))


@pytest.fixture(scope="module")
def expected(federation: FederatedData) -> Any:
    return simulated(settings_of(CONFIGURED), federation)


def test_a_federation_grows_the_trees_of_the_simulation(
    federation: FederatedData, expected: Any, tmp_path: Path
) -> None:
    nodes = write_nodes(federation, tmp_path / "nodes")
    played = play(CONFIGURED, nodes, tmp_path / "runs")
    assert played.server.grown.forest.value.abs().amax((1, 2)).min() > 0  # all three trees have grown
    assert farthest(played.server, expected.server) <= 1e-9
    rows = expected.clients.rows(torch.arange(3))
    assert rows.trees.value.any()  # a site keeps trees of its own
    for client, node in enumerate(nodes):
        record = client_of(settings_of(CONFIGURED), node, client, ROUNDS - 1)
        assert farthest(record, tree.row(rows, client)) <= 1e-9
    settings = settings_of(CONFIGURED)
    simulation = Simulation(settings.algorithm, settings.task, federation, vmap(3))
    shown = simulate(simulation, begin(settings.algorithm, settings.task, 3), rounds=ROUNDS)
    for record, round in zip(played.records, shown, strict=True):  # a head of a kilobyte is not counted
        for name in ("bytes_up", "bytes_down"):
            counted = round.clients[name].tolist()
            assert record["per_client"][name] == pytest.approx(counted, rel=0.01, abs=1100)


@pytest.mark.job
def test_secure_sums_give_the_same_trees(federation: FederatedData, expected: Any, tmp_path: Path) -> None:
    config = CONFIGURED | {"secure.aggregation": True, "session.run": "secure"}
    played = play(config, write_nodes(federation, tmp_path / "nodes"), tmp_path / "runs")
    secure, plain = played.server.grown.forest, expected.server.grown.forest
    assert torch.equal(secure.feature, plain.feature)
    step = settings_of(config).rules.step
    assert farthest(secure[1:], plain[1:]) <= 10 * step  # thresholds, and values in single precision


def test_a_network_is_refused() -> None:
    config = {key: value for key, value in CONFIGURED.items() if not key.startswith("model")}
    with pytest.raises(UsageError, match=r"model.name='mlp' has no trees"):
        settings_of(config | {"model.name": "mlp"})
