"""Tasks other than classification over the network: the same weights and metrics as in the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.data.arrays import from_arrays
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets.datasets import load
from copfl.engine.mapping import sequential
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import UsageError
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from tests.federation.network import CONFIG, DirectTransport, farthest, play, write_nodes

NUMBERS = {
    **CONFIG,
    "run.rounds": 2,
    "algorithm.name": "fedavg",
    "samples.kind": "regression",
    "samples.shape": [10],
    "samples.mean": [],
    "samples.std": [],
    "samples.classes": 1,
    "samples.target_mean": 150,
    "samples.target_std": 75,
    "task.metrics": "rmse,mae",
}


def test_a_regression_has_the_metrics_of_the_simulation(tmp_path: Path) -> None:
    dataset = load("diabetes")
    federation = FederatedData(dataset, SCHEMES["iid"](dataset, 3, seed=1))
    played = play(NUMBERS, write_nodes(federation, tmp_path / "nodes"), tmp_path / "runs")
    settings = settings_of(NUMBERS)
    state = begin(settings.algorithm, settings.task, 3)
    rounds = list(
        simulate(
            Simulation(settings.algorithm, settings.task, federation, sequential(), batch=256, seed=0),
            state,
            rounds=2,
        )
    )
    assert farthest(played.server, state.server) < 1e-6
    for name in ("rmse", "mae_before", "rmse_global"):
        mean = float(np.mean(rounds[-1].clients[name]))
        assert played.records[-1]["mean"][name] == pytest.approx(mean, rel=1e-5)
    assert any("  RMSE " in line for line in played.log)

    new_client = write_nodes(federation, tmp_path / "new", named=False)[0]
    joining = settings_of(NUMBERS | {"session.join": 3})
    folder = ServerFolder(str(tmp_path / "runs"), "test", resume=True)
    server = new_server(joining, DirectTransport(joining, {1: new_client}), folder, pause=0)
    (result,) = server.personalise_new_clients()
    assert result["metric"] == "rmse"
    assert result["rmse_after"] < result["rmse_before"]


@pytest.mark.job
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize(
    "task", [{}, {"task.loss": "discrete_time", "task.cuts": [0.5, 1], "samples.classes": 2}]
)
def test_survival_has_the_models_and_metrics_of_the_simulation(
    task: dict[str, Any], starts: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4)).astype(np.float32)
    time, end = rng.exponential(np.exp(-x[:, 0])) + 0.01, rng.exponential(2, 90) + 0.01
    y = np.stack([np.minimum(time, end), time <= end], 1)
    y = np.column_stack([y, y[:, 0] / 2 * (rng.random(90) < 0.5)]) if starts else y
    dataset = from_arrays(x, y, kind="survival")
    federation = FederatedData(dataset, SCHEMES["iid"](dataset, 3, seed=1))
    config = {key: value for key, value in NUMBERS.items() if not key.startswith("samples.target")}
    config |= {
        "samples.kind": "survival",
        "samples.shape": [4],
        "task.metrics": "c_index",
        "run.batch": 8,
        **task,
    }
    played = play(config, write_nodes(federation, tmp_path / "nodes"), tmp_path / "runs")
    settings = settings_of(config)
    state = begin(settings.algorithm, settings.task, 3)
    simulation = Simulation(settings.algorithm, settings.task, federation, sequential(), batch=8, seed=0)
    *_, last = simulate(simulation, state, rounds=2)
    assert farthest(played.server, state.server) < 1e-6
    for name in ("c_index", "c_index_before", "c_index_global", "test_loss"):
        mean = float(np.nanmean(last.clients[name]))
        assert played.records[-1]["mean"][name] == pytest.approx(mean, rel=1e-5)
    bundle = copfl.load(tmp_path / "nodes" / "state-0")
    assert bundle.has_curve
    survival = bundle.predict_survival(x, [0.25, 0.5])
    assert ((survival[:, 1] <= survival[:, 0]) & (survival[:, 0] < 1)).all()


def test_the_outputs_are_those_of_the_objective_of_survival() -> None:
    config = {key: value for key, value in NUMBERS.items() if not key.startswith("samples.target")}
    config |= {"samples.kind": "survival", "task.metrics": "c_index", "samples.classes": 3}
    with pytest.raises(UsageError, match=r"samples\.classes.* must be 1"):
        settings_of(config)
    with pytest.raises(UsageError, match=r"samples\.classes.* must be 2"):
        settings_of(config | {"task.loss": "discrete_time", "task.cuts": [1, 2]})


KINDS: dict[str, dict[str, Any]] = {
    "classification": {"samples.classes": 3, "task.metrics": "accuracy,auc"},
    "multilabel": {"samples.classes": 3, "task.metrics": "macro_f1"},
    "regression": {"samples.classes": 2, "task.metrics": "rmse,mae"},
    "survival": {"samples.classes": 1, "task.metrics": "c_index"},
    "next_token": {
        "samples.classes": 256,
        "samples.text": True,
        "model.name": "causal_cnn",
        "task.metrics": "perplexity",
    },
}


def nodes_of(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Three nodes with samples whose targets are of this kind."""
    folder.mkdir()
    configs = []
    for client in range(3):
        x = np.random.default_rng(client).normal(size=(20, 10)).astype("float32")
        of_kind = {"classification": x[:, :3].argmax(1), "multilabel": x[:, :3] > 0}
        of_kind["survival"] = np.stack([np.exp(x[:, 0]), x[:, 1] > 0], 1)
        y = of_kind.get(kind, 3 * x[:, :2])
        np.savez(folder / f"{client}.npz", x=x, y=y, x_test=x, y_test=y)
        (folder / f"{client}.txt").write_text("\n".join(f"line {number}" for number in range(20)))
        data = folder / f"{client}.{'txt' if kind == 'next_token' else 'npz'}"
        configs.append({"client": client, "data": str(data), "state-dir": str(folder / f"state-{client}")})
    return configs


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_target_with_and_without_secure_aggregation(kind: str, tmp_path: Path) -> None:
    """The server has no samples: its example of an upload has targets of the right shape."""
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
    shared = {key: value for key, value in NUMBERS.items() if not key.startswith("samples.target")}
    config = shared | {"run.rounds": 1, "samples.kind": kind} | KINDS[kind]
    played = [
        play(
            config | {"secure.aggregation": secure}, nodes_of(kind, tmp_path / run), tmp_path / f"runs-{run}"
        )
        for run, secure in (("plain", False), ("secure", True))
    ]
    plain, secure = (one.records[-1]["mean"] for one in played)
    assert farthest(played[0].server, played[1].server) < 1e-4
    assert secure.keys() == plain.keys()
    for name in {*plain} - {"bytes_up", "bytes_down"}:
        assert secure[name] == pytest.approx(plain[name], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples.kind": "numbers"}, "kind"),
        ({"samples.target_std": []}, "target_mean.* and samples.target_std"),
        ({"task.metrics": "auc"}, "not defined for regression"),
        ({"run.new_clients": 0.3}, "join"),
    ],
)
def test_bad_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(NUMBERS | change)
