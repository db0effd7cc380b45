"""`copfl federate server` and `run`, without starting Flower."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.errors import RunError, UsageError
from copfl.flower import deployed, init
from copfl.flower.deployed import serve, start_run
from tests.flower.network import CONFIG, digits, play, write_nodes


class Flwr:
    """`flwr run`: the run is that of `network`."""

    def __init__(self, folder: Path, nodes: list[dict[str, Any]], rounds: int) -> None:
        self.folder, self.nodes, self.rounds = folder, nodes, rounds
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.commands.append(command)
        given = dict(word.split("=", 1) for word in command[-1].split())
        config = CONFIG | {key: json.loads(value) for key, value in given.items()} | {"rounds": self.rounds}
        if self.rounds:
            play(config, self.nodes, self.folder / "runs")
            (self.folder / "runs" / config["run"] / "config.json").write_text(json.dumps(config))
        return subprocess.CompletedProcess(command, 0)


def test_a_run_is_started_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed, "START_TIMEOUT", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as superlink:
        app = init(tmp_path / "app", model="mlp", config=CONFIG, port=superlink.getsockname()[1])
        flwr = Flwr(app, write_nodes(digits(), tmp_path / "nodes"), 2)
        monkeypatch.setattr(subprocess, "run", flwr)
        with pytest.raises(RunError, match=r"no run in .* can be resumed"):
            start_run(app, {}, resume=True)
        with pytest.raises(RunError, match=r"ended after round 2 of 3 .*--resume --run first` continues it"):
            start_run(app, {"run": "first"})
        flwr.rounds = 3
        after = start_run(app, {}, resume=True)
        flwr.rounds = 0
        with pytest.raises(RunError, match="ended before its first round"):
            start_run(app, {"run": "other"})
    assert after["rounds"]["done"] == 3
    assert 'run="first"' in flwr.commands[1][-1]
    assert "resume=true" in flwr.commands[1][-1]
    with pytest.raises(RunError, match=r"no SuperLink answers at .*copfl federate server"):
        start_run(app, {})


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        app = init(tmp_path / "app", model="mlp", config=CONFIG, port=other.getsockname()[1])
        with pytest.raises(UsageError, match=r"cannot be used: .*is a server running"):
            serve(app)
