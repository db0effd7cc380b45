"""A node's own audit log: what left, chained; every change of it is found, and a kill is not taken for one."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.errors import RunError
from copfl.federation.node import audit_log
from copfl.federation.node.audit_log import FILE, Entry, append, verified
from copfl.federation.operations.status import as_text, status
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.messages import HELLO, TRAIN
from copfl.federation.protocol.proposal import CHALLENGE, KEY
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.secure_rounds import server_class
from tests.commands import called
from tests.federation.network import CONFIG, digits, write_nodes
from tests.federation.signing import COORDINATOR, MessageTransport, answer, knowing, proposed, state_of

ENTRY = Entry("sent", "ab", "cd", "test", 1, "train", ("update",), 10, None, "")


def written(folder: Path, lines: int = 6) -> Path:
    for n in range(lines):
        append(folder, ENTRY._replace(round=n + 1))
    return folder / FILE


def test_lines_are_chained_and_private(tmp_path: Path) -> None:
    found = verified(written(tmp_path))
    assert (found.problem, found.is_cut) == ("", False)
    assert [line["n"] for line in found.lines] == [1, 2, 3, 4, 5, 6]
    for before, after in itertools.pairwise(found.lines):
        assert after["previous"] == before["hash"]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_any_changed_line_is_found(tmp_path: Path) -> None:
    """Every line, the last one too, and every field of it."""
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        for field in json.loads(line):
            fields = json.loads(line)
            fields[field] = 99
            changed = json.dumps(fields).encode() + b"\n"
            path.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
            assert verified(path).problem.startswith(f"line {number + 1}"), field
        for changed in (line.replace(b": ", b":", 1), b"no json\n", b"\n", b"{}\n", b"[]\n"):
            path.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
            assert verified(path).problem


def test_any_removed_repeated_or_moved_line_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    for order in itertools.permutations(range(5)):
        path.write_bytes(b"".join(lines[n] for n in order))
        assert bool(verified(path).problem) == (list(order) != [0, 1, 2, 3, 4])
    for number in range(4):
        path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        assert verified(path).problem.startswith(f"line {number + 1}")
        path.write_bytes(b"".join(lines[: number + 1] + lines[number:]))
        assert verified(path).problem.startswith(f"line {number + 2}")


def test_lines_removed_at_the_end_are_found_by_who_noted_a_hash(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines, noted = path.read_bytes().splitlines(keepends=True), verified(path).last_hash
    path.write_bytes(b"".join(lines[:4]))
    assert verified(path).problem == ""  # nobody can see it from the file alone
    assert "no line has the noted hash" in verified(path, [noted]).problem
    path.unlink()
    written(tmp_path, 9)  # a whole new log
    assert verified(path).problem == ""
    assert "no line has the noted hash" in verified(path, [noted]).problem
    noted = verified(path).last_hash
    append(tmp_path, ENTRY)
    assert verified(path, [noted]).problem == ""


@pytest.mark.parametrize("kept", [1, 5, 100, -2])
def test_a_line_that_a_kill_cut_off_is_recognised_and_the_log_continues(kept: int, tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole[: len(whole) - len(last)] + last[:kept])
    found = verified(path)
    assert (found.problem, found.is_cut, len(found.lines)) == ("", True, 2)
    append(tmp_path, ENTRY)
    found = verified(path)
    assert (found.problem, found.is_cut) == ("", False)
    assert [line["event"] for line in found.lines] == ["sent", "sent", "recovered", "sent"]
    content = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(content[:2] + content[3:]))  # the cut line is in the chain, too
    assert verified(path).problem


def test_a_line_whose_line_break_was_cut_off_is_whole(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-1])
    append(tmp_path, ENTRY)
    assert verified(path).problem == ""
    assert [line["event"] for line in verified(path).lines] == ["sent"] * 4


def test_a_first_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'{"n": 1, "at"')
    append(tmp_path, ENTRY)
    assert verified(tmp_path / FILE).problem == ""
    assert [line["n"] for line in verified(tmp_path / FILE).lines] == [2, 3]


def _append(folder: Path) -> None:
    written(folder, 30)


def test_processes_that_write_at_once_write_one_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=[tmp_path]) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = verified(tmp_path / FILE)
    assert (found.problem, len(found.lines)) == ("", 120)


def test_kills_leave_an_intact_chain(tmp_path: Path) -> None:
    """Eight processes, each killed while it writes."""
    program = (
        "import sys; from pathlib import Path; from copfl.federation.node.audit_log import Entry, append\n"
        "entry = Entry('sent', None, None, 'test', 1, 'train', ('update',), 10, None, 'x' * 400)\n"
        "print('ready', flush=True)\n"
        "while True: append(Path(sys.argv[1]), entry)\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    count = 0
    for _ in range(2):
        writers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            with writer:
                writer.wait()
        append(tmp_path, ENTRY)
        found = verified(tmp_path / FILE)
        assert found.problem == ""
        assert len(found.lines) > count
        count = len(found.lines)


def test_nothing_is_sent_without_its_line(tmp_path: Path) -> None:
    """A log that cannot be written, or whose last line is none, is a refusal."""
    (tmp_path / FILE).mkdir()
    with pytest.raises(RunError, match="audit log cannot be written"):
        append(tmp_path, ENTRY)
    (tmp_path / FILE).rmdir()
    (tmp_path / FILE).write_bytes(b"no line\n")
    with pytest.raises(RunError, match="nothing is sent"):
        append(tmp_path, ENTRY)
    nodes = [knowing(config) for config in write_nodes(digits(), tmp_path / "nodes")]
    (state_of(nodes[0]) / FILE).mkdir(parents=True)
    run_config = CONFIG | {KEY: proposed(CONFIG, nodes).text}
    head, body = answer(nodes[0], run_config, HELLO, (json.dumps({"run": "test", CHALLENGE: "0"}), b""))
    assert "its state-dir cannot be used" in json.loads(head)["refused"]
    assert (body, "client" in json.loads(head)) == (b"", False)


# -- what is in it -------------------------------------------------------------------------------------------


def trained(
    tmp_path: Path, config: dict[str, Any] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """The audit log of a node after two rounds, its configuration and the proposal."""
    run_config = CONFIG | {"run.rounds": 2} | (config or {})
    nodes = [knowing(node) for node in write_nodes(digits(), tmp_path / "nodes")]
    signed = proposed(run_config, nodes)
    transport = MessageTransport(run_config | {KEY: signed.text}, nodes)
    folder = ServerFolder(str(tmp_path / "runs"), "test", resume=False)
    settings = settings_of(run_config)
    kind = server_class(settings.federation.secure.aggregation)
    server = kind(settings, transport, folder, pause=0, retry=0, proposal=signed.proposal)
    list(server.rounds())
    answer(nodes[1], run_config, TRAIN, ("", b""))  # unsigned
    found = verified(state_of(nodes[1]) / FILE)
    assert found.problem == ""
    return found.lines, nodes[1], signed.proposal


def test_what_left_a_node_is_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, node, proposal = trained(tmp_path)
    assert [(line["event"], line["left"]) for line in lines] == [
        ("sent", ["number"]),
        ("sent", ["update", "metrics"]),
        ("sent", ["update", "metrics"]),
        ("refused", []),
    ]
    assert [line["round"] for line in lines] == [None, 1, 2, None]
    assert {line["coordinator"] for line in lines[:3]} == {fingerprint(COORDINATOR.public)}
    assert {line["proposal"] for line in lines[:3]} == {proposal.digest}
    assert lines[3]["proposal"] is None
    assert "no coordinator signed it" in lines[3]["reason"]
    assert {line["epsilon"] for line in lines} == {None}
    assert all(line["bytes"] > 1000 for line in lines[1:3])

    done = called(capsys, "federate", "log", state_of(node))
    assert done.code == 0, done.err
    assert "sent     update, metrics" in done.out
    assert "refused  train of run None, unsigned: the policy" in done.out
    noted = verified(state_of(node) / FILE).last_hash
    assert f"intact      4 lines, last hash {noted}" in done.out
    found = status(state_of(node))
    assert f"audit log   4 lines, no line changed or removed; last hash {noted[:16]}" in as_text(found)
    path = state_of(node) / FILE
    path.write_bytes(path.read_bytes().replace(b'"metrics"', b'"nothing"', 1))
    done = called(capsys, "federate", "log", state_of(node), "--verify")
    assert (done.code, done.out) == (1, "BROKEN      line 2: it was changed\n")
    assert "audit.jsonl: line 2: it was changed" in status(state_of(node))["problems"]


def test_the_phases_of_a_secure_sum_are_in_the_log(tmp_path: Path) -> None:
    lines, _, _ = trained(tmp_path, {"secure.aggregation": True, "algorithm.name": "fedavg"})
    left = [kind for line in lines[1:6] for kind in line["left"]]
    assert left == ["keys", "key shares", "masked update", "signature", "sum share"]


def test_the_epsilon_of_a_noised_upload_is_in_the_log(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
    from copfl.wrappers.privacy import epsilon_of

    lines, _, _ = trained(tmp_path, {"privacy.noise": 4.0, "algorithm.name": "fedavg"})
    epsilon = epsilon_of({4.0 / 3**0.5: 1}, 1e-5)
    assert [line["epsilon"] for line in lines] == [None, epsilon, epsilon, None]
    assert f"epsilon {epsilon:.3g}" in audit_log.as_text(lines[1])
