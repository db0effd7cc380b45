"""`copfl federate server` and `run`, without starting Flower."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

import httpx

from copfl.errors import RunError, UsageError
from copfl.federation import init
from copfl.federation.machines import deployed
from copfl.federation.machines.deployed import serve, start_run, stop_run
from copfl.federation.operations.watched import SubmittedRun
from copfl.federation.protocol.app_folder import DATABASE
from copfl.federation.protocol.keys import make_key
from copfl.federation.protocol.proposal import KEY, from_text
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.membership import coordinator_key, propose, read_roster, revoke
from copfl.settings.flat import nested
from tests.federation.network import CONFIG, digits, play, write_nodes


class Flwr:
    """`flwr run`: the run is that of `network`."""

    def __init__(self, folder: Path, nodes: list[dict[str, Any]], rounds: int) -> None:
        self.folder, self.nodes, self.rounds = folder, nodes, rounds
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.commands.append(command)
        given = dict(word.split("=", 1) for word in command[-1].split())
        given = {key: json.loads(value) for key, value in given.items()}
        config = CONFIG | given | {"run.rounds": self.rounds}
        agreed = from_text(config.pop(KEY)).proposal
        assert (agreed.run, len(agreed.members)) == (config["session.run"], 3)
        if self.rounds:
            play(config, self.nodes, self.folder / "runs")
            (self.folder / "runs" / config["session.run"] / "config.json").write_text(json.dumps(config))
        return subprocess.CompletedProcess(command, 0)


def test_a_run_is_started_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed, "START_TIMEOUT", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as superlink:
        app = init(tmp_path / "app", nested(CONFIG), port=superlink.getsockname()[1])
        flwr = Flwr(app, write_nodes(digits(), tmp_path / "nodes"), 2)
        monkeypatch.setattr(subprocess, "run", flwr)
        with pytest.raises(RunError, match=r"no run in .* can be resumed"):
            start_run(app, {}, resume=True)
        with pytest.raises(RunError, match=r"ended after round 2 of 3 .*--resume --run first` continues it"):
            start_run(app, {"session.run": "first"})
        flwr.rounds = 3
        after = start_run(app, {}, resume=True)
        flwr.rounds = 0
        with pytest.raises(RunError, match="ended before its first round"):
            start_run(app, {"session.run": "other"})
    assert after["rounds"]["done"] == 3
    assert 'session.run="first"' in flwr.commands[1][-1]
    assert "session.resume=true" in flwr.commands[1][-1]
    with pytest.raises(RunError, match=r"no SuperLink answers at .*copfl federate server"):
        start_run(app, {})


def test_a_run_is_resumed_with_its_proposal_where_the_key_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as superlink:
        app = init(tmp_path / "app", nested(CONFIG), port=superlink.getsockname()[1])
        nodes = write_nodes(digits(), tmp_path / "nodes")
        key = coordinator_key(app)
        signed = propose(app, {"session.run": "first", "run.rounds": 3}, key, read_roster(app))
        (app / "keys" / "coordinator").unlink()
        flwr = Flwr(app, nodes, 2)
        monkeypatch.setattr(subprocess, "run", flwr)
        with pytest.raises(RunError, match="ended after round 2 of 3"):
            start_run(app, {}, proposal=signed)
        flwr.rounds = 3
        with pytest.raises(UsageError, match="key is not on this machine"):
            start_run(app, {}, resume=True)
        after = start_run(app, {}, resume=True, proposal=signed)
    assert after["rounds"] == {"done": 3, "of": 3}
    assert "session.resume=true" in flwr.commands[1][-1]


def test_a_run_that_continues_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = init(tmp_path / "app", nested(CONFIG))
    with pytest.raises(RunError, match="no run continues, so there is nothing to stop"):
        stop_run(app)
    runs = [SubmittedRun(name, n, "copfl/app", "", n < 8, "") for n, name in enumerate("ab", 7)]
    monkeypatch.setattr(deployed, "submitted_runs", lambda folder: runs)
    with pytest.raises(RunError, match=r"the run a does not continue, .* there are: b"):
        stop_run(app, "a")
    commands: list[list[str]] = []
    code, said = 0, ""

    def flwr(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setattr(subprocess, "run", flwr)
    assert stop_run(app) == "b"
    assert commands == [["flwr", "stop", "8", "copfl"]]
    code, said = 1, "Run 8 has\x1b ended"
    with pytest.raises(RunError, match=r"the run b was not stopped: Run 8 has\\x1b ended"):
        stop_run(app, "b")
    runs[:] = [SubmittedRun("c\x1b", 9, "copfl/app", "", False, "")]
    with pytest.raises(RunError, match=r"the run c\\x1b was not stopped"):
        stop_run(app)


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        app = init(tmp_path / "app", nested(CONFIG), port=other.getsockname()[1])
        with pytest.raises(UsageError, match=r"cannot be used: .*is a server running"):
            serve(app)


def test_a_run_that_is_running_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a run was submitted"))
    with socket.create_server(("127.0.0.1", 0)) as superlink:
        app = init(tmp_path / "app", nested(CONFIG), port=superlink.getsockname()[1])
        folder = ServerFolder(str(app / "runs"), "first", resume=False)
        with folder.claimed():
            (folder.path / "config.json").write_text("{}")
            for config in ({}, {"session.run": "first"}):
                with pytest.raises(RunError, match="the run first is running"):
                    start_run(app, config, resume=True)


class Control:
    """Flower's control interface, with one registered key."""

    def __init__(self, known: bytes) -> None:
        self.known, self.registered, self.unregistered = known, list[bytes](), list[int]()

    def ListNodes(self, request: Any) -> Any:
        return SimpleNamespace(nodes_info=[SimpleNamespace(public_key=self.known, node_id=7)])

    def UnregisterNode(self, request: Any) -> None:
        if request.node_id in self.unregistered:  # Flower lists a node for a while after it is unregistered
            response = httpx.Response(404, request=httpx.Request("POST", "http://superlink"))
            raise httpx.HTTPStatusError("not found", request=response.request, response=response)
        self.unregistered.append(request.node_id)

    def RegisterNode(self, request: Any) -> None:
        self.registered.append(request.public_key)

    def close(self) -> None:
        pass


def test_a_server_that_is_started_again_registers_new_keys_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's server prints an error for a key that it has."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    keys: list[bytes] = []
    for name in ("node-0", "node-1"):
        make_key(tmp_path / "keys" / name)
        public: Any = load_ssh_public_key((tmp_path / "keys" / f"{name}.pub").read_bytes())
        keys.append(public_key_to_bytes(public))
    control = Control(keys[0])
    monkeypatch.setattr(deployed, "answers", lambda *_: True)
    monkeypatch.setattr("flwr.cli.flower_config.read_superlink_connection", lambda _: None)
    monkeypatch.setattr("flwr.cli.utils.init_http_client_from_connection", lambda _: control)
    deployed._register_keys(tmp_path, 1)
    assert control.registered == [keys[1]]


def test_a_revoked_key_is_unregistered_and_the_coordinators_is_no_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    app = init(tmp_path / "app", nested(CONFIG), secure=True)
    public: Any = load_ssh_public_key((app / "keys" / "node-0.pub").read_bytes())
    control = Control(public_key_to_bytes(public))
    monkeypatch.setattr(deployed, "answers", lambda *_: True)
    monkeypatch.setattr("flwr.cli.flower_config.read_superlink_connection", lambda _: None)
    monkeypatch.setattr("flwr.cli.utils.init_http_client_from_connection", lambda _: control)
    deployed._register_keys(app, 1)
    assert (len(control.registered), control.unregistered) == (2, [])
    revoke(app, "node-0")
    deployed._register_keys(app, 1)
    make_key(app / "keys" / "node-9")
    before = len(control.registered)
    deployed._register_keys(app, 1)  # the node is still listed, and a key has arrived
    assert control.unregistered == [7]
    assert (
        len(control.registered) == before + 3
    )  # two keys again, which `Control` does not list, and the new one
    assert public_key_to_bytes(public) not in control.registered


def test_the_loop_that_registers_keys_survives_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an outsider holds all connections, no file can be opened."""
    (tmp_path / "keys").mkdir()
    calls: list[int] = []

    def glob(self: Path, pattern: str) -> Any:
        if len(calls) < 3:
            raise OSError(24, "Too many open files")
        return iter(())

    def sleep(seconds: float) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    registered: list[Path] = []
    monkeypatch.setattr(Path, "glob", glob)
    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(deployed, "_register_keys", lambda folder, port: registered.append(folder))
    with pytest.raises(KeyboardInterrupt):
        deployed._keep_registered(tmp_path, 1)
    assert registered == [tmp_path]


def test_only_the_owner_can_read_what_a_superlink_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its database has the messages of all runs; the folder may be open to others."""
    app = init(tmp_path / "app", nested(CONFIG), port=_free_port())
    database = app / DATABASE
    database.write_bytes(b"")
    database.chmod(0o644)
    written: list[int] = []

    def superlink() -> None:
        Path("new.db").touch()
        written.append(Path("new.db").stat().st_mode & 0o777)

    monkeypatch.setattr("flwr.superlink.cli.flower_superlink", superlink)
    monkeypatch.setattr("flwr.superlink.servicer.control.control_handlers.start_run", lambda *_: None)
    monkeypatch.setattr("flwr.superlink.extensions.get_middleware", lambda: ())
    before = os.umask(0o022)
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises(SystemExit):
            serve(app)
    finally:
        os.umask(before)
    assert written == [0o600]
    assert database.stat().st_mode & 0o777 == 0o600


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
