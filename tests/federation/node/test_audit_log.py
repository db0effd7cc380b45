"""A node's own audit log: what left is in it before it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.errors import RunError
from copfl.federation.node import audit_log
from copfl.federation.node.audit_log import AuditEntry, append
from copfl.federation.operations.status import as_text, status
from copfl.federation.protocol.chained_log import AUDIT, verified
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.messages import HELLO, TRAIN
from copfl.federation.protocol.proposal import CHALLENGE, KEY
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from tests.commands import called
from tests.federation.network import CONFIG, digits, write_nodes
from tests.federation.signing import COORDINATOR, MessageTransport, answer, knowing, proposed, state_of

ENTRY = AuditEntry("sent", "ab", "cd", "test", 1, "train", ("update",), 10, None, "")


def test_nothing_is_sent_without_its_line(tmp_path: Path) -> None:
    """A log that cannot be written, or whose last line is none, is a refusal."""
    (tmp_path / AUDIT).mkdir()
    with pytest.raises(RunError, match="audit log cannot be written"):
        append(tmp_path, ENTRY)
    (tmp_path / AUDIT).rmdir()
    (tmp_path / AUDIT).write_bytes(b"no line\n")
    with pytest.raises(RunError, match="nothing is sent"):
        append(tmp_path, ENTRY)
    nodes = [knowing(config) for config in write_nodes(digits(), tmp_path / "nodes")]
    (state_of(nodes[0]) / AUDIT).mkdir(parents=True)
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
    server = new_server(settings, transport, folder, pause=0, retry=0, proposal=signed.proposal)
    list(server.rounds())
    answer(nodes[1], run_config, TRAIN, ("", b""))  # unsigned
    found = verified(state_of(nodes[1]) / AUDIT)
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

    done = called(capsys, "site", "log", state_of(node))
    assert done.code == 0, done.err
    assert "sent     update, metrics" in done.out
    assert "refused  train of run None, unsigned: the policy" in done.out
    noted = verified(state_of(node) / AUDIT).last_hash
    assert f"intact      4 lines, last hash {noted}" in done.out
    found = status(state_of(node))
    assert f"audit log   4 lines, no line changed or removed; last hash {noted[:16]}" in as_text(found)
    path = state_of(node) / AUDIT
    path.write_bytes(path.read_bytes().replace(b'"metrics"', b'"nothing"', 1))
    done = called(capsys, "site", "log", state_of(node), "--verify")
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
