"""Signed proposals: what a coordinator signs, what a node accepts, and what a server may not change."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets.datasets import load
from copfl.errors import UsageError
from copfl.federation.node.acceptance import FOLDER, MOST_PENDING, approve, pending
from copfl.federation.policy.file import FILE, strict, write_policy
from copfl.federation.policy.record import Policy, ProposalRules
from copfl.federation.protocol import proposal
from copfl.federation.protocol.keys import SigningKey, fingerprint, new_key
from copfl.federation.protocol.messages import HELLO, JOIN, TRAIN, Field
from copfl.federation.protocol.proposal import (
    CHALLENGE,
    KEY,
    Member,
    Rotation,
    differences,
    from_text,
    read,
    rotation_statement,
)
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import TrainingServer, new_server
from tests.commands import called
from tests.federation.network import (
    CONFIG,
    DirectTransport,
    digits,
    farthest,
    kept,
    play,
    server_of,
    simulated,
    unsigned,
    write_nodes,
)
from tests.federation.signing import (
    COORDINATOR,
    MessageTransport,
    answer,
    key_of,
    knowing,
    members_of,
    proposed,
    state_of,
)

GREETING = json.dumps({"run": "test", CHALLENGE: "00"}), b""


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    return [knowing(config) for config in write_nodes(digits(), tmp_path / "nodes")]


def refused(node: dict[str, Any], run_config: dict[str, Any], kind: str = HELLO) -> str:
    return str(json.loads(answer(node, run_config, kind, GREETING)[0]).get(Field.REFUSED, ""))


# -- the document --------------------------------------------------------------------------------------------


def test_a_document_is_read_as_it_was_written(nodes: list[dict[str, Any]]) -> None:
    config = CONFIG | {
        "task": {"metrics": ["auc"], "delta": 0.1},
        "network.min_replies": 2,
        "session.resume": True,
    }
    signed = proposed(config, nodes)
    for again in (read(signed.document), from_text(signed.text)):
        assert again == signed
        assert again.proposal.digest == signed.proposal.digest
    settings = signed.proposal.settings
    assert settings["task.metrics"] == '["auc"]'
    assert settings["network.min_replies"] == 2
    assert "session.resume" not in settings
    assert differences(signed.proposal, config | {"session.resume": False}) == []


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("run.rounds", 50, "run.rounds is 50, and 3 in the proposal"),
        ("secure.aggregation", True, "secure.aggregation=True is not in the proposal"),
        ("run.batch", None, "run.batch=256 of the proposal is missing"),
        ("network.min_replies", True, "network.min_replies is True, and 3"),
        ("model.width", 17, "model.width is 17, and 16"),
    ],
)
def test_a_difference_is_named(nodes: list[dict[str, Any]], key: str, value: Any, named: str) -> None:
    changed = {name: v for name, v in (CONFIG | {key: value}).items() if v is not None}
    (line,) = differences(proposed(CONFIG, nodes).proposal, changed)
    assert line.startswith(named)


def tampered(document: bytes, change: Any) -> bytes:
    fields = json.loads(document)
    change(fields)
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["settings"].update(rounds=4),
        lambda f: f["members"].pop(),
        lambda f: f["members"][0].update(name="other"),
        lambda f: f["members"][0].update(key=f["members"][1]["key"]),
        lambda f: f["revoked"].append(f["members"][0]["key"]),
        lambda f: f.update(issued="2020-01-01T00:00:00+00:00"),
        lambda f: f.update(coordinator=SigningKey(new_key()).public),
        lambda f: f.update(signature="00"),
        lambda f: f.pop("signature"),
        lambda f: f.update(format=2),
        lambda f: f.update(members=[5]),
        lambda f: f.update(settings=[[[]]]),
    ],
)
def test_a_document_that_was_changed_is_refused(nodes: list[dict[str, Any]], change: Any) -> None:
    with pytest.raises(UsageError, match="the proposal cannot be read"):
        read(tampered(proposed(CONFIG, nodes).document, change))


@pytest.mark.parametrize("text", ["", "x", "====", 5, None, "A" * 1000])
def test_a_text_that_is_no_document_is_refused(text: Any) -> None:
    with pytest.raises(UsageError, match="the proposal cannot be read"):
        from_text(text)


def test_a_document_that_would_fill_the_memory_is_not_unpacked() -> None:
    bomb = base64.urlsafe_b64encode(zlib.compress(b" " * 2**26)).decode()
    with pytest.raises(UsageError, match="more than"):
        from_text(bomb)


def test_a_coordinator_cannot_sign_what_is_no_proposal(nodes: list[dict[str, Any]]) -> None:
    first, second, third = members_of(nodes)
    wrongs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"session.run": ""}, {}),
        ({"run.clients": 2}, {}),
        ({}, {"members": (first, second._replace(number=0))}),
        ({}, {"members": (first, second._replace(name=first.name))}),
        ({}, {"members": (first, second._replace(key=first.key))}),
        ({}, {"members": (first._replace(number=-1),)}),
        ({}, {"members": (first._replace(name="../x"),)}),
        ({}, {"revoked": (third.key,)}),
    ]
    for config, options in wrongs:
        with pytest.raises(UsageError, match="the proposal cannot be read"):
            proposed(CONFIG | config, nodes, **options)


def test_a_new_key_is_the_same_member_if_the_old_one_signed_it(nodes: list[dict[str, Any]]) -> None:
    (first, *others), new = members_of(nodes), SigningKey(new_key())
    signature = key_of(nodes[0]).sign(rotation_statement(new.public))
    rotated = Member(0, first.name, new.public, (Rotation(first.key, signature),))
    signed = proposed(CONFIG, nodes, members=(rotated, *others), revoked=(first.key,))
    member = signed.proposal.by_key(new.public)
    assert member is not None
    assert member.identity == first.key
    forged = rotated._replace(rotations=(Rotation(first.key, new.sign(rotation_statement(new.public))),))
    stolen = rotated._replace(rotations=(Rotation(others[0].key, signature),))
    for wrong in (forged, stolen):
        with pytest.raises(UsageError, match=r"not signed with its old one|same number, name or key"):
            proposed(CONFIG, nodes, members=(wrong, *others))


# -- what a node accepts -------------------------------------------------------------------------------------


def test_a_run_config_that_nobody_signed_is_refused(nodes: list[dict[str, Any]]) -> None:
    """By default and by the strict policy; before signatures existed, it was answered."""
    for kind in (HELLO, TRAIN, JOIN):
        assert "no coordinator signed it" in refused(nodes[0], CONFIG, kind)
    state_of(nodes[0]).mkdir(exist_ok=True)
    (state_of(nodes[0]) / FILE).write_text(strict())
    secure = CONFIG | {"secure.aggregation": True, "run.even_batches": True}
    assert "[proposals.unsigned]" in refused(nodes[0], secure)
    assert not refused(unsigned(nodes[1]), CONFIG)


def test_a_coordinator_that_the_node_does_not_know_is_refused(nodes: list[dict[str, Any]]) -> None:
    stranger = SigningKey(new_key())
    run_config = CONFIG | {KEY: proposed(CONFIG, nodes, key=stranger).text}
    text = refused(nodes[0], run_config)
    assert fingerprint(stranger.public) in text
    assert "[proposals.coordinators]" in text
    assert not refused(nodes[0], CONFIG | {KEY: proposed(CONFIG, nodes).text})
    pinned = Policy(proposals=ProposalRules(coordinators=(fingerprint(stranger.public),)))
    write_policy(state_of(nodes[0]) / FILE, pinned)
    assert not refused(nodes[0], run_config)


def test_a_message_that_differs_from_the_document_is_refused(nodes: list[dict[str, Any]]) -> None:
    text = proposed(CONFIG, nodes).text
    for change, named in (
        ({"run.rounds": 1000}, "run.rounds is 1000, and 3 in the proposal"),
        ({"algorithm.epochs": 50}, "algorithm.epochs=50 is not in the proposal"),
        ({"secure.aggregation": True}, "secure.aggregation=True is not in the proposal"),
        ({"session.run": "other"}, "session.run is 'other', and 'test' in the proposal"),
    ):
        for kind in (HELLO, TRAIN):
            assert named in refused(nodes[0], CONFIG | change | {KEY: text}, kind)
    other = json.dumps({"run": "second", CHALLENGE: "00"}), b""
    assert "is not of run test" in answer(nodes[0], CONFIG | {KEY: text}, HELLO, other)[0]


def test_a_policy_bounds_what_a_coordinator_signs(nodes: list[dict[str, Any]]) -> None:
    config = CONFIG | {"algorithm.epochs": 100_000}
    assert "[bounds.epochs]" in refused(nodes[0], config | {KEY: proposed(config, nodes).text})


def test_a_proposal_waits_for_the_owner(
    nodes: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    node, state = nodes[0], state_of(nodes[0])
    write_policy(state / FILE, Policy(proposals=ProposalRules(by_hand=True)))
    signed = proposed(CONFIG, nodes)
    run_config = CONFIG | {KEY: signed.text}
    assert "[proposals.by_hand]" in refused(node, run_config)
    assert pending(state) == [signed]
    done = called(capsys, "site", "approve", state, signed.proposal.digest[:8], "--yes")
    assert done.code == 0, done.err
    assert "setting      run.rounds = 3" in done.out
    assert f"client 1     {fingerprint(key_of(nodes[1]).public)}  clinic-1" in done.out
    assert "allowed     copfl with mlp, 3 rounds" in done.out
    assert not refused(node, run_config)
    assert pending(state) == []
    changed = CONFIG | {"run.rounds": 4}
    assert "[proposals.by_hand]" in refused(node, changed | {KEY: proposed(changed, nodes).text})


def test_what_the_policy_refuses_cannot_be_approved(
    nodes: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG | {"algorithm.epochs": 100_000}
    (tmp_path / "p.json").write_bytes(proposed(config, nodes).document)
    done = called(capsys, "site", "approve", state_of(nodes[0]), tmp_path / "p.json", "--yes")
    assert "refused     algorithm.epochs=100000" in done.out
    assert done.code == 2
    assert not list(state_of(nodes[0]).glob(f"{FOLDER}/approved*"))


def test_an_approved_document_is_accepted_from_any_coordinator(nodes: list[dict[str, Any]]) -> None:
    signed = proposed(CONFIG, nodes, key=SigningKey(new_key()))
    approve(state_of(nodes[0]), signed)
    assert not refused(nodes[0], CONFIG | {KEY: signed.text})
    assert refused(nodes[1], CONFIG | {KEY: signed.text})


def test_proposals_that_wait_are_few(nodes: list[dict[str, Any]]) -> None:
    stranger = SigningKey(new_key())
    for n in range(MOST_PENDING + 3):
        config = CONFIG | {"run.seed": n}
        refused(nodes[0], config | {KEY: proposed(config, nodes, key=stranger).text})
    assert len(pending(state_of(nodes[0]))) == MOST_PENDING


def test_strangers_do_not_push_out_what_the_known_coordinator_proposed(nodes: list[dict[str, Any]]) -> None:
    """Whoever has a connection signs as many as it likes, with keys of its own."""
    state = state_of(nodes[0])
    write_policy(state / FILE, Policy(proposals=ProposalRules(by_hand=True)))
    signed = proposed(CONFIG, nodes)
    refused(nodes[0], CONFIG | {KEY: signed.text})
    for n in range(MOST_PENDING + 3):
        config = CONFIG | {"run.seed": n}
        refused(nodes[0], config | {KEY: proposed(config, nodes, key=SigningKey(new_key())).text})
    waiting = pending(state)
    assert signed in waiting
    assert len(waiting) == MOST_PENDING + 1


def test_a_proposal_from_before_a_revocation_is_refused(nodes: list[dict[str, Any]]) -> None:
    """A server cannot bring a member back by the document that had it."""
    old = CONFIG | {KEY: proposed(CONFIG, nodes).text}
    assert not refused(nodes[0], old)
    members = members_of(nodes)
    later = CONFIG | {"session.run": "later"}
    signed = proposed(later, nodes, members=members[:2], revoked=(members[2].key,))
    greeting = json.dumps({"run": "later", CHALLENGE: "00"}), b""
    assert "signature" in answer(nodes[0], later | {KEY: signed.text}, HELLO, greeting)[0]
    assert "has clinic-2 as a member, whose key was revoked" in refused(nodes[0], old)


def test_a_coordinator_revokes_members_of_its_own_federation_alone(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A node that takes part in two federations: the other coordinator evicts nobody from this one."""
    first = CONFIG | {KEY: proposed(CONFIG, nodes).text}
    other, members = SigningKey(new_key()), members_of(nodes)
    trusting = nodes[0] | {"policy": str(tmp_path / "policy.toml")}
    both = ProposalRules(coordinators=(fingerprint(COORDINATOR.public), fingerprint(other.public)))
    write_policy(tmp_path / "policy.toml", Policy(proposals=both))
    revoking = proposed(CONFIG, nodes, members=members[:2], revoked=(members[2].key,), key=other)
    assert not refused(trusting, CONFIG | {KEY: revoking.text})
    assert not refused(trusting, first)  # clinic-2 is still a member here
    again = proposed(CONFIG, nodes, key=other)
    assert "has clinic-2 as a member, whose key was revoked" in refused(trusting, CONFIG | {KEY: again.text})


def test_a_node_is_the_client_whose_key_it_has(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    run_config = CONFIG | {KEY: proposed(CONFIG, nodes).text}
    free = {key: value for key, value in nodes[1].items() if key != "client"}
    assert json.loads(answer(free, run_config, HELLO, GREETING)[0])["client"] == 1
    assert "configured as client 0, and is client 1" in refused(nodes[1] | {"client": 0}, run_config)
    stranger = free | {"state-dir": str(tmp_path / "stranger")}
    assert json.loads(answer(stranger, run_config, HELLO, GREETING)[0])["client"] == -1
    assert "no member in the proposal" in refused(stranger, run_config, TRAIN)


# -- the server ----------------------------------------------------------------------------------------------


def signed_run(config: dict[str, Any], nodes: list[dict[str, Any]], runs: Path, **options: Any) -> Any:
    """A server over whole messages."""
    signed = proposed(config, nodes)
    transport = MessageTransport(config | {KEY: signed.text}, nodes)
    settings = settings_of(config)
    folder, lines = ServerFolder(str(runs), settings.federation.session.run, resume=False), list[str]()
    given: dict[str, Any] = {"pause": 0, "retry": 0, "proposal": signed.proposal} | options
    return new_server(settings, transport, folder, kept(lines), **given), lines


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_signed_run_ends_with_the_bits_of_an_unsigned_one(is_secure: bool, tmp_path: Path) -> None:
    """Under the strict policy, with secure sums; and without them, where it is the simulation."""
    config = CONFIG | {"run.rounds": 2, "secure.aggregation": is_secure, "run.even_batches": is_secure}
    config["algorithm.name"] = "fedavg"
    dataset = load("digits")
    spread = FederatedData(
        dataset, SCHEMES["iid"](dataset, 3, seed=0)
    )  # each site has enough rows of each class
    nodes = [knowing(node) for node in write_nodes(spread, tmp_path / "nodes")]
    for node in nodes:
        policy = strict() if is_secure else ""
        state_of(node).mkdir(exist_ok=True)
        (state_of(node) / FILE).write_text(policy)
    for node in nodes if is_secure else ():  # the owners have compared the members
        approve(state_of(node), proposed(config, nodes))
    server, _ = signed_run(config, nodes, tmp_path / "runs")
    records = list(server.rounds())
    assert [record["clients"] for record in records] == [[0, 1, 2]] * 2
    plain = play(config, write_nodes(spread, tmp_path / "others"), tmp_path / "plain")
    settings = settings_of(config)
    assert farthest(server_of(settings, tmp_path / "runs"), plain.server) == 0
    assert farthest(plain.server, simulated(settings, spread).server) <= 1e-5


def test_a_member_cannot_take_the_number_of_another(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """A node that reports another number, with its own valid signature, is rejected: names are keys."""
    config = CONFIG | {"run.rounds": 1, "network.min_replies": 2}
    server, lines = signed_run(config, nodes, tmp_path / "runs")
    transport: DirectTransport = server.exchange.transport
    honest = transport.send

    def send(node_id: int, request: str, content: Any, seconds: float) -> str:
        message_id = honest(node_id, request, content, seconds)
        if request == HELLO and node_id == 102:
            fields = json.loads(transport.inbox[message_id].content[0]) | {"client": 0}
            transport.inbox[message_id] = transport.inbox[message_id]._replace(
                content=(json.dumps(fields), b"")
            )
        return message_id

    transport.send = send  # type: ignore[method-assign]
    transport.online = {102: transport.online[102], 100: transport.online[100], 101: transport.online[101]}
    (record,) = server.rounds()
    assert record["clients"] == [0, 1]
    assert any(
        "node 102 is rejected: it reports client=0, and has not the key of clinic-0" in x for x in lines
    )


def test_an_old_answer_to_a_greeting_is_not_accepted_again(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    signed = proposed(CONFIG, nodes)
    old = answer(nodes[0], CONFIG | {KEY: signed.text}, HELLO, GREETING)
    server, lines = signed_run(CONFIG | {"network.min_replies": 2, "run.rounds": 1}, nodes, tmp_path / "runs")
    transport, honest = server.exchange.transport, server.exchange.transport.send

    def send(node_id: int, request: str, content: Any, seconds: float) -> str:
        message_id = honest(node_id, request, content, seconds)
        if request == HELLO and node_id == 100:
            transport.inbox[message_id] = transport.inbox[message_id]._replace(content=old)
        return str(message_id)

    transport.send = send
    list(server.rounds())
    assert any("node 100 is rejected: it reports client=0, and has not the key" in line for line in lines)


def test_a_revoked_members_messages_are_refused(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """From the moment of the revocation, in the middle of a run; the key is in no later proposal."""
    revoked: set[str] = set()
    config = CONFIG | {"run.rounds": 2, "network.min_replies": 2}
    server, lines = signed_run(config, nodes, tmp_path / "runs", revoked=lambda: revoked)
    rounds = server.rounds()
    assert next(rounds)["clients"] == [0, 1, 2]
    revoked.add(members_of(nodes)[1].key)
    assert next(rounds)["clients"] == [0, 2]
    assert any("the key of clinic-1 is revoked" in line for line in lines)


def test_an_answer_that_was_on_its_way_when_its_key_was_revoked_does_not_count(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    revoked: set[str] = set()
    config = CONFIG | {"run.rounds": 1, "network.min_replies": 2}
    server, _ = signed_run(config, nodes, tmp_path / "runs", revoked=lambda: revoked)
    transport, honest = server.exchange.transport, server.exchange.transport.send

    def send(node_id: int, request: str, content: Any, seconds: float) -> str:
        message_id = honest(node_id, request, content, seconds)
        if request == TRAIN and node_id == 101:
            revoked.add(members_of(nodes)[1].key)
        return str(message_id)

    transport.send = send
    (record,) = server.rounds()
    assert record["clients"] == [0, 2]
    assert record["why"] == {"1": "the key of clinic-1 is revoked"}


def test_a_node_whose_owner_approves_later_is_greeted_again(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("copfl.federation.server.registry.RETRY", 0.0)
    server, lines = signed_run(CONFIG | {"run.rounds": 1}, nodes, tmp_path / "runs")
    assert isinstance(server, TrainingServer)
    write_policy(state_of(nodes[0]) / FILE, Policy(proposals=ProposalRules(by_hand=True)))
    for _ in range(3):
        server.exchange.registry.refresh(server.exchange.transport)
    assert sorted(server.exchange.registry.nodes) == [1, 2]
    assert sum("is rejected" in line for line in lines) == 1  # it says so once
    (signed,) = pending(state_of(nodes[0]))
    approve(state_of(nodes[0]), signed)
    server.exchange.registry.refresh(server.exchange.transport)
    assert sorted(server.exchange.registry.nodes) == [0, 1, 2]


def test_members_are_compared_by_a_short_fingerprint(nodes: list[dict[str, Any]]) -> None:
    members = members_of(nodes)
    assert proposal.members_fingerprint(members) == proposal.members_fingerprint(members[::-1])
    for other in (members[:2], (members[0]._replace(name="x"), *members[1:])):
        assert proposal.members_fingerprint(members) != proposal.members_fingerprint(other)
    assert len(proposal.members_fingerprint(members)) == 39
