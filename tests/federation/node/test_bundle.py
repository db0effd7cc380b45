"""A node has its client's model as a bundle: without the server, in another place, and with the measured metric."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.errors import RunError, UsageError
from copfl.federation.machines.app import init
from copfl.federation.machines.local import partition_nodes
from copfl.settings import toml
from copfl.settings.complete import complete
from copfl.settings.toml import Tables
from tests.commands import called
from tests.federation.network import CONFIG, Played, digits, play, write_nodes
from tests.federation.node.test_same_run import federated, table_nodes, table_run
from tests.models import tiny


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, list[dict[str, Any]]]:
    """A federation on tables; its server's folder is gone, and the nodes' folders have moved."""
    folder = tmp_path_factory.mktemp("tables")
    nodes = table_nodes(folder)
    app = init(folder / "app", table_run(folder))
    played = federated(app, nodes)
    shutil.rmtree(app)
    for node in nodes:
        moved = node["state-dir"].replace("state", "moved")
        shutil.move(node["state-dir"], moved)
        node["state-dir"] = moved
    return played, nodes


def test_the_commands_take_the_folder_of_a_node(
    tables: tuple[Played, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics of its test rows are those that the node reported in its last round, exactly."""
    played, nodes = tables
    for client, node in enumerate(nodes):
        done = called(capsys, "evaluate", node["state-dir"], "--data", node["test"], "--json")
        assert done.code == 0, done.err
        assert f"the model of client {client}, run test, round 2" in done.err
        found = json.loads(done.out)["metrics"]
        recorded = {name: values[client] for name, values in played.records[-1]["per_client"].items()}
        assert found["auc"] == recorded["auc"]
        assert np.float32(found["accuracy"]) == recorded["accuracy"]  # a mean in single precision
    done = called(capsys, "predict", nodes[1]["state-dir"], "--data", nodes[1]["test"])
    assert {line.split("\t")[1] for line in done.out.splitlines()} <= {"ill", "well"}
    done = called(capsys, "export", nodes[1]["state-dir"], "--out", tmp_path / "sent")
    assert done.code == 0, done.err
    rows = Path(nodes[1]["test"])
    bundles = [copfl.load(path) for path in (nodes[1]["state-dir"], tmp_path / "sent")]
    first, second = (bundle.outputs(bundle.read(rows).x) for bundle in bundles)
    assert np.array_equal(first, second)
    origin = bundles[0].description.origin
    assert (origin.client, origin.round, origin.rounds, origin.clients) == (1, 2, 2, 3)
    assert [score.value for score in bundles[0].description.scores][:2] == [
        played.records[-1]["per_client"][name][1] for name in ("auc", "accuracy")
    ]


def test_a_model_is_not_praised_for_its_own_rows(
    tables: tuple[Played, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a table that the node trained with, the measured metric is far too good."""
    _, (node, *_) = tables
    rows = len(Path(node["data"]).read_text().splitlines()) - 1
    for command in ("evaluate", "predict"):
        own = called(capsys, command, node["state-dir"], "--data", node["data"])
        assert f"{rows} rows are among those that this model was trained and tested with; on its " in own.err
        other = called(capsys, command, node["state-dir"], "--data", node["test"])
        assert other.code == 0
        assert "are among those" not in other.err
    model = shutil.copytree(Path(node["state-dir"]) / "test", tmp_path / "run")
    assert called(capsys, "evaluate", model, "--data", node["data"]).code == 0


def test_a_node_has_one_model_to_evaluate(
    tables: tuple[Played, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, (node, *_) = tables
    done = called(capsys, "evaluate", node["state-dir"], "--all")
    assert done.code == 2
    assert "is of a node, which has one: --data FILE" in done.err


def test_a_bundle_is_private_and_of_one_client(tables: tuple[Played, list[dict[str, Any]]]) -> None:
    _, nodes = tables
    folder = Path(nodes[0]["state-dir"]) / "test" / "model"
    assert folder.stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError, match="is of a node, which has the model of one client"):
        copfl.load(nodes[0]["state-dir"], client=1)


def test_texts_with_an_adapter_need_no_base_elsewhere(tmp_path: Path) -> None:
    texts = tiny.sentences()
    np.savez(tmp_path / "texts.npz", x=texts.train.x, y=np.array(tiny.CLASSES)[texts.train.y])
    base = tiny.base(tmp_path)
    run: Tables = {
        "data": {"name": str(tmp_path / "texts.npz")},
        "partition": {"name": "iid"},
        "model": {"name": f"hf:{base}"},
        "adapter": {"name": "lora:r=2,targets=query+value"},
        "algorithm": {"name": "fedper"},
        "run": {"rounds": 1, "clients": 2},
    }
    app = init(tmp_path / "app", run)
    nodes = partition_nodes(app, complete(toml.read_file(app / "run.toml")))
    played = federated(app, nodes)
    shutil.rmtree(base)
    bundle = copfl.load(nodes[0]["state-dir"])
    with np.load(nodes[0]["data"]) as arrays:
        found = bundle.evaluate(arrays["x_test"].tolist(), arrays["y_test"])
    assert np.float32(found.metrics["accuracy"]) == played.records[-1]["per_client"]["accuracy"][0]


@pytest.mark.job
@pytest.mark.parametrize("name", ["copfl", "apfl", "ditto"])
def test_the_bundle_has_the_model_that_was_measured(name: str, tmp_path: Path) -> None:
    """Also a mixture of models, and after a round without this node."""
    config = {key: value for key, value in CONFIG.items() if not key.startswith("optimizer")}
    config |= {"algorithm.name": name, "run.participation": 0.5, "network.min_replies": 2, "run.rounds": 4}
    nodes = write_nodes(digits(), tmp_path / "nodes")
    played = play(config, nodes, tmp_path / "runs")
    for client, node in enumerate(nodes):
        last = [record for record in played.records if client in record["clients"]][-1]
        bundle = copfl.load(node["state-dir"])
        assert bundle.description.origin.round == last["round"]
        with np.load(node["data"]) as arrays:
            found = bundle.evaluate(arrays["x_test"], arrays["y_test"])
        measured = last["per_client"]["accuracy"][last["clients"].index(client)]
        assert np.float32(found.metrics["accuracy"]) == measured


def test_a_node_can_do_without_bundles(tmp_path: Path) -> None:
    nodes = [node | {"bundle": False} for node in write_nodes(digits(), tmp_path / "nodes")]
    play(CONFIG | {"run.rounds": 1}, nodes, tmp_path / "runs")
    with pytest.raises(RunError, match="neither a bundle"):
        copfl.load(nodes[0]["state-dir"])
