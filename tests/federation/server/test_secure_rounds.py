"""Rounds with secure aggregation, without a network: equal to plain rounds, with lost clients and curious servers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copfl import wire
from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import received
from copfl.errors import UsageError, WireError
from copfl.experiment.final import FINAL
from copfl.federation.node import secure_phases, secure_update
from copfl.federation.node.data import LoadData
from copfl.federation.node.node import Node
from copfl.federation.protocol import secure_total
from copfl.federation.protocol.messages import Reply
from copfl.federation.protocol.secure_members import Subject, context_of
from copfl.federation.protocol.secure_sum import PHASES
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder, as_text
from copfl.federation.server.rounds import new_server
from copfl.federation.server.secure_exchange import REVEALING
from copfl.wire import Head, Packet
from tests.federation.network import (
    CONFIG,
    DirectTransport,
    Played,
    digits,
    farthest,
    node_of,
    play,
    server_of,
    write_nodes,
)
from tests.toys import only_model

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

SECURE = CONFIG | {"secure.aggregation": True, "run.rounds": 2}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three nodes, whose state is separate in each run."""
    torch.set_num_threads(1)
    return write_nodes(digits(), tmp_path_factory.mktemp("nodes"))


def forged(packet: Packet, **fields: Any) -> Packet:
    """The packet with other fields and a checksum that fits them."""
    head = {**json.loads(packet.head), **fields}
    del head["sha256"]
    return Packet(wire._canonical({**head, "sha256": wire._checksum(head, packet.body)}), packet.body)


def kind(packet: Packet) -> str:
    return str(json.loads(packet.head).get("kind", ""))


@pytest.mark.parametrize("name", ["copfl", "fedavg", "fedper", "fedce", "ditto"])
def test_a_secure_round_is_a_plain_one_within_the_step(name: str, tmp_path: Path) -> None:
    config = {key: v for key, v in SECURE.items() if not key.startswith("optimizer")}
    config |= {"algorithm.name": name, "run.rounds": 1}
    if name == "copfl":
        config |= {"algorithm.budget": 0.5}  # masks that grow
    common = {"algorithm.merge": "common"} if name == "copfl" else {}  # as with secure aggregation
    plain = play(
        config | common | {"secure.aggregation": False},
        write_nodes(digits(), tmp_path / "a"),
        tmp_path / "plain",
    )
    secure = play(config, write_nodes(digits(), tmp_path / "b"), tmp_path / "secure")
    settings, expected = settings_of(config), plain.server
    if name == "copfl":  # a mask may differ where changes are equal within the step
        differing = expected.union ^ secure.server.union
        changes = (expected.w - settings.task.initial).abs()[differing]
        assert float(changes.max() - changes.min()) <= 6 * settings.rules.step
        expected = expected._replace(union=secure.server.union)
    assert farthest(expected, secure.server) <= 3 * settings.rules.step
    (record,), (plain_record,) = secure.records, plain.records
    assert record["clients"] == [0, 1, 2]
    for metric in ("accuracy", "loss", "weight"):
        assert record["mean"][metric] == pytest.approx(plain_record["mean"][metric], abs=1e-5)
    # Of a single client only the sizes of its messages are known.
    assert sorted(record["per_client"]) == ["bytes_down", "bytes_up"]
    assert all(record["secure_aggregation"][phase] == [0, 1, 2] for phase in PHASES)
    assert not (tmp_path / "secure" / "test" / "masks").exists()


def test_a_later_round_continues_from_the_sum(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    config = SECURE | {"session.run": "later", "secure.bits": 44, "algorithm.merge": "common"}
    plain = play(
        config | {"secure.aggregation": False}, write_nodes(digits(), tmp_path / "a"), tmp_path / "plain"
    )
    secure = play(config, nodes, tmp_path / "secure")
    # The second round's training amplifies the first one's step.
    assert farthest(plain.server, secure.server) <= 1e-4
    assert len(secure.records) == 2


def test_a_slow_phase_says_for_whom_it_waits_and_the_round_which_phase_took_longest(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(DirectTransport):
        """The last answer of each phase arrives at the second look."""

        def replies(self, message_ids: Collection[str]) -> list[Reply]:
            waiting = list(message_ids)
            return super().replies(waiting[:-1] if len(waiting) > 1 else waiting)

    monkeypatch.setattr("tests.federation.network.DirectTransport", Late)
    monkeypatch.setattr("copfl.federation.server.exchange.SLOW", 0.0)
    config = SECURE | {"session.run": "slow", "run.rounds": 1, "algorithm.name": "fedavg"}
    played = play(config, nodes, tmp_path / "slow")
    for phase in PHASES:
        assert f"round 1: phase {phase!r} waits for client 2, for 0 s already" in played.log
        assert f"round 1: phase {phase!r} has ended" in played.log
    phases = played.records[0]["secure_aggregation"]["phases"]
    assert list(phases) == list(PHASES)
    assert all(found["last"] == 2 and found["seconds"] >= 0 for found in phases.values())
    phases["masked"]["seconds"] = 31.0
    assert "s (31.0 s in phase 'masked', client 2 last)" in as_text(played.records[0])


def test_nobody_is_evaluated_alone_after_the_last_round(tmp_path: Path) -> None:
    """The log says how many clients the last mean is of."""
    config = SECURE | {
        "run.clients": 6,
        "run.participation": 0.5,
        "run.rounds": 1,
        "algorithm.name": "fedavg",
    }
    played = play(config, write_nodes(digits(6), tmp_path / "nodes"), tmp_path / "runs")
    assert played.log[-1] == "the last evaluation is the mean of 3 of 6 clients, those of the last round"
    assert "final" not in {kind(packet) for _, _, packet in played.transport.sent}
    assert not (tmp_path / "runs" / "test" / FINAL.file).exists()


SIX = SECURE | {"run.clients": 6, "network.min_replies": 3, "run.rounds": 1, "algorithm.name": "fedavg"}


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, ...]], Any]:
    """The server's record after a plain round of six clients without these."""

    @cache
    def server(lost: tuple[int, ...]) -> Any:
        def absent(client: int, _round: int, packet: Packet) -> Packet | str:
            return "Node Unavailable" if client in lost else packet

        folder = tmp_path_factory.mktemp("plain")
        nodes = write_nodes(digits(6), folder / "nodes")
        return play(SIX | {"secure.aggregation": False}, nodes, folder / "runs", absent).server

    return server


@pytest.mark.parametrize("phase", PHASES)
def test_six_clients_of_which_two_are_lost_in_a_phase(
    phase: str, plain_server: Callable[[tuple[int, ...]], Any], tmp_path: Path
) -> None:
    def fault(client: int, _round: int, packet: Packet) -> Packet | str:
        return "Node Unavailable" if client in (2, 5) and kind(packet) in (phase, "refused") else packet

    config = SIX | {"session.run": phase}
    secure = play(config, write_nodes(digits(6), tmp_path / "nodes"), tmp_path / "secure", fault)
    lost = () if phase in ("consistent", "revealed") else (2, 5)
    (record,) = secure.records
    assert record["left_out"] == list(lost)
    assert record["clients"] == [n for n in range(6) if n not in lost]
    assert farthest(plain_server(lost), secure.server) <= 6 * settings_of(config).rules.step


def test_too_few_before_the_end_begin_again(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    lost = iter(["Node Unavailable"] * 2)

    def fault(_client: int, _round: int, packet: Packet) -> Packet | str:
        return next(lost, packet) if kind(packet) == "masked" else packet

    played = play(SECURE | {"session.run": "again", "run.rounds": 1}, nodes, tmp_path, fault)
    assert played.records[0]["clients"] == [0, 1, 2]
    assert any("begins again with fresh keys: 1 clients answered" in line for line in played.log)


def test_too_few_at_the_end_leave_a_round_without_result(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    def fault(client: int, round: int, packet: Packet) -> Packet | str:
        return "Node Unavailable" if client and not round and kind(packet) == "revealed" else packet

    config = SECURE | {"session.run": "short"}
    first, second = play(config, nodes, tmp_path, fault).records
    assert first["clients"] == []
    assert "1 clients answered in phase 'revealed'" in first["secure_aggregation"]["failed"]
    assert second["clients"] == [0, 1, 2]  # its clients had not counted round 1


def test_a_server_killed_while_it_adds_up_goes_on_to_the_next_round(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    config = SECURE | {"session.run": "killed", "network.min_replies": 2}

    def die(_client: int, round: int, packet: Packet) -> Packet:
        if round == 1 and kind(packet) == "revealed":
            raise KeyboardInterrupt
        return packet

    with pytest.raises(KeyboardInterrupt):
        play(config, nodes, tmp_path, die)
    resumed = play(config | {"session.resume": True, "run.rounds": 3}, nodes, tmp_path)
    assert [r["clients"] for r in resumed.records] == [[], [0, 1, 2]]
    assert json.loads((tmp_path / "killed" / REVEALING).read_text()) == {"round": 2}


REASONS = {  # 1e12: the step is 29, and every weight of the model rounds to 0
    ("secure.range", 0.01): "a value is above 0.01, so the sum has no result; raise secure.range",
    ("secure.range", 1e12): "the values are too small for steps of 29; raise secure.",
    ("optimizer.lr", 1e30): "this node adds nothing to round 1, which has no result: its training diverged",
}


@pytest.mark.parametrize(("key", "value"), REASONS)
def test_values_that_do_not_fit_are_told_to_the_owner_alone(
    key: str, value: float, nodes: list[dict[str, Any]], tmp_path: Path, logged: list[str]
) -> None:
    """The server gets an answer of the same form from each phase, whatever the data gave."""
    config = SECURE | {"session.run": f"clipped-{value:.0f}", "run.rounds": 1, "run.batch": 64, key: value}
    played = play(config, nodes, tmp_path)
    assert sum(REASONS[key, value] in text for text in logged) == 3
    usual = play(SECURE | {"session.run": f"usual-{value:.0f}", "run.rounds": 1}, nodes, tmp_path)

    def forms(received: list[Packet]) -> list[tuple[str, list[str], int]]:
        heads = [json.loads(packet.head) for packet in received]
        answers = zip(heads, received, strict=True)
        return [(head["kind"], sorted(head["about"]), len(p.body)) for head, p in answers if "kind" in head]

    if key == "optimizer.lr":  # the entries of a vector have as many bytes as usual
        assert forms(played.transport.received) == forms(usual.transport.received)
    assert [form[:2] for form in forms(played.transport.received)] == [
        form[:2] for form in forms(usual.transport.received)
    ]
    assert [len(list(Path(n["state-dir"], config["session.run"]).glob("round-*"))) for n in nodes] == [1] * 3
    if value != 1e12:  # nobody added anything but random words
        assert "its own log says so" in played.records[0]["secure_aggregation"]["failed"]


# -- members that add numbers of their own -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "added", "why"),
    [
        ("w", 60_000.0, "the sum would change the model by"),
        ("w", 6_000.0, "the sum would change the model by"),
        ("size", -5_000.0, "size of the sum is -"),
        ("accuracy", -40.0, "it reports accuracy=-1"),
        ("accuracy", 3.0, "it reports accuracy=1."),
    ],
)
def test_a_sum_that_honest_clients_do_not_give_is_no_result(
    name: str, added: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member adds what it likes in the second of three rounds; the third goes on from the first."""
    nodes = write_nodes(digits(), tmp_path / "nodes")
    config = SECURE | {"algorithm.name": "fedavg", "run.rounds": 3}
    honest, calls = secure_total.sums_of, list[int]()

    def forged(total: Any, metrics: Any, rules: Any, **options: Any) -> Any:
        sums = honest(total, metrics, rules, **options)
        if options:  # of a node, not of the structure
            calls.append(1)
        if len(calls) != 4:  # the first of three clients in the second round
            return sums
        if name == "accuracy":
            return sums._replace(
                metrics=sums.metrics | {name: sums.metrics[name] + torch.tensor([added, 0.0])}
            )
        return sums._replace(total=sums.total._replace(**{name: getattr(sums.total, name) + added}))

    monkeypatch.setattr(secure_total, "sums_of", forged)
    played = play(config, nodes, tmp_path / "runs", stop=2)
    first, second = played.records
    assert first["clients"] == [0, 1, 2]
    assert second["clients"] == []
    assert why in second["secure_aggregation"]["failed"]
    assert "mean" not in second or "accuracy" not in second["mean"]
    monkeypatch.undo()
    after = play(config | {"session.resume": True}, nodes, tmp_path / "runs")
    assert after.records[0]["clients"] == [0, 1, 2]  # honest nodes go on
    assert after.records[0]["mean"]["accuracy"] >= first["mean"]["accuracy"] - 0.1
    assert "failed" not in after.records[0]["secure_aggregation"]


def test_metrics_beside_a_masked_vector_count_nowhere(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """They are in the sum, where they are checked: beside it one member could report what it likes."""

    def fault(client: int, _round: int, packet: Packet) -> Packet:
        if client or kind(packet) != "masked":
            return packet
        head = json.loads(packet.head)
        about = head["about"] | {"metrics": {"accuracy": -13.4, "auc": 0.99}, "note": "a note"}
        return forged(packet, about=about)

    config = SECURE | {"session.run": "beside", "run.rounds": 1}
    (record,) = play(config, nodes, tmp_path, fault).records
    assert record["clients"] == [0, 1, 2]
    assert record["per_client"].keys() == {"bytes_up", "bytes_down"}
    assert 0 < record["mean"]["accuracy"] < 1
    assert "auc" not in record["mean"]
    assert record["notes"] == {"0": "a note"}


# -- a curious server ----------------------------------------------------------------------------------------


class Client:
    """One of three nodes, and the messages that it has received."""

    def __init__(self, nodes: list[dict[str, Any]], runs: Path, run: str) -> None:
        self.played: Played = play(SECURE | {"session.run": run, "run.rounds": 1}, nodes, runs)
        self.node, self.settings = nodes[0], self.played.transport.settings
        sent = [packet for _, request, packet in self.played.transport.sent if request == "train"]
        self.requests = {kind(p): p for p in sent if json.loads(p.head)["client"] == 0}

    def ask(self, packet: Packet) -> Packet:
        return secure_update.round_answer(self.settings, node_of(self.node), packet)

    def changed(self, phase: str, round: int, about: dict[str, Any], session: str = "") -> Packet:
        from copfl import wire

        old = json.loads(self.requests[phase].head)["about"]
        head = Head(phase, self.settings.federation.session.run, self.settings.layout, round, 0)
        new = {**old, **about, **({"session": session} if session else {})}
        if phase != "down":
            return wire.encode((), head, about=new)
        settings = self.settings
        down = received(settings.algorithm, settings.algorithm.server_init(settings.task, 3), torch.tensor(0))
        return wire.encode(down, head, about=new)


def test_a_node_answers_each_phase_once(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    client = Client(nodes, tmp_path, "curious")
    assert client.ask(client.requests["revealed"]) == client.ask(client.requests["revealed"])
    for packet in (
        client.changed("revealed", 0, {"signature": {}}),
        client.changed("consistent", 0, {"survivors": [0, 1]}),  # the other secret of client 2
        client.requests["consistent"],
        client.requests["down"],
        client.requests["shares"],
        client.changed("keys", 0, {}),
        client.changed("revealed", 1, {}, session="another"),
    ):
        with pytest.raises(WireError, match="out of turn"):
            client.ask(packet)
    client.ask(client.changed("keys", 1, {}, session="another"))  # the next round
    with pytest.raises(WireError, match="out of turn"):
        client.ask(client.changed("revealed", 1, {}, session="another"))


def test_a_second_run_without_one_client_ends_without_a_sum(tmp_path: Path) -> None:
    """Its difference from the first run would be the upload of that client, to a step."""
    config = SECURE | {
        "run.clients": 4,
        "algorithm.name": "fedavg",
        "run.rounds": 1,
        "network.min_replies": 3,
    }
    nodes = write_nodes(digits(4), tmp_path / "nodes")
    play(config | {"session.run": "first"}, nodes, tmp_path)
    settings = settings_of(config | {"session.run": "second"})
    transport, log = DirectTransport(settings, dict(enumerate(nodes[:3], 100))), list[str]()

    def stop(line: str, /, event: str = "", **fields: Any) -> None:
        log.append(line)
        if "begins again" in line:
            raise KeyboardInterrupt

    server = new_server(
        settings, transport, ServerFolder(str(tmp_path), "second", resume=False), stop, pause=0
    )
    with pytest.raises(KeyboardInterrupt):
        next(server.rounds())
    assert sum("ask the node's owner to set cohort-changes=1" in line for line in log) == 3
    assert not any(kind(packet) == "masked" for packet in transport.received)


def test_all_clients_are_waited_for_unless_fewer_are_enough() -> None:
    assert settings_of(SECURE | {"network.min_replies": 0}).federation.minimum == 3
    assert settings_of(SECURE | {"network.min_replies": 2}).federation.minimum == 2


def test_all_phases_of_a_sum_have_the_same_settings(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request under another run config: the masks of two vectors would cancel out.

    And with the smaller threshold of another run config, a few clients at a time would agree on the members:
    of twelve clients, each of four groups of three on itself and the victim, so that all secrets are
    revealed.
    """
    config = SECURE | {"session.run": "vector", "run.rounds": 1, "algorithm.name": "fedavg"}
    changes = {
        "optimizer.lr": 1e-30,
        "run.seed": 1,
        "secure.range": 1024.0,
        "secure.bits": 44,
        "run.clients": 4,
    }
    others = [settings_of(config | {key: value}) for key, value in changes.items()]
    answers, local_update = list[str](), secure_update.round_answer

    def refused(node: Node, packet: Packet) -> None:
        for other in others:
            with pytest.raises(WireError, match="settings have changed"):
                local_update(other, node, packet)

    def twice(settings: Any, node: Node, packet: Packet, load_data: LoadData) -> Packet:
        if node.config.client == 0 and kind(packet) != "keys":
            refused(node, packet)
        reply = local_update(settings, node, packet, load_data)
        if node.config.client == 0:
            refused(node, packet)
            assert local_update(settings, node, packet) == reply
            answers.append(kind(packet))
        return reply

    monkeypatch.setattr(secure_update, "round_answer", twice)
    assert play(config, nodes, tmp_path).records[0]["clients"] == [0, 1, 2]
    assert answers == ["keys", "shares", "down", "consistent", "revealed"]


def test_the_masks_of_a_sum_are_on_one_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same request after the data have changed: the masks of two vectors would cancel out."""
    nodes, local_update = write_nodes(digits(), tmp_path / "nodes"), secure_update.round_answer
    answers: list[Packet] = []

    def twice(settings: Any, node: Node, packet: Packet, load_data: LoadData) -> Packet:
        reply = local_update(settings, node, packet, load_data)
        if kind(packet) == "down" and node.config.client == 0:
            with pytest.raises(WireError, match="the same masks"):
                local_update(settings, node_of(nodes[0] | {"data": nodes[1]["data"]}), packet)
            answers.append(reply)
        return reply

    monkeypatch.setattr(secure_update, "round_answer", twice)
    assert play(SECURE | {"run.rounds": 1}, nodes, tmp_path).records[0]["clients"] == [0, 1, 2]
    assert len(answers) == 1


@pytest.mark.parametrize(
    "keys", [{"model.max_length": 3}, {"adapter.alpha": 1e-6}, {"algorithm.weights": "equal"}]
)
def test_members_that_were_shown_other_options_have_no_sum(keys: dict[str, Any]) -> None:
    """The layout has none of them. Adapters of a tiny scale do not train, so all others' uploads would be known."""
    if "adapter.alpha" in keys:
        pytest.importorskip("peft", reason='peft is not installed: pip install "copfl[pretrained]"')
    small = {
        "algorithm.name": "fedavg",
        "model.name": "resnet18",
        "model.width": 8,
        "adapter.name": "lora:r=2",
    }
    settings, other = (settings_of(SECURE | small | changed) for changed in ({}, keys))
    assert settings.layout == other.layout
    first, second = (context_of(one, Subject("r", 0, "s"), {}, b"") for one in (settings, other))
    assert first != second


def test_paths_of_a_machine_are_not_in_the_context() -> None:
    settings = settings_of(SECURE | {"algorithm.name": "fedavg"})
    contexts = set()
    for place in ("hf:/a", "hf:/b"):  # a base in other folders
        model = dataclasses.replace(settings.run.model, name=place)
        federation = dataclasses.replace(
            settings.federation, run=dataclasses.replace(settings.run, model=model)
        )
        shown = dataclasses.replace(settings, federation=federation)
        contexts.add(context_of(shown, Subject("r", 0, "s"), {}, b""))
    assert len(contexts) == 1


def test_secrets_are_private_and_end_with_the_sum(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    play(SECURE | {"session.run": "ended", "run.rounds": 1}, nodes, tmp_path)
    path = Path(nodes[0]["state-dir"]) / "ended" / secure_phases.FILE
    assert json.loads(path.read_text())["secrets"] is None
    assert path.stat().st_mode & 0o077 == 0


def test_the_server_receives_noise(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """The bodies of one client's messages, and those of a second run with the same upload and fresh keys."""

    def body(run: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        played = play(
            SECURE | {"session.run": run, "run.rounds": 1},
            write_nodes(digits(), tmp_path / run),
            tmp_path / "runs",
        )
        (packet,) = [p for p in played.transport.received if kind(p) == "masked" and '"client":1' in p.head]
        size = int.from_bytes(packet.body[:8], "little")  # of safetensors' own head
        return np.frombuffer(packet.body, np.uint8)[8 + size :]

    first, second = body("first"), body("second")
    expected = len(first) / 256
    statistic = ((np.bincount(first, minlength=256) - expected) ** 2 / expected).sum()
    assert 160 < statistic < 376  # 255 degrees of freedom: beyond both 1e-6 quantiles
    assert abs(int((first == second).sum()) - expected) < 6 * expected**0.5


# -- what is refused -----------------------------------------------------------------------------------------

NOT_SUMS = {"reads": "every upload", "ktpfl": "part for every client", "fedcalm": "part for every client"}
NOT_SUMS |= {"fedpac": "part for every client"}
NOT_SUMS |= dict.fromkeys(("fedselect", "ifca", "scaffold"), "more than the weighted sum")


@pytest.mark.parametrize("name", sorted(n for n, a in ALGORITHMS.items() if not getattr(a, "needs", ())))
def test_exactly_the_algorithms_whose_totals_are_sums_are_allowed(name: str, tmp_path: Path) -> None:
    config = {key: v for key, v in SECURE.items() if not key.startswith("optimizer")} | {
        "algorithm.name": name
    }
    if only := only_model(ALGORITHMS[name]):
        config = {key: v for key, v in config.items() if key != "model.width"} | {"model.name": only}
    if name == "ktpfl":
        np.savez(tmp_path / "public.npz", x=np.zeros((4, 1, 8, 8), np.uint8))
        config["samples.public"] = str(tmp_path / "public.npz")
    if name in NOT_SUMS:
        with pytest.raises(UsageError, match=f'not possible with "{name}": .*{NOT_SUMS[name]}'):
            settings_of(config)
    else:
        settings_of(config)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"robust.name": "median"}, "compares single uploads"),
        ({"robust.name": "clip"}, "compares single uploads"),
        ({"algorithm.max_weight": 0.5}, "its own record"),
        ({"algorithm.merge": "sharers"}, "more than the weighted sum.*set algorithm.merge=common"),
        ({"algorithm.criterion": "benefit"}, "merge='common' chooses the mask from the mean"),
        ({"secure.threshold": 1}, "must be 2 to 3"),
        ({"secure.bits": 60}, "2 to 48"),
        ({"secure.neighbours": -2}, "at least 0"),
        ({"run.participation": 0.5, "network.min_replies": 1}, "at least 3 clients"),
        ({"run.clients": 12, "secure.neighbours": 4, "secure.threshold": 3}, "needs at least 50 clients"),
    ],
)
def test_what_is_not_secure_is_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        settings_of(SECURE | keys)


def test_a_node_without_metrics_is_not_in_their_mean(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    config = SECURE | {"session.run": "silent", "run.rounds": 1}
    (record,) = play(config, [n | {"metrics": False} for n in nodes], tmp_path).records
    assert "accuracy" not in record["mean"]
    assert server_of(settings_of(config), tmp_path).w.isfinite().all()
