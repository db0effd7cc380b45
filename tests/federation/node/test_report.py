"""A node's owner learns, at the node alone, what the model gained, and what left the house."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl import stats
from copfl.engine.mapping import sequential
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.experiment.models.new_clients import alone_of
from copfl.federation.machines.app import init
from copfl.federation.node import audit_log, site_page
from copfl.federation.node.report import site_of
from copfl.rivals import file as rivals_file
from copfl.settings import federation as federation_settings
from copfl.settings.complete import complete
from copfl.settings.toml import Tables
from tests.commands import called
from tests.federation.network import CONFIG, digits, play, write_nodes
from tests.federation.node.test_same_run import federated, table_nodes, table_run

Nodes = list[dict[str, Any]]


def unheard(round: int) -> None:
    """Nobody follows the training."""


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scikit-learn computes an AUC in milliseconds."""
    monkeypatch.setattr(stats, "SAMPLE_DRAWS", 50)


def entry(kind: str, bytes: int, epsilon: float | None = None, run: str = "test") -> audit_log.AuditEntry:
    return audit_log.AuditEntry("sent", None, None, run, 1, "train", (kind,), bytes, epsilon, "")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tables, Nodes]:
    """A federation on tables that has ended; each client's best round counts, and not all rounds are evaluated."""
    folder = tmp_path_factory.mktemp("tables")
    run, nodes = table_run(folder), table_nodes(folder)
    run["run"] |= {"rounds": 5, "select": "best", "eval_every": 2}
    run["optimizer"] = {"name": "sgd", "lr": 1.0}
    run["addons"] = {"lr_schedule": "cosine", "lr_rounds": 5}
    federated(init(folder / "app", run), nodes)
    for line in (entry("update", 1000), entry("update", 1000, 0.5), entry("metrics", 10, run="other")):
        audit_log.append(Path(nodes[0]["state-dir"]), line)
    return run, nodes


@pytest.mark.job
def test_training_alone_is_that_of_the_simulation(tables: tuple[Tables, Nodes], tmp_path: Path) -> None:
    """Bit for bit: every metric and loss of every round."""
    run, nodes = tables
    here = {"run": {"engine": "sequential", "cache_features": "off", "local_baseline": True}}
    expected = copfl.run(complete(run, here), out=tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run/baseline/rounds.jsonl").read_text().splitlines()]
    assert expected.gains is not None
    for client, node in enumerate(nodes):
        site = site_of(Path(node["state-dir"]), None, baseline=True, tell=unheard)
        assert site.gain is not None, site.no_gain
        assert site.gain.alone == expected.gains.alone[client]
        assert site.gain.gain == expected.gains.gain[client]
        assert expected.gains.constant is not None
        assert site.gain.constant == expected.gains.constant[client]
        assert [bool(noted.metrics) for noted in site.alone] == [False, True, False, True, True]
        for noted, record in zip(site.alone, records, strict=True):
            simulated = {name: values[client] for name, values in record["per_client"].items()}
            assert noted.metrics == {name: simulated[name] for name in noted.metrics}
        kept = copfl.load(site.model.parent / "alone").description
        scores = {(score.metric, score.split): score.value for score in kept.scores}
        assert scores["auc", "test"] == expected.gains.alone[client]


def test_with_partial_participation(tmp_path: Path) -> None:
    """A client trains alone in the rounds in which the federation chose it."""
    config = CONFIG | {"algorithm.name": "fedper", "run.participation": 0.5, "network.min_replies": 2}
    config |= {"run.rounds": 4, "addons.lr_schedule": "linear", "addons.lr_rounds": 4}
    federation = digits()
    nodes = write_nodes(federation, tmp_path / "nodes")
    settings = play(config, nodes, tmp_path / "runs").transport.settings
    algorithm = alone_of(settings.algorithm, settings.run.addons)
    assert algorithm is not None
    state = begin(algorithm, settings.task, 3)
    simulation = Simulation(algorithm, settings.task, federation, sequential(), seed=0, batch=256)
    rounds = simulate(simulation, state, rounds=4, participation=0.5)
    last: dict[int, float] = {}
    for round in rounds:
        last |= dict(zip(round.ids.tolist(), round.clients["accuracy"].tolist(), strict=True))
    for client, node in enumerate(nodes):
        site = site_of(Path(node["state-dir"]), None, baseline=True, tell=unheard)
        assert site.gain is not None, site.no_gain
        assert np.float32(site.gain.alone) == np.float32(last[client])


def test_the_command_writes_a_page_and_prints_it(
    tables: tuple[Tables, Nodes], capsys: pytest.CaptureFixture[str]
) -> None:
    _, nodes = tables
    state = Path(nodes[0]["state-dir"])
    done = called(capsys, "report", state)
    assert done.code == 0, done.err
    origin = copfl.load(state).description.origin
    for words in (
        f"the model of round {origin.round} of 5, the best on this site's validation samples",
        "training alone (",
        "2 messages of this run left this site",
        "epsilon 0.5 in all answers together",
        "1 messages of other runs left",
        "no line changed or removed",
        f"copfl predict {state / 'test' / 'model'} --data FILE",
    ):
        assert words in " ".join(done.out.split()), words
    page = (state / "report.html").read_text("utf-8")
    assert "95 % interval over this site&#39;s test samples" in page
    assert (state / "report.html").stat().st_mode & 0o077 == 0
    again = called(capsys, "report", state)
    assert "training alone, round" not in again.err  # it was kept
    assert again.out == done.out


def test_commands_of_the_page_work(
    tables: tuple[Tables, Nodes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, nodes = tables
    site = site_of(Path(nodes[1]["state-dir"]), None, baseline=True, tell=unheard)
    (commands,) = next(s for s in site_page.document_of(site).sections if s.name == "use").tables
    for n, (_, command) in enumerate(commands.rows):
        words = [
            {"FILE": nodes[1]["test"], "FOLDER": tmp_path / "copy"}.get(w, w) for w in command.split()[1:]
        ]
        words = [tmp_path / f"{n}-{w}" if w == "answers.csv" else w for w in words]
        if "onnx" in words:  # tests/experiment/export/test_formats.py has it
            continue
        done = called(capsys, *words)
        assert done.code == 0, (command, done.err)


def test_what_is_not_known_is_said(tables: tuple[Tables, Nodes], tmp_path: Path) -> None:
    _, nodes = tables
    state = Path(nodes[2]["state-dir"])
    (state / "test/gain.json").unlink(missing_ok=True)  # of another test
    site = site_of(state, None, baseline=False, tell=unheard)
    assert site.gain is None
    text = site_page.text_of(site)
    assert "Whether the federation helped is not known: the model was not trained alone as well" in text
    assert "There is no audit log here" in text
    other = tmp_path / "other.csv"
    lines = Path(nodes[2]["data"]).read_text().splitlines()
    other.write_text("\n".join(lines[:-1]) + "\n")
    site = site_of(state, str(other), baseline=True, tell=unheard)
    assert "samples are not those that it trained on" in site.no_gain
    moved = site_of(state, str(tmp_path / "nowhere.csv"), baseline=True, tell=unheard)
    assert "no longer at" in moved.no_gain


def test_nothing_of_it_is_in_a_message(tables: tuple[Tables, Nodes]) -> None:
    """The report works on files of the node, which no answer reads."""
    _, nodes = tables
    files = {path.name for path in (Path(nodes[0]["state-dir"]) / "test").iterdir()}
    assert {"measured.jsonl", "settings.json"} <= files
    for name in ("measured.jsonl", "settings.json"):
        assert (Path(nodes[0]["state-dir"]) / "test" / name).stat().st_mode & 0o077 == 0


def test_the_rivals_of_a_node_are_those_of_its_rows_and_stay_there(
    tables: tuple[Tables, Nodes], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are trained by the report alone, from the node's rows, into a file that only its owner can read."""
    run, nodes = tables
    state = Path(nodes[1]["state-dir"])
    kept = state / "test" / rivals_file.FILE
    kept.unlink(missing_ok=True)  # of another test
    before = {path: path.read_bytes() for path in state.rglob("*.jsonl")}
    silent = site_of(state, None, baseline=False, tell=unheard, rivals=False)
    assert silent.rivals is None
    assert "not trained here; leave out --no-rivals" in " ".join(site_page.text_of(silent).split())
    assert not kept.exists()
    site = site_of(state, None, baseline=False, tell=unheard)
    expected = copfl.run(complete(run, {"run": {"engine": "sequential", "cache_features": "off"}})).rivals
    assert site.rivals is not None
    assert expected is not None
    for name, values in site.rivals.values.items():
        assert values.validated[0] == expected.values[name].validated[1]
        for metric, value in values.tested.items():
            np.testing.assert_equal(value[0], expected.values[name].tested[metric][1])
    assert site.rivals.chosen == expected.by_site[1]
    assert kept.stat().st_mode & 0o077 == 0
    assert {path: path.read_bytes() for path in state.rglob("*.jsonl")} == before  # nothing was sent
    text = site_page.text_of(site_of(state, None, baseline=False, tell=unheard))
    assert "They never leave this site" in " ".join(text.split())
    assert text == site_page.text_of(site)
    (state / "test" / rivals_file.FILE).write_text("{")
    assert called(capsys, "report", state).code == 2
    kept.unlink()


def test_no_setting_of_the_server_asks_for_rivals() -> None:
    """The owner of a node decides; run.rivals does not travel."""
    assert "rivals" not in federation_settings.RUN_KEYS
