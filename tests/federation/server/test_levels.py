"""A linear model with levels over a network, with plain and with secure sums: the simulation's coefficients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from copfl.algorithms.levels import Server
from copfl.core import tree
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets.datasets import load
from copfl.errors import UsageError
from copfl.federation.protocol.settings import settings_of
from tests.federation.network import CONFIG, client_of, farthest, play, simulated, write_nodes

CONFIGURED: dict[str, Any] = {
    key: value for key, value in CONFIG.items() if not key.startswith(("optimizer", "model"))
} | {
    "run.rounds": 8,
    "run.eval_every": 8,
    "algorithm.name": "levels",
    "model.name": "linear",
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
    return FederatedData(dataset, SCHEMES["iid"](dataset, 3, seed=0))  # sites that differ a little


@pytest.fixture(scope="module")
def expected(federation: FederatedData) -> Any:
    return simulated(settings_of(CONFIGURED), federation)


def coefficients(server: Server) -> torch.Tensor:
    return torch.cat([server.coefficients.flatten(), server.scale, server.covariance.flatten()])


def test_a_federation_has_the_coefficients_of_the_simulation(
    federation: FederatedData, expected: Any, tmp_path: Path
) -> None:
    nodes = write_nodes(federation, tmp_path / "nodes")
    played = play(CONFIGURED, nodes, tmp_path / "runs")
    assert farthest(played.server, expected.server) <= 1e-9
    rows = expected.clients.rows(torch.arange(3))
    for client, node in enumerate(nodes):
        record = client_of(settings_of(CONFIGURED), node, client, 7)
        assert farthest(record, tree.row(rows, client)) <= 1e-9
    assert played.records[-1]["federation"]["coefficient_change"] < 1e-6


@pytest.mark.job
def test_secure_sums_give_the_same_coefficients(
    federation: FederatedData, expected: Any, tmp_path: Path
) -> None:
    config = CONFIGURED | {"secure.aggregation": True, "session.run": "secure"}
    played = play(config, write_nodes(federation, tmp_path / "nodes"), tmp_path / "runs")
    step = settings_of(config).rules.step  # of an entry of sums of about a hundred rows
    assert farthest(coefficients(played.server), coefficients(expected.server)) <= 10 * step


def test_a_network_with_hidden_layers_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model.name='mlp' has layers before its last"):
        settings_of(CONFIGURED | {"model.name": "mlp"})
