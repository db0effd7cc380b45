"""A node keeps the best round by its own validation samples: the round, the model and the scores of the simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.experiment.bundle.bundle import Bundle
from copfl.federation.machines.app import RUN_FILE, init
from copfl.federation.machines.local import partition_nodes
from copfl.federation.node import measured_rounds
from copfl.federation.node.bundle import kept_score
from copfl.federation.policy.record import Policy
from copfl.federation.policy.request import refusals
from copfl.measures.metrics import METRICS
from copfl.settings import toml
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.toml import Tables
from tests.commands import called
from tests.federation.network import CONFIG, Played, digits, play, write_nodes
from tests.federation.node.test_same_run import federated, table_nodes, table_run

BEST: Tables = {
    "model": {"name": "mlp", "width": 8},
    "algorithm": {"name": "fedavg"},
    "optimizer": {"name": "sgd", "lr": 1.0},  # the metrics rise and fall
    "run": {"rounds": 5, "clients": 3, "batch": 16, "select": "best", "eval_every": 2},
}


def simulated(run: Tables) -> copfl.Result:
    """The run as `copfl run` trains it, one client after the other."""
    here = {"run": {"engine": "sequential", "cache_features": "off"}}
    return copfl.run(complete(run, here))


def assert_same_models(nodes: list[dict[str, Any]], expected: copfl.Result) -> list[Bundle]:
    bundles = [copfl.load(node["state-dir"]) for node in nodes]
    for client, bundle in enumerate(bundles):
        origin, name = bundle.description.origin, expected.primary.name
        assert origin.round == expected.rounds_taken[client]
        model: Any = expected.client_model(client)
        assert np.array_equal(bundle.model.numpy(), model.numpy())  # type: ignore[union-attr]
        scores = {s.split: s.value for s in bundle.description.scores if s.metric == name}
        assert scores["test"] == expected.final(name)[client]
        if "validation" in scores:
            assert scores["validation"] == expected.final(f"{name}_validation")[client]
        if expected.probabilities is not None:
            of_site, simulated = bundle.description, expected.probabilities
            assert of_site.output.temperature == pytest.approx(simulated.temperature[client], rel=1e-4)
            losses = [s.value for s in of_site.scores if s.metric == "log_loss"]
            assert losses == pytest.approx([simulated.log_loss[client]], rel=1e-4)
    return bundles


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, list[dict[str, Any]], copfl.Result]:
    folder = tmp_path_factory.mktemp("images")
    app = init(folder / "app", BEST)
    nodes = partition_nodes(app, complete(toml.read_file(app / RUN_FILE)))
    return federated(app, nodes), nodes, simulated(BEST)


def test_the_best_round_is_that_of_the_simulation(
    images: tuple[Played, list[dict[str, Any]], copfl.Result], capsys: pytest.CaptureFixture[str]
) -> None:
    _, nodes, expected = images
    assert len(set(expected.rounds_taken.tolist())) > 1  # else the last round would do
    bundles = assert_same_models(nodes, expected)
    assert {bundle.description.origin.select for bundle in bundles} == {"best"}
    for client, node in enumerate(nodes):
        done = called(capsys, "evaluate", node["state-dir"], "--data", node["data"], "--json")
        taken = expected.rounds_taken[client]
        assert f"client {client}, run test, round {taken}, the best on its validation samples" in done.err
        card = (Path(node["state-dir"]) / "test" / "model" / "README.md").read_text()
        assert f"round {taken} of 5, the best on the client's validation samples" in card


def test_only_the_rounds_of_eval_every_and_the_last_are_evaluated(
    images: tuple[Played, list[dict[str, Any]], copfl.Result],
) -> None:
    played, nodes, expected = images
    measured = [record["round"] for record in played.records if "accuracy" in record["per_client"]]
    assert measured == [2, 4, 5]
    for record, simulated_round in zip(played.records, expected.records, strict=True):
        for name in ("accuracy", "accuracy_before", "loss"):
            assert record["per_client"].get(name) == simulated_round["per_client"].get(name)
    noted = measured_rounds.read(Path(nodes[0]["state-dir"]) / "test")
    assert [line.round for line in noted] == [1, 2, 3, 4, 5]
    assert [line.round for line in noted if line.metrics] == [2, 4, 5]


def test_what_validation_samples_give_stays_at_the_node(
    images: tuple[Played, list[dict[str, Any]], copfl.Result],
) -> None:
    played, nodes, _ = images
    sent = [packet.head for packet in played.transport.received] + list(map(json.dumps, played.records))
    assert not any("validation" in text for text in sent)
    assert "accuracy_validation" in measured_rounds.read(Path(nodes[0]["state-dir"]) / "test")[-1].metrics


@pytest.mark.job
def test_tables_choose_the_rounds_of_the_simulation(tmp_path: Path) -> None:
    run, nodes = table_run(tmp_path), table_nodes(tmp_path)
    run["run"] |= {"rounds": 4, "select": "best", "validation": 0.3}
    run["optimizer"] = {"name": "sgd", "lr": 3.0}
    federated(init(tmp_path / "app", run), nodes)
    assert_same_models(nodes, simulated(run))


def test_secure_sums_have_the_metrics_of_evaluated_rounds_alone(tmp_path: Path) -> None:
    config = CONFIG | {"algorithm.name": "fedper", "secure.aggregation": True, "run.eval_every": 2}
    nodes = write_nodes(digits(), tmp_path / "nodes")
    played = play(config, nodes, tmp_path / "runs")
    assert ["accuracy" in record["mean"] for record in played.records] == [False, True, True]
    assert all("loss" in record["mean"] for record in played.records)


def test_a_repeated_round_changes_nothing(tmp_path: Path) -> None:
    """A server that lost its last rounds asks for them again."""
    config = CONFIG | {"algorithm.name": "fedper", "run.select": "best", "optimizer.lr": 0.1}
    nodes = write_nodes(digits(), tmp_path / "nodes")
    play(config, nodes, tmp_path / "runs")
    folder = Path(nodes[0]["state-dir"]) / "test"
    before = [(folder / name).read_bytes() for name in ("measured.jsonl", "model/bundle.json")]
    score = kept_score(folder, METRICS["accuracy"])
    play(config | {"session.rollback": True}, nodes, tmp_path / "other")
    assert [(folder / name).read_bytes() for name in ("measured.jsonl", "model/bundle.json")] == before
    assert kept_score(folder, METRICS["accuracy"]) == score


def test_patience_needs_what_nodes_do_not_send(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"run\.patience=3 ends a simulation by the validation scores"):
        init(tmp_path / "app", {"run": {"select": "best", "patience": 3}})


def test_a_node_does_not_let_a_server_choose_a_few_of_its_samples() -> None:
    """An upload that was trained on two samples would reveal them."""
    refused = refusals(Policy(), CONFIG | {"run.validation": 0.99})
    assert "run.validation" in str(refused[0])
    assert "0 to 0.5" in str(refused[0])
