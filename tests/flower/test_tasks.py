"""A regression over the network: the same weights and metrics as in the simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from copfl.data.datasets import load
from copfl.data.federation import Federation
from copfl.data.schemes import SCHEMES
from copfl.engine.mapping import sequential
from copfl.engine.simulate import begin, simulate
from copfl.errors import UsageError
from copfl.flower.server import Server
from copfl.flower.settings import settings_of
from copfl.flower.state import ServerFolder
from tests.flower.network import CONFIG, DirectTransport, farthest, play, write_nodes

NUMBERS = {
    **CONFIG,
    "rounds": 2,
    "algorithm": "fedavg",
    "kind": "regression",
    "shape": "10",
    "mean": "",
    "std": "",
    "classes": "1",
    "target-mean": 150,
    "target-std": 75,
    "task.metrics": "rmse,mae",
}


def test_a_regression_has_the_metrics_of_the_simulation(tmp_path: Path) -> None:
    dataset = load("diabetes")
    federation = Federation(dataset, SCHEMES["iid"](dataset, 3, seed=1))
    played = play(NUMBERS, write_nodes(federation, tmp_path / "nodes"), tmp_path / "runs")
    settings = settings_of(NUMBERS)
    state = begin(settings.algorithm, settings.task, 3)
    rounds = list(
        simulate(
            settings.algorithm, settings.task, federation, sequential(), state, rounds=2, batch=256, seed=0
        )
    )
    assert farthest(played.server, state.server) < 1e-6
    for name in ("rmse", "mae_before", "rmse_global"):
        mean = float(np.mean(rounds[-1].clients[name]))
        assert played.records[-1]["mean"][name] == pytest.approx(mean, rel=1e-5)
    assert any("  RMSE " in line for line in played.log)

    new_client = write_nodes(federation, tmp_path / "new", named=False)[0]
    joining = settings_of(NUMBERS | {"join": 3})
    folder = ServerFolder(str(tmp_path / "runs"), "test", resume=True)
    server = Server(joining, DirectTransport(joining, {1: new_client}), folder, pause=0)
    (result,) = server.personalise_new_clients()
    assert result["metric"] == "rmse"
    assert result["rmse_after"] < result["rmse_before"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "numbers"}, "kind"),
        ({"target-std": ""}, "target-mean and target-std"),
        ({"task.metrics": "auc"}, "not defined for regression"),
        ({"new-clients": 0.3}, "join"),
    ],
)
def test_bad_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(NUMBERS | change)
