"""What the server's folder says of a run, its members and who is waited for."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from copfl.errors import RunError
from copfl.federation.operations import watched
from copfl.federation.operations.history import history_of
from copfl.federation.operations.watched import MemberState, fingerprint_of, read
from copfl.federation.protocol.keys import SigningKey, fingerprint, new_key, openssh_line
from copfl.federation.server.membership import write_roster
from tests.federation.folders import RUN, ServerState

FIVE = ("north", "south", "west", "east", "centre")


@pytest.fixture
def server(tmp_path: Path) -> ServerState:
    return ServerState(tmp_path / "clinic", FIVE, needed=4)


def states(folder: Path) -> dict[str, MemberState]:
    return {member.name: member for member in read(folder).members}


def test_who_is_waited_for_and_who_waits(server: ServerState) -> None:
    server.sign()
    server.start()
    server.begin_round(1, [0, 1, 2, 3])  # the last member is not selected
    server.log("left", client=1, node="101")
    server.log("accepted", round=1, client=0, bytes=10)
    server.log("rejected", round=1, client=2, reason="its training diverged")
    with server.running():
        found = read(server.app)
        members = states(server.app)
    assert (found.state, found.run, found.planned) == ("is running", RUN, 4)
    assert {name: member.state for name, member in members.items()} == {
        "north": "has answered",
        "south": "not connected",
        "west": "left out",
        "east": "training",
        "centre": "not selected",
    }
    assert [name for name, member in members.items() if member.is_waited_for] == ["south", "west", "east"]
    assert members["west"].reason == "its training diverged"
    assert members["east"].since is not None
    assert members["north"].last_answer is not None
    assert members["east"].fingerprint == fingerprint(server.members[3].key)


def test_a_round_with_enough_replies_waits_for_the_connected_alone(tmp_path: Path) -> None:
    """As the server does: it asks again, and waits for who is absent, only if it lacks uploads."""
    server = ServerState(tmp_path / "clinic", FIVE, needed=3)
    server.sign()
    server.start()
    server.begin_round(1)
    server.log("left", client=1, node="101")
    server.log("rejected", round=1, client=2, reason="its training diverged")
    with server.running():
        members = states(server.app)
    assert [name for name, member in members.items() if member.is_waited_for] == ["north", "east", "centre"]


def test_a_member_that_is_waited_for_becomes_late(
    server: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    server.begin_round(1)
    with server.running():
        assert not states(server.app)["east"].is_late
        monkeypatch.setattr(watched, "LATE_AFTER", -1.0)
        assert states(server.app)["east"].is_late


def test_a_member_that_left_returns_and_is_asked_again(server: ServerState) -> None:
    server.start()
    server.begin_round(1)
    server.log("left", client=1, node="101")
    server.log("joined", client=1, node="201")
    with server.running():
        back = states(server.app)["south"]
    assert back.state == "training"
    last = json.loads((server.path / "audit.jsonl").read_text().splitlines()[-1])
    assert back.since == datetime.datetime.fromisoformat(last["at"])


def test_how_a_run_ends(server: ServerState) -> None:
    assert read(server.app).state == "has not begun"
    assert read(server.app).run == ""
    server.start()
    server.begin_round(1)
    server.end_round(1, {1: "no reply within 60 s"})
    found = read(server.app)
    assert found.state == "was interrupted"
    assert found.rounds[0].left_out == {1: "no reply within 60 s"}
    assert found.rounds[0].per_client["accuracy"][2] == pytest.approx(0.12)
    assert [m.state for m in found.members] == ["done", "never counted", "done", "done", "done"]
    server.log("failed", reason="no space left")
    assert (read(server.app).state, read(server.app).reason) == ("failed", "no space left")
    server.log("started", round=2, rounds=4, algorithm="copfl", clients=5, secure=False)
    server.log("ended")
    assert (read(server.app).state, read(server.app).reason) == ("ended", "")


def test_who_signed_the_run(server: ServerState) -> None:
    server.start()
    assert read(server.app).proposal is None
    server.sign()
    found = read(server.app)
    assert found.proposal is not None
    assert fingerprint(found.proposal.coordinator) == fingerprint(server.coordinator.public)
    assert found.problems == []
    (server.app / "keys" / "coordinator.pub").write_bytes(openssh_line(SigningKey(new_key()).public))
    assert "who is not the coordinator of coordinator.pub" in read(server.app).problems[0]
    path = server.app / "proposals" / f"{RUN}.json"
    path.write_text(path.read_text().replace("north", "other"))
    found = read(server.app)
    assert found.proposal is None
    assert "not signed by the coordinator" in found.problems[0]


def test_a_member_of_the_roster_alone_and_a_revoked_one(server: ServerState) -> None:
    server.sign()
    server.start()
    server.begin_round(1)
    revoked = server.members[1]
    write_roster(server.app, server.roster._replace(revoked={revoked.key: revoked.name}))
    with server.running():
        assert states(server.app)["south"].state == "revoked"
        assert not states(server.app)["south"].is_waited_for


def test_a_changed_log_is_a_problem(server: ServerState) -> None:
    server.start()
    server.begin_round(1)
    server.end_round(1)
    assert read(server.app).problems == []
    path = server.path / "audit.jsonl"
    path.write_text(path.read_text().replace('"bytes": 1000', '"bytes": 1001', 1))
    assert "was changed" in read(server.app).problems[0]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert f"round 1 is not in {path.name}" in read(server.app).problems[-1]


def test_a_damaged_line_is_named(server: ServerState) -> None:
    server.start()
    server.begin_round(1)
    server.end_round(1)
    path = server.path / "rounds.jsonl"
    path.write_text(path.read_text() + '{"round": 2}\n')
    with pytest.raises(RunError, match=r"line 2 of .*rounds\.jsonl is damaged"):
        read(server.app)
    with pytest.raises(RunError, match="event 1 of the audit log, 'joined', is damaged"):
        history_of([{"event": "joined", "at": "2026-01-01T00:00:00+00:00"}])


def test_the_fingerprint_changes_with_each_event(server: ServerState) -> None:
    before = fingerprint_of(server.app)
    server.start()
    after = fingerprint_of(server.app)
    assert before != after
    server.begin_round(1)
    assert fingerprint_of(server.app) != after


def test_the_folder_of_a_node_and_an_unknown_run_are_errors(server: ServerState, tmp_path: Path) -> None:
    (tmp_path / "state" / "run").mkdir(parents=True)
    (tmp_path / "state" / "run" / "client.json").write_text("{}")
    with pytest.raises(RunError, match="is the state-dir of a node"):
        read(tmp_path / "state")
    with pytest.raises(RunError, match=r'no run "other" in .*; there are: none'):
        read(server.app, "other")
    with pytest.raises(RunError, match="holds no app of copfl"):
        read(tmp_path)
