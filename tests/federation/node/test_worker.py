"""The resident worker of a node: the same answers, one process, and nothing left of it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copfl.errors import RunError
from copfl.federation.node import secure_update
from copfl.federation.node.acceptance import accept
from copfl.federation.node.node import Accepted
from copfl.federation.node.resident import Resident
from copfl.federation.node.respond import respond
from copfl.federation.policy.record import (
    AllowedBase,
    AllowedCode,
    AllowedFile,
    Policy,
    ProposalRules,
    RequestBounds,
)
from copfl.federation.protocol.files import private_folder
from copfl.federation.protocol.messages import TRAIN, Content, Message
from copfl.federation.protocol.node_config import WORKER
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from tests.federation.network import (
    CONFIG,
    DirectTransport,
    answered,
    digits,
    node_of,
    unsigned,
    write_nodes,
)
from tests.federation.signing import knowing, proposed


def processes(folder: Path) -> list[int]:
    """The workers of this node."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"copfl.federation.node.worker" in words and str(folder).encode() in words:
            found.append(int(entry.parent.name))
    return found


def wait_until(what: Callable[[], object], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """Two nodes with the same data: one has a worker, which ends with the test."""
    first = unsigned(write_nodes(digits(), tmp_path / "a")[0])
    yield [first, unsigned(first | {"state-dir": str(tmp_path / "b"), "worker": False})]
    for pid in processes(folder_of(first)):
        os.kill(pid, signal.SIGKILL)


def folder_of(node_config: dict[str, Any]) -> Path:
    return Path(node_config["state-dir"]) / WORKER


def message(tmp_path: Path) -> Content:
    """The server's first message to client 0."""
    settings = settings_of(CONFIG)
    folder = ServerFolder(str(tmp_path / "runs"), "test", resume=True)
    return new_server(settings, DirectTransport(settings, {}), folder).down(0)


def asked(node_config: dict[str, Any], content: Content) -> Content:
    return respond(Message(TRAIN, content), CONFIG, node_config, os.getpid())


@pytest.mark.job
@pytest.mark.parametrize("module", ["machines.client_app", "machines.supernode", "node.respond"])
def test_the_process_that_receives_messages_imports_no_torch(module: str) -> None:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
    program = f"import sys, copfl.federation.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.job
def test_a_worker_gives_the_same_bytes_survives_kills_and_ends_above_its_memory(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = tmp_path / "here"  # the folder in which the node was started
    hostile.mkdir()
    for name in ("torch", "random", "copfl"):
        (hostile / f"{name}.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(hostile)
    content, folder, started = message(tmp_path), folder_of(nodes[0]), time.time()
    expected = asked(nodes[1], content)
    answers: list[Content] = []
    callers = [threading.Thread(target=lambda: answers.append(asked(nodes[0], content))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert answers == [expected] * 2
    first = processes(folder)
    assert len(first) == 1  # of two callers at once
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    records = [Path(config["state-dir"], "test", "round-000000.copfl") for config in nodes]
    assert records[0].read_bytes() == records[1].read_bytes()

    assert asked(nodes[0], content) == expected
    assert processes(folder) == first  # the same process
    killed = threading.Timer(0.02, os.kill, (first[0], signal.SIGKILL))
    killed.start()
    assert asked(nodes[0] | {"memory": 0.001}, content) == expected  # by another one, which is too large
    wait_until(lambda: not processes(folder))
    assert list(folder.iterdir()) == []
    profile = Path(f"/tmp/perf-{first[0]}.map")  # oneDNN's on ARM; an earlier process may have had the number
    assert not profile.exists() or profile.stat().st_mtime < started


def test_a_worker_ends_with_its_node(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    content, folder = message(tmp_path), folder_of(nodes[0])
    program = (
        "import json, os, sys; from copfl.federation.node.respond import *\n"
        "settings, options = json.loads(sys.stdin.readline())\n"
        "content = sys.stdin.readline()[:-1], bytes.fromhex(sys.stdin.readline())\n"
        "print(respond(Message('train', content), settings, options, os.getpid())[0])\n"
        "sys.stdout.flush(); sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdin is not None
        assert caller.stdout is not None
        caller.stdin.write(f"{json.dumps([CONFIG, nodes[0]])}\n{content[0]}\n{content[1].hex()}\n")
        caller.stdin.flush()
        assert '"kind":"upload"' in caller.stdout.readline()
        assert len(processes(folder)) == 1
        caller.kill()
    wait_until(lambda: not processes(folder))
    assert list(folder.iterdir()) == []


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(RunError, match="is not a folder of this user"):
        private_folder(tmp_path / "link")
    (tmp_path / "open").mkdir(mode=0o755)
    assert stat.S_IMODE(private_folder(tmp_path / "open").stat().st_mode) == 0o700


def test_what_stays_in_memory_is_what_a_new_process_would_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples that changed on disk are read again, and no others; other settings are other settings."""
    monkeypatch.chdir(tmp_path)
    config, resident = write_nodes(digits(), tmp_path)[0], Resident()
    settings, node = resident.settings(CONFIG, (), RequestBounds()), node_of(config)
    assert resident.settings(dict(CONFIG), (), RequestBounds()) is settings
    data = resident.data(settings, node)
    (tmp_path / "log.txt").write_text("a file of the working folder")
    assert resident.data(settings, node) is data
    with np.load(config["data"]) as arrays:
        np.savez(config["data"], **{name: arrays[name][:5] for name in arrays})
    assert len(resident.data(settings, node).train.y) == 5
    assert resident.settings(CONFIG | {"run.batch": 8}, (), RequestBounds()).run.run.batch == 8


def test_a_bug_is_a_refusal_without_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error may describe samples."""
    monkeypatch.setattr(secure_update, "round_answer", lambda *_: 1 / 0)
    config = unsigned(write_nodes(digits(), tmp_path)[0])
    head, _ = answered(config, CONFIG)
    assert "its data cannot be used; see the node's log" in head
    assert "division by zero" not in head


def test_random_numbers_of_a_custom_model_are_those_of_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    resident = Resident()
    monkeypatch.setattr(resident, "settings", lambda *_: drawn.append(float(torch.rand(1))))
    accepted = accept(node_of(unsigned({"state-dir": str(tmp_path)})).config, {})
    for _ in range(2):
        resident.answer(accepted, TRAIN, ("", b""))
    assert drawn[0] == drawn[1]


def test_a_worker_gets_all_that_the_door_let_in(tmp_path: Path) -> None:
    """The node's options, its policy, the signed proposal, the settings and the owner's code, as text."""
    nodes = [knowing(config) for config in write_nodes(digits(), tmp_path)]
    signed = proposed(CONFIG, nodes)
    written = accept(node_of(nodes[1]).config, CONFIG | {"proposal": signed.text})
    assert written.node.proposal == signed.proposal
    assert written.node.config.client == 1
    assert Accepted.from_json(written.to_json()) == written
    policy = Policy(
        metrics=("accuracy",),
        proposals=ProposalRules(unsigned=True),
        bounds=RequestBounds(seconds=5.0),
        code=(AllowedCode("ward_net:net", tmp_path, "0" * 64),),
        bases=(AllowedBase("hf:bert", "1" * 64, tmp_path), AllowedBase("timm:vit")),
        files=(AllowedFile("public", "chest", tmp_path / "x.npz"),),
    )
    another = Accepted(written.node._replace(policy=policy, proposal=None), {"run.rounds": 1}, policy.code)
    assert Accepted.from_json(another.to_json()) == another
