"""The federation of a run.toml ends where the simulation of the same run.toml does, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import copfl
from copfl.core import tree
from copfl.engine.mapping import sequential
from copfl.engine.rounds import Round, State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.experiment.experiment import Experiment
from copfl.experiment.preparation import prepare
from copfl.federation.machines.app import RUN_FILE, init, planned
from copfl.federation.machines.local import follow, partition_nodes
from copfl.federation.machines.local_federation import LocalFederation
from copfl.federation.policy import own_code
from copfl.federation.policy.file import FILE, read_policy
from copfl.federation.policy.record import Policy
from copfl.federation.policy.request import admitted, refusals
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.settings import prepared, settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.settings import toml
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.flat import flattened, nested
from copfl.settings.toml import Tables
from tests.federation.network import Played, client_of, play, server_of
from tests.models import tiny
from tests.slow import slow

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')


class Simulated(NamedTuple):
    experiment: Experiment
    state: State
    rounds: list[Round]


def simulated(run: Tables) -> Simulated:
    """The run, one client after the other, as nodes compute them."""
    made = prepare(complete(run, {"run": {"engine": "sequential", "cache_features": "off"}}))
    settings = made.run.run
    state = begin(made.algorithm, made.task, settings.clients)
    rounds = simulate(
        Simulation(
            made.algorithm, made.task, made.federation, sequential(), seed=settings.seed, batch=settings.batch
        ),
        state,
        rounds=settings.rounds,
        participation=settings.participation,
    )
    return Simulated(made, state, list(rounds))


def federated(app: Path, nodes: list[dict[str, Any]]) -> Played:
    """The rounds of an app."""
    config = flattened(nested(read_app(app)["config"])) | {"session.run": "test"}
    return play(config | {"network.min_replies": len(nodes)}, nodes, app / "runs")


def assert_same(played: Played, expected: Simulated, nodes: list[dict[str, Any]]) -> None:
    """The server's record, every client's and every metric are equal."""
    settings = played.transport.settings
    pairs = [(played.server, expected.state.server)]
    for client, node in enumerate(nodes):
        record = client_of(settings, node, client, settings.federation.rounds - 1)
        pairs.append((record, tree.row(expected.state.clients.rows(torch.arange(len(nodes))), client)))
    for ours, theirs in pairs:
        for a, b in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
            assert torch.equal(a, b)
    for record, round in zip(played.records, expected.rounds, strict=True):
        names = tuple(m.name for m in settings.task.metrics)
        # What validation samples give stays at the node.
        compared = {name for name in round.clients if name.startswith(names) and "validation" not in name}
        assert len(compared) >= 3
        for name in compared:
            assert record["per_client"][name] == np.asarray(round.clients[name]).tolist(), name


def test_an_image_set(tmp_path: Path) -> None:
    run: Tables = {"model": {"name": "mlp"}, "run": {"rounds": 2, "clients": 3}, "server": {"name": "adam"}}
    app = init(tmp_path / "app", run)
    nodes = partition_nodes(app, complete(toml.read_file(app / RUN_FILE)))
    assert_same(federated(app, nodes), simulated(run), nodes)


@pytest.mark.job
def test_texts_with_an_adapter(tmp_path: Path) -> None:
    texts = tiny.sentences()
    np.savez(tmp_path / "texts.npz", x=texts.train.x, y=np.array(tiny.CLASSES)[texts.train.y])
    run: Tables = {
        "data": {"name": str(tmp_path / "texts.npz")},
        "partition": {"name": "iid"},
        "model": {"name": f"hf:{tiny.base(tmp_path)}"},
        "adapter": {"name": "lora:r=2,targets=query+value"},
        "algorithm": {"name": "fedper"},
        "task": {"metrics": ["accuracy", "auc"]},
        "run": {"rounds": 2, "clients": 2},
    }
    app = init(tmp_path / "app", run)
    nodes = partition_nodes(app, complete(toml.read_file(app / RUN_FILE)))
    assert_same(federated(app, nodes), simulated(run), nodes)


@pytest.mark.job
def test_a_table_of_texts_at_each_node(tmp_path: Path) -> None:
    rows = [(f"word{n % 5} of {n % 3}", ("no", "yes")[n % 2], HOSPITALS[n % 3]) for n in range(60)]

    def written(name: str, rows: list[tuple[str, str, str]]) -> str:
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(["line,answer,site", *map(",".join, rows)]) + "\n")
        return str(path)

    run: Tables = {
        "data": {"name": written("all", rows), "text": "line", "target": "answer", "client": "site"},
        "run": {"rounds": 1},
    }
    run["data"]["test"] = run["data"]["name"]
    app = init(tmp_path / "app", run)
    nodes = []
    for client, name in enumerate(HOSPITALS):
        path = written(name, [row for row in rows if row[2] == name])
        nodes.append({"client": client, "data": path, "test": path, "state-dir": str(tmp_path / name)})
    assert_same(federated(app, nodes), simulated(run), nodes)


@slow
def test_real_processes_on_the_tables_of_three_sites(tmp_path: Path) -> None:
    run, nodes = table_run(tmp_path), table_nodes(tmp_path)
    app = init(
        tmp_path / "app", run, {"network": {"min_replies": 3, "deadline": 240}, "session": {"run": "test"}}
    )
    with LocalFederation(app) as local:
        local.start_superlink()
        for client, node in enumerate(nodes):
            local.add_node(f"node-{client}", node)
        process = local.start_run({})
        folder = ServerFolder(str(app / "runs"), "test", resume=True)
        records = list(follow(local, process, folder, 2))
    expected = simulated(run)
    settings = settings_of(read_app(app)["config"])
    server = server_of(settings, app / "runs")
    for ours, theirs in zip(tree.leaves(server), tree.leaves(expected.state.server), strict=True):
        assert torch.equal(ours, theirs)
    assert records[-1]["per_client"]["auc"] == np.asarray(expected.rounds[-1].clients["auc"]).tolist()
    shutil.rmtree(app)  # and the server has ended
    for node, recorded in zip(nodes, records[-1]["per_client"]["auc"], strict=True):
        bundle = copfl.load(shutil.move(node["state-dir"], tmp_path / f"moved-{node['client']}"))
        x, y, *_ = bundle.read(Path(node["test"]))
        assert y is not None
        targets = bundle.preparation.targets(y)
        assert bundle.measured(bundle.outputs(x), targets).metrics["auc"] == recorded


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"attack": {"name": "sign_flip"}}, "attack.name='sign_flip' is simulated"),
        ({"run": {"new_clients": 0.2}}, "run.new_clients=0.2 is for the simulation"),
        ({"run": {"precision": "bf16"}}, "run.precision='bf16' must be fp32"),
        ({"algorithm": {"name": "no"}}, "algorithm.name='no' is unknown"),
        ({"networks": {"wire": "fp16"}}, "networks=.* is no setting"),
    ],
)
def test_what_a_federation_does_not_have_is_refused(change: Tables, error: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=error):
        init(tmp_path / "app", change)
    assert not (tmp_path / "app").exists()


def test_an_algorithm_of_the_owner_is_allowed_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init` enters it in the policy of the server; a node's owner enters it there."""
    content = "from copfl.algorithms.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    pass\n"
    (tmp_path / "ward_algorithm.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    settings = {"algorithm": {"name": "ward_algorithm:Mine"}, "model": {"name": "mlp"}}
    app = init(tmp_path / "app", settings, code="ward_algorithm")
    config, allowed = read_app(app)["config"], read_policy(app / FILE)
    assert "code" not in config["algorithm"]
    assert [refusal.line for refusal in refusals(Policy(), config)] == ["code"]
    run_config, code = admitted(allowed, config)
    assert [entry.reference for entry in code] == ["ward_algorithm:Mine"]
    assert run_config["algorithm.code"] == str(tmp_path)
    own_code.load(code)  # as the server and a node do
    assert settings_of(run_config).run.algorithm.name == "ward_algorithm:Mine"


COLUMNS = ("age", "pressure", "ward", "outcome", "hospital", "note")
HOSPITALS = ("north", "south", "west")


def visits(rows: int, seed: int) -> list[tuple[object, ...]]:
    """Rows of a table whose hospitals have other wards each."""
    draw = np.random.default_rng(seed)
    made: list[tuple[object, ...]] = []
    for n in range(rows):
        age, pressure, place = draw.integers(20, 90), round(float(draw.normal(130, 20)), 1), n % 3
        ward = ("heart", "lung", "skin", "bone")[int(draw.integers(place, place + 2))]
        outcome = "ill" if age + pressure + 20 * (ward == "heart") > 190 else "well"
        made.append((age, pressure, ward, outcome, HOSPITALS[place], f"x{n}"))
    return made


def write_csv(path: Path, rows: list[tuple[object, ...]], columns: tuple[str, ...] = COLUMNS) -> Path:
    order = [COLUMNS.index(name) for name in columns]
    lines = [columns, *([row[n] for n in order] for row in rows)]
    path.write_text("\n".join(",".join(map(str, line)) for line in lines) + "\n")
    return path


def table_run(folder: Path) -> Tables:
    """A run on the tables of all hospitals."""
    train, test = write_csv(folder / "all.csv", visits(90, 0)), write_csv(folder / "test.csv", visits(30, 1))
    return {
        "data": {
            "name": str(train),
            "target": "outcome",
            "client": "hospital",
            "test": str(test),
            "drop": "note",
        },
        "algorithm": {"name": "fedper"},
        "task": {"metrics": ["auc", "accuracy"]},
        "run": {"rounds": 2, "batch": 16},
    }


def table_nodes(folder: Path) -> list[dict[str, Any]]:
    """A node for each hospital: its own tables, with the columns in another order, and one more."""
    configs = []
    for client, name in enumerate(HOSPITALS):
        parts = {
            kind: write_csv(
                folder / f"{name}-{kind}.csv",
                [row for row in rows if row[4] == name],
                COLUMNS if client else tuple(reversed(COLUMNS)),
            )
            for kind, rows in (("train", visits(90, 0)), ("test", visits(30, 1)))
        }
        own = {"client": client, "state-dir": str(folder / f"state-{client}")}
        configs.append({**own, "data": str(parts["train"]), "test": str(parts["test"])})
    return configs


def test_a_table_of_each_site(tmp_path: Path) -> None:
    """No site has all categories, and each its own mean: the encoders of the federation are the same at all."""
    run, nodes = table_run(tmp_path), table_nodes(tmp_path)
    app = init(tmp_path / "app", run)
    expected = simulated(run)
    assert expected.experiment.federation.shape == (6,)  # two numbers, four wards
    assert_same(federated(app, nodes), expected, nodes)


def test_a_table_of_each_site_with_validation_rows(tmp_path: Path) -> None:
    """The encoders of the app are of the rows that the simulation trains on, and so are those of its parts."""
    run = table_run(tmp_path)
    run["run"] |= {"validation": 0.2, "rounds": 1}
    app, expected = init(tmp_path / "app", run), simulated(run)
    assert_same(federated(app, table_nodes(tmp_path)), expected, table_nodes(tmp_path))
    parts = init(tmp_path / "parts", run)
    nodes = partition_nodes(parts, complete(toml.read_file(parts / RUN_FILE)))
    assert_same(federated(parts, nodes), expected, nodes)
    train = expected.experiment.federation.train.x
    assert abs(float(train[:, 0].mean())) < 1e-6  # standardised by themselves
    regression: Tables = {"data": {"name": "diabetes"}, "run": {"clients": 3, "validation": 0.2, "rounds": 1}}
    federation = prepare(complete(regression)).federation
    values = federation.dataset.train.y[np.concatenate(federation.partition.train)]
    assert federation.dataset.target_scale[0][0] == pytest.approx(float(values.mean()))
    assert planned(regression).samples.target_mean == federation.dataset.target_scale[0]


@pytest.mark.parametrize("data", ["digits", "wine"])
@pytest.mark.parametrize("preset", ["", "paper", "plus"])
def test_a_federation_has_the_settings_of_the_run(data: str, preset: str) -> None:
    line: Tables = {"data": {"name": data}}
    of_table: Tables = {"algorithm": {"name": "levels"}} if data == "wine" and not preset else {}
    assert planned(line, preset=preset).run == complete(of_table, line, preset=preset)


def test_secure_sums_are_of_an_algorithm_that_needs_no_single_uploads() -> None:
    """Where none is named; a named one has the options that hide single uploads."""
    secure: Tables = {"secure": {"aggregation": True}}
    assert complete({}).algorithm.name == "fedpac"
    assert prepared(planned(secure)).run.algorithm.name == "fedper"
    named = planned(secure, {"algorithm": {"name": "copfl"}})
    assert prepared(named).run.algorithm.options["merge"] == "common"
