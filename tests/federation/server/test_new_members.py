"""Sites that were not at the start: a new client with a table or texts, and one that evaluates the global model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.federation.machines.app import init
from copfl.federation.node import site_page
from copfl.federation.node.report import site_of
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from copfl.settings.flat import flattened, nested
from tests.commands import called
from tests.federation.network import DirectTransport
from tests.federation.node.test_same_run import (
    COLUMNS,
    HOSPITALS,
    federated,
    table_nodes,
    table_run,
    visits,
    write_csv,
)


def join(app: Path, node: dict[str, Any]) -> dict[str, Any]:
    """What a new client reports, without processes."""
    config = flattened(nested(read_app(app)["config"])) | {"session.run": "test", "session.join": 3}
    settings, folder = settings_of(config), ServerFolder(str(app / "runs"), "test", resume=True)
    (result,) = new_server(
        settings, DirectTransport(settings, {1: node}), folder, pause=0
    ).personalise_new_clients()
    return result


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The app of a federation on tables that has ended, with the files that its server writes."""
    folder = tmp_path_factory.mktemp("tables")
    run = table_run(folder)
    run["algorithm"] = {"name": "fedavg"}
    run["optimizer"] = {"name": "sgd", "lr": 0.3}
    app = init(folder / "app", run)
    federated(app, table_nodes(folder))
    config = flattened(nested(read_app(app)["config"])) | {"session.run": "test", "flower-run": 1}
    (app / "runs/test/config.json").write_text(json.dumps(config))
    return app


@pytest.mark.job
def test_a_new_client_with_a_table(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its columns become numbers as the federation agreed; a category that it does not have is named."""
    rows = [(*row[:2], "eye" if n % 4 == 0 else row[2], *row[3:]) for n, row in enumerate(visits(60, 5))]
    train = write_csv(tmp_path / "east.csv", rows, tuple(reversed(COLUMNS)))
    node = {"data": str(train), "test": str(write_csv(tmp_path / "test.csv", visits(30, 6)))}
    result = join(tables, node | {"state-dir": str(tmp_path / "state")})
    assert result["auc_after"] > 0.5, result
    bundle = copfl.load(tmp_path / "state")
    note = bundle.description.origin.note
    assert 'column "ward": 15 of 60 values are categories that the federation does not have' in note
    done = called(capsys, "evaluate", tmp_path / "state", "--data", node["test"], "--json")
    assert json.loads(done.out)["metrics"]["auc"] == result["auc_after"]
    assert "the model of a new client, run test, round 2" in done.err
    site = site_of(tmp_path / "state", None, baseline=True, tell=lambda round: None)
    text = " ".join(site_page.text_of(site).split())
    assert "this node joined after the training, and took part in no round" in text
    assert "15 of 60 values are categories" in text


@pytest.mark.job
def test_a_new_client_with_texts(tmp_path: Path) -> None:
    def written(name: str, count: int) -> str:
        lines = [
            f"word{n % 5} of {n % 3},{('no', 'yes')[n % 5 > 2]},{HOSPITALS[n % 3]}" for n in range(count)
        ]
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(["line,answer,site", *lines]) + "\n")
        return str(path)

    everything = written("all", 60)
    data = {"name": everything, "text": "line", "target": "answer", "client": "site", "test": everything}
    app = init(tmp_path / "app", {"data": data, "run": {"rounds": 1}})
    nodes = [
        {"client": n, "data": everything, "test": everything, "state-dir": str(tmp_path / name)}
        for n, name in enumerate(HOSPITALS)
    ]
    federated(app, nodes)
    new = {"data": written("new", 30), "test": everything, "state-dir": str(tmp_path / "new")}
    result = join(app, new)
    assert result["accuracy_after"] >= result["accuracy_before"]
    assert copfl.load(tmp_path / "new").predict(["word1 of 2"]).tolist()[0] in ("no", "yes")


def test_a_site_that_does_not_train_evaluates_the_global_model(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator exports it, the site needs the bundle alone; its metrics are those of a federation's node."""
    shared = tmp_path / "shared"
    done = called(capsys, "export", tables, "--global", "--out", shared)
    assert done.code == 0, done.err
    origin = copfl.load(shared).description.origin
    assert (origin.stage, origin.round, origin.client) == ("global", 2, None)
    rows = write_csv(tmp_path / "elsewhere.csv", visits(30, 6), tuple(reversed(COLUMNS)))
    found = called(capsys, "evaluate", shared, "--data", rows, "--json")
    assert found.code == 0, found.err
    node = {"data": str(rows), "test": str(rows), "state-dir": str(tmp_path / "state")}
    assert json.loads(found.out)["metrics"]["auc"] == join(tables, node)["auc_before"]
    same = called(capsys, "evaluate", tables, "--global", "--data", rows, "--json")
    assert same.out == found.out


def test_a_server_has_no_model_of_a_client(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = called(capsys, "export", tables, "--client", "0", "--out", "x")
    assert done.code == 2
    assert "is of a server, which has the global model alone" in done.err


def test_the_global_model_of_images(tmp_path: Path) -> None:
    from copfl.federation.machines.local import partition_nodes
    from copfl.federation.server.bundle import write_global
    from copfl.settings import toml
    from copfl.settings.complete import complete

    app = init(
        tmp_path / "app",
        {
            "model": {"name": "mlp", "width": 8},
            "run": {"rounds": 1, "clients": 2},
            "algorithm": {"name": "fedavg"},
        },
    )
    nodes = partition_nodes(app, complete(toml.read_file(app / "run.toml")))
    federated(app, nodes)
    config = flattened(nested(read_app(app)["config"])) | {"session.run": "test"}
    (app / "runs/test/config.json").write_text(json.dumps(config))
    bundle = copfl.load(write_global(app))
    with np.load(nodes[0]["data"]) as arrays:
        found = bundle.evaluate(arrays["x_test"], arrays["y_test"])
    assert found.samples == len(np.load(nodes[0]["data"])["y_test"])
    assert bundle.description.output.classes == list(range(10))
