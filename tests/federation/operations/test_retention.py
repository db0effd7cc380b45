"""What a server or a node forgets, and what stays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from copfl.errors import UsageError
from copfl.federation import init
from copfl.federation.operations.retention import clean
from copfl.federation.protocol.app_folder import DATABASE, FLOWER_HOME
from copfl.federation.server.folder import ServerFolder
from copfl.settings.flat import nested
from tests.commands import called
from tests.federation.network import CONFIG, digits, play, write_nodes

NOISED = CONFIG | {"algorithm.name": "fedavg", "privacy.noise": 8.0, "run.rounds": 1}


def make_old(path: Path, days: float) -> None:
    """Sets the times of all files in a folder back."""
    at = time.time() - days * 24 * 3600
    for part in (path, *path.rglob("*")):
        os.utime(part, (at, at))


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A server with six runs, one a day older than the next, and an app of each."""
    app = init(tmp_path / "app", nested(CONFIG))
    for n in range(6):
        folder = app / "runs" / f"run-{n}"
        (folder / "masks").mkdir(parents=True)
        (folder / "masks" / "0.copfl").write_bytes(bytes(10))
        (folder / "rounds.jsonl").write_text("{}\n")
        (app / FLOWER_HOME / "apps" / f"app-{n}").mkdir(parents=True)
        (app / "logs").mkdir(exist_ok=True)
        (app / "logs" / f"{n}.log").write_text("x")
        make_old(folder, 100 - n)
        make_old(app / FLOWER_HOME / "apps" / f"app-{n}", 100 - n)
        make_old(app / "logs" / f"{n}.log", 100 - n)
    (app / DATABASE).write_bytes(b"")
    return app


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_old_runs_apps_and_logs_are_removed(app: Path) -> None:
    rehearsed = clean(app, days=97.5, keep=1, is_rehearsal=True)
    assert len(names(app / "runs")) == 6
    removed = clean(app, days=97.5, keep=1)
    assert removed == rehearsed
    assert {entry.path for entry in removed} >= {"runs/run-0", "runs/run-1", "runs/run-2", "logs/0.log"}
    assert names(app / "runs") == ["run-3", "run-4", "run-5"]
    assert names(app / "logs") == ["3.log", "4.log", "5.log"]
    assert names(app / FLOWER_HOME / "apps") == ["app-3", "app-4", "app-5"]
    assert (app / DATABASE).exists()
    assert (app / "pyproject.toml").exists()
    assert clean(app, days=97.5, keep=1) == []


def test_the_last_runs_and_a_running_one_stay(app: Path) -> None:
    with ServerFolder(str(app / "runs"), "run-0", resume=True).claimed():
        make_old(app / "runs" / "run-0", 100)
        clean(app, days=1, keep=2)
        assert names(app / "runs") == ["run-0", "run-4", "run-5"]
        assert len(names(app / FLOWER_HOME / "apps")) == 6  # one may be that of the running one
    with pytest.raises(UsageError, match="keep=0"):
        clean(app, keep=0)


def test_a_node_forgets_its_models_and_not_what_it_gave_away(tmp_path: Path) -> None:
    pytest.importorskip(
        "dp_accounting", reason='dp-accounting is not installed: pip install "copfl[privacy]"'
    )
    nodes = write_nodes(digits(), tmp_path / "n")
    for run in ("first", "second"):
        play(NOISED | {"session.run": run}, nodes, tmp_path / "runs")
    state = Path(nodes[0]["state-dir"])
    make_old(state / "first", 100)
    before = {path: path.read_bytes() for path in (state / ".secure").rglob("*")}
    (removed,) = clean(state, keep=1)
    assert removed.path == "first"
    assert names(state / "first") == ["asked.json", "client.json", "noised.json"]
    assert {path: path.read_bytes() for path in (state / ".secure").rglob("*")} == before
    assert (state / "second" / "round-000000.copfl").exists()


def test_the_command(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = called(capsys, "federate", "clean", app, "--days", "97.5", "--keep", "1", "--dry-run")
    assert "would remove runs/run-0, 13 bytes" in done.out
    done = called(capsys, "federate", "clean", app, "--days", "97.5", "--keep", "1")
    assert (done.code, "removed runs/run-0, 13 bytes" in done.out) == (0, True)
    assert "nothing is older" in called(capsys, "federate", "clean", app, "--days", "200").out
    assert called(capsys, "federate", "clean", app / "runs").code == 2


def test_the_defaults_are_those_of_the_function(app: Path) -> None:
    from copfl.cli.upkeep import clean as command

    given: Any = command.__kwdefaults__
    assert {key: given[key] for key in ("days", "keep")} == {"days": 90.0, "keep": 5}
    assert clean.__kwdefaults__ == {"days": 90.0, "keep": 5, "is_rehearsal": False}
