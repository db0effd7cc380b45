"""The server's rounds and the nodes' local updates without a network: equal to the simulation, with faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import copfl
from copfl import wire
from copfl.algorithms import ALGORITHMS
from copfl.algorithms.fedavg import FedAvg
from copfl.core import tree
from copfl.core.evaluation import vectors_of
from copfl.data.clients.federation import FederatedData
from copfl.engine.mapping import sequential
from copfl.engine.rounds import State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import DataError, RunError, UsageError, WireError
from copfl.experiment import final, records
from copfl.experiment.final import FINAL
from copfl.federation.node import secure_update, update
from copfl.federation.node.data import node_data
from copfl.federation.node.incoming import message_like
from copfl.federation.node.records import ClientRecords
from copfl.federation.protocol.events import silent
from copfl.federation.protocol.messages import TRAIN
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.registry import Registry
from copfl.federation.server.rounds import new_server
from copfl.parts.server_steps import SERVER_STEPS
from copfl.settings import named_code
from copfl.wire import Head, Packet
from tests.federation.network import (
    CONFIG,
    DirectTransport,
    Played,
    client_of,
    digits,
    farthest,
    kept,
    node_of,
    play,
    server_of,
    simulated,
    write_nodes,
)
from tests.kinds import quick
from tests.toys import only_model


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def federation() -> FederatedData:
    return digits()


class Undisturbed(NamedTuple):
    """Three rounds of CO-PFL in which nothing fails."""

    played: Played
    nodes: list[dict[str, Any]]


@pytest.fixture(scope="module")
def undisturbed(federation: FederatedData, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    nodes = write_nodes(federation, folder / "n")
    return Undisturbed(play(CONFIG, nodes, folder / "runs"), nodes)


@pytest.fixture(scope="module")
def expected(federation: FederatedData) -> State:
    """The same three rounds in the simulation."""
    return simulated(settings_of(CONFIG), federation)


def for_algorithm(name: str) -> dict[str, Any]:
    """The run config for an algorithm with its own optimizer."""
    return {key: value for key, value in CONFIG.items() if not key.startswith("optimizer")} | {
        "algorithm.name": name,
        "run.rounds": 2,
        "run.eval_every": 2,
    }


# -- equal to the simulation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick(sorted(ALGORITHMS), others=pytest.mark.job))
@named_code.scope()
def test_every_algorithm_ends_where_the_simulation_does(
    name: str, federation: FederatedData, tmp_path: Path
) -> None:
    config = for_algorithm(name)
    if getattr(ALGORITHMS[name], "needs", ()):
        config["model.name"] = "tests.toys:adapted_mlp"
        named_code.name("tests.toys")
    if only := only_model(ALGORITHMS[name]):
        config = {key: v for key, v in config.items() if key != "model.width"} | {"model.name": only}
    nodes = write_nodes(federation, tmp_path / "nodes")
    if name == "ktpfl":
        np.savez(tmp_path / "public.npz", x=federation.dataset.test.x[:8])
        config["samples.public"] = str(tmp_path / "public.npz")
    records, server, *_ = play(config, nodes, tmp_path / "runs")
    settings = settings_of(config)
    state = simulated(settings, federation)
    assert [r["clients"] for r in records] == [[0, 1, 2]] * 2
    assert farthest(server, state.server) <= 1e-5
    rows = state.clients.rows(torch.arange(3))
    for client, node_config in enumerate(nodes):
        assert farthest(client_of(settings, node_config, client, 1), tree.row(rows, client)) <= 1e-5


@pytest.mark.job
@pytest.mark.parametrize("name", sorted(SERVER_STEPS))
def test_every_server_step_ends_where_the_simulation_does(
    name: str, federation: FederatedData, tmp_path: Path
) -> None:
    config = for_algorithm("fedper") | {"server.name": name, "run.rounds": 3}
    _, server, *_ = play(config, write_nodes(federation, tmp_path / "n"), tmp_path / "runs")
    settings = settings_of(config)
    assert settings.run.server.name == name
    assert farthest(server, simulated(settings, federation).server) <= 1e-5


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_local_steps_go_on_as_in_the_simulation(
    participation: float, federation: FederatedData, tmp_path: Path
) -> None:
    """The clients have 200 to 800 samples, and take 2 steps of 256 in each of four rounds, in some of them at most."""
    config = for_algorithm("ditto") | {"run.steps": 2, "run.rounds": 4, "run.participation": participation}
    config["network.min_replies"] = 2
    nodes = write_nodes(federation, tmp_path / "nodes")
    _, server, *_ = play(config, nodes, tmp_path / "runs")
    settings = settings_of(config)
    state = simulated(settings, federation)
    assert farthest(server, state.server) <= 1e-5
    rows = state.clients.rows(torch.arange(3))
    assert rows.done.sum() == (24 if participation == 1 else 16)  # of three clients in four rounds, or of two
    for client, node_config in enumerate(nodes):
        last = max(ClientRecords(Path(node_config["state-dir"]), "test").rounds())
        assert farthest(client_of(settings, node_config, client, last), tree.row(rows, client)) <= 1e-5


def test_a_round_may_ask_some_clients_only(federation: FederatedData, tmp_path: Path) -> None:
    config = CONFIG | {"run.participation": 0.5, "network.min_replies": 2, "run.rounds": 4}
    records, server, *_ = play(config, write_nodes(federation, tmp_path / "n"), tmp_path / "runs")
    assert all(len(r["clients"]) == 2 for r in records)
    assert farthest(server, simulated(settings_of(config), federation).server) <= 1e-5


@pytest.mark.parametrize("every", [1, 2])
def test_after_the_last_round_who_was_not_evaluated_is(every: int, tmp_path: Path) -> None:
    """To the values of a simulation's `final.json`; one member keeps its metrics."""
    config = for_algorithm("fedper") | {"run.clients": 6, "run.participation": 1 / 3, "run.eval_every": every}
    config |= {"network.min_replies": 2, "task.metrics": "accuracy,auc"}
    federation, settings = digits(6), settings_of(config)
    state = begin(settings.algorithm, settings.task, 6)
    simulation = Simulation(settings.algorithm, settings.task, federation, sequential(), seed=0, batch=256)
    rounds = simulate(simulation, state, rounds=2, participation=1 / 3, eval_every=every)
    expected = final.evaluated(simulation, state, settings.run.run, [records.as_record(r) for r in rounds])
    assert expected is not None
    silent_one, *others = expected.clients
    assert others
    nodes = write_nodes(federation, tmp_path / "nodes")
    nodes[silent_one]["metrics"] = False
    played = play(config, nodes, tmp_path / "runs")
    found = FINAL.read(tmp_path / "runs" / "test", 2, 6)
    assert found is not None
    assert (found.clients, found.never_trained) == (others, expected.never_trained)
    for name in ("accuracy", "auc", "test_loss", "accuracy_global"):
        np.testing.assert_allclose(found.values[name], expected.values[name][1:], atol=1e-6)
    asked = [json.loads(packet.head) for _, _, packet in played.transport.sent]
    assert [head["client"] for head in asked if head.get("kind") == "final"] == expected.clients
    assert "in the mean of 5 of 6 clients" in played.log[-1]
    for client, accuracy in zip(expected.clients, expected.values["accuracy"], strict=True):
        kept_scores = copfl.load(nodes[client]["state-dir"]).description.scores  # its bundle is of this model
        assert {s.metric: s.value for s in kept_scores}["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    # A run that goes on with more rounds begins with the same model, and trains on it.
    more = play(config | {"run.rounds": 3, "session.resume": True}, nodes, tmp_path / "runs")
    assert [record["round"] for record in more.records] == [3]


def test_after_the_last_round_a_node_evaluates_one_model(federation: FederatedData, tmp_path: Path) -> None:
    config = for_algorithm("fedper") | {"run.rounds": 1, "run.participation": 0.5, "network.min_replies": 1}
    nodes = write_nodes(federation, tmp_path / "nodes")
    played = play(config, nodes, tmp_path / "runs")
    asked = [(number, packet) for number, _, packet in played.transport.sent if '"final"' in packet.head]
    assert asked
    (number, packet), settings = asked[0], played.transport.settings
    node, head = node_of(nodes[number - 100]), Head("final", "test", settings.layout, 1, number - 100)
    assert secure_update.round_answer(settings, node, packet) in played.transport.received
    opened = wire.decode(packet, message_like(settings, head.client), head)
    other = wire.encode(tree.each(lambda t: t + 1, opened.record), head, about=opened.about)
    with pytest.raises(WireError, match="asked for round 2 with another model"):
        secure_update.round_answer(settings, node, other)
    earlier = wire.encode(opened.record, head._replace(round=0), about=opened.about)
    with pytest.raises(WireError, match="the run ends after 1"):
        secure_update.round_answer(settings, node, earlier)


@pytest.mark.parametrize(("name", "limit"), [("fp16", 0.001), ("bf16", 0.004)])
def test_narrow_numbers_save_bytes_and_change_little(
    name: str, limit: float, federation: FederatedData, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    wide = undisturbed.played
    narrow = play(
        CONFIG | {"network.wire": name, "session.run": name},
        write_nodes(federation, tmp_path / "b"),
        tmp_path / "runs",
    )
    assert 0 < float((wide[1].w - narrow[1].w).abs().mean()) < limit
    # An entry that one client shares: its weight, rounded in a message, is no weight of others.
    assert float(narrow[1].score) == pytest.approx(float(wide[1].score), rel=0.02)
    assert narrow[0][-1]["bytes"]["down"] < 0.6 * wide[0][-1]["bytes"]["down"]


def test_the_bytes_in_the_record_are_those_that_travelled(undisturbed: Undisturbed) -> None:
    records, _, _, transport = undisturbed.played
    uploads = [p for p in transport.received if '"kind":"upload"' in p.head]
    downs = [p for _, question, p in transport.sent if question == "train"]
    assert sum(r["bytes"]["up"] for r in records) == sum(p.nbytes for p in uploads)
    assert sum(r["bytes"]["down"] for r in records) == sum(p.nbytes for p in downs)


def test_the_simulation_counts_the_same_bytes(federation: FederatedData, tmp_path: Path) -> None:
    """Up and down, by client, in rounds in which masks are sent and in rounds in which they are not."""
    config = CONFIG | {"run.rounds": 5, "model.width": 128, "algorithm.interval": 2}
    records, _, _, _ = play(config, write_nodes(federation, tmp_path / "n"), tmp_path / "runs")
    settings = settings_of(config)
    state = begin(settings.algorithm, settings.task, 3)
    shown = simulate(
        Simulation(settings.algorithm, settings.task, federation, sequential(), batch=256), state, rounds=5
    )
    for record, round in zip(records, shown, strict=True):
        for name in ("bytes_up", "bytes_down"):
            assert record["per_client"][name] == pytest.approx(round.clients[name].tolist(), rel=0.02)


def test_no_personal_coordinate_leaves_a_node(undisturbed: Undisturbed) -> None:
    """Every message of the last round, as bytes, against every personal value of the nodes."""
    settings, received = settings_of(CONFIG), undisturbed.played.transport.received
    content = b"".join(p.head.encode() + p.body for p in received[-3:])
    for client, node_config in enumerate(undisturbed.nodes):
        record = client_of(settings, node_config, client, 2)
        personal, shared = record.w[record.mask].numpy(), record.w[~record.mask].numpy()
        assert len(personal) == 16 * 10 + 10  # the head
        assert not any(value.tobytes() in content for value in personal)
        assert sum(value.tobytes() in content for value in shared) == len(shared)


def test_a_mask_travels_again_only_when_it_changed(federation: FederatedData, tmp_path: Path) -> None:
    config = CONFIG | {
        "run.rounds": 5,
        "algorithm.budget": 0.5,
        "algorithm.warmup": 1,
        "algorithm.interval": 3,
    }  # it grows in the second and fifth round
    _, _, _, transport = play(config, write_nodes(federation, tmp_path / "n"), tmp_path / "runs")
    uploads = [p for p in transport.received if '"kind":"upload"' in p.head]
    sent = [b"shared#mask" in p.body for p in uploads]
    assert sent == [True] * 3 + [True] * 3 + [False] * 6 + [True] * 3


# -- refusals ------------------------------------------------------------------------------------------------


def forged(packet: Packet, **fields: Any) -> Packet:
    """The packet with other fields and a checksum that fits them."""
    head = {**json.loads(packet.head), **fields}
    del head["sha256"]
    return Packet(wire._canonical({**head, "sha256": wire._checksum(head, packet.body)}), packet.body)


def not_finite(packet: Packet) -> Packet:
    from safetensors.torch import load, save

    tensors = load(packet.body)
    tensors["shared"][0] = float("nan")
    return forged(Packet(packet.head, save(tensors)))


def nested(packet: Packet, depth: int) -> Packet:
    """The packet with an unknown field of so many tables within each other."""
    deep = '{"a":' * depth + "1" + "}" * depth
    return Packet(packet.head.replace('"about":{', f'"about":{{"deep":{deep},', 1), packet.body)


old: list[Packet] = []


def replayed(packet: Packet) -> Packet:
    return old[0]


FAULTS: dict[str, tuple[Any, str]] = {
    "corrupted": (lambda p: Packet(p.head, p.body[:-1] + bytes([p.body[-1] ^ 1])), "damaged on its way"),
    "truncated": (lambda p: Packet(p.head, p.body[: len(p.body) // 2]), "damaged on its way"),
    "headless": (lambda p: Packet("", p.body), "head cannot be read"),
    "deep": (lambda p: nested(p, 64), "deeper than 64 levels"),
    "version": (lambda p: forged(p, format=2), "format 2"),
    "model": (lambda p: forged(p, layout="0123"), "its layout is '0123'"),
    "run": (lambda p: forged(p, run="other"), "its run is 'other'"),
    "client": (lambda p: forged(p, client=2), "its client is 2; expected 1"),
    "not finite": (not_finite, "NaN or infinity"),
    "replayed": (replayed, "its round is 0; expected 1"),
    "no reply": (lambda p: "Flower reports: node unavailable", "node unavailable"),
    "late": (lambda p: None, "no reply within"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_upload_is_refused_and_recorded_and_the_run_continues(
    fault: str, federation: FederatedData, tmp_path: Path
) -> None:
    """Client 1's second upload is changed: the round counts the others, the next round counts it again."""
    change, expected = FAULTS[fault]
    old.clear()

    def tamper(client: int, round: int, packet: Packet) -> Packet | str | None:
        if client == 1 and round == 0:
            old.append(packet)
        result: Packet | str | None = change(packet) if (client, round) == (1, 1) else packet
        return result

    config = CONFIG | {"network.min_replies": 2, "network.deadline": 0.3 if fault == "late" else 60}
    nodes = write_nodes(federation, tmp_path / "n")
    records, server, *_ = play(config, nodes, tmp_path / "runs", tamper)
    assert [r["clients"] for r in records] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert records[1]["left_out"] == [1]
    assert expected in records[1]["why"]["1"]
    assert all(bool(torch.isfinite(t).all()) for t in tree.leaves(server))
    # The upload that was not counted has no effect: client 1 continued from its first round.
    assert client_of(settings_of(config), nodes[1], 1, 2).round == 2
    assert sorted(p.name for p in Path(nodes[1]["state-dir"], "test").glob("round*")) == [
        "round-000000.copfl",
        "round-000002.copfl",
    ]


def test_numbers_that_give_no_model_are_no_result(
    federation: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's step may have no solution for numbers of one client: the next round begins at the model before."""
    honest, calls = FedAvg.server_update, list[int]()

    def unsolvable(self: Any, task: Any, server: Any, total: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            torch.linalg.cholesky(torch.full((2, 2), -1.0))
        after, metrics = honest(self, task, server, total)
        return (after._replace(w=after.w * torch.inf) if len(calls) == 3 else after), metrics

    monkeypatch.setattr(FedAvg, "server_update", unsolvable)
    nodes = write_nodes(federation, tmp_path / "n")
    config = for_algorithm("fedavg") | {"run.rounds": 4, "run.eval_every": 1}
    records, server, log, transport = play(config, nodes, tmp_path / "runs")
    assert [r["clients"] for r in records] == [[0, 1, 2], [], [], [0, 1, 2]]
    assert "give no model" in records[1]["why"]["0"]
    assert "would not be finite" in records[2]["why"]["2"]
    assert sum("has no result" in line for line in log) == 2
    down = [p.body for _, request, p in transport.sent if request == TRAIN]
    assert down[3] == down[6] == down[9]  # what a client receives in the second, third and fourth round
    monkeypatch.undo()
    undisturbed = play(
        config | {"run.rounds": 1}, write_nodes(federation, tmp_path / "m"), tmp_path / "other"
    )
    assert farthest(undisturbed.server, server) > 0


def test_a_node_whose_own_model_breaks_declines_as_in_the_simulation(
    federation: FederatedData, tmp_path: Path
) -> None:
    """Local training shares nothing but a count: only the client's record shows that it diverged."""
    config = CONFIG | {"algorithm.name": "local", "run.rounds": 1, "run.batch": 64}
    _, _, _, transport = play(config, write_nodes(federation, tmp_path / "n"), tmp_path / "runs")
    asked = next(packet for _, question, packet in transport.sent if question == TRAIN)
    settings, others = (
        settings_of(config | {"optimizer.lr": 1e30}),
        write_nodes(federation, tmp_path / "others"),
    )
    with pytest.raises(WireError, match="its training diverged: its model or its upload is not finite"):
        update.local_update(settings, node_of(others[0]), asked)
    assert not list(Path(others[0]["state-dir"]).rglob("*.copfl"))
    state = begin(settings.algorithm, settings.task, 3)
    shown = next(
        simulate(
            Simulation(settings.algorithm, settings.task, federation, sequential(), batch=64), state, rounds=1
        )
    )
    assert shown.clients["healthy"].tolist() == [0, 0, 0]


def test_a_failing_node_changes_nothing_for_the_others(federation: FederatedData, tmp_path: Path) -> None:
    """All faults at once give the same server: that of a round without client 1."""
    servers = []
    for fault in ("corrupted", "not finite", "no reply"):
        change = FAULTS[fault][0]
        nodes = write_nodes(federation, tmp_path / fault)

        def tamper(client: int, round: int, packet: Packet, change: Any = change) -> Packet:
            return change(packet) if (client, round) == (1, 1) else packet

        servers.append(play(CONFIG | {"network.min_replies": 2}, nodes, tmp_path / fault / "runs", tamper)[1])
    assert farthest(servers[0], servers[1]) == farthest(servers[0], servers[2]) == 0


def test_below_the_minimum_a_round_waits_and_logs_it(
    federation: FederatedData, expected: State, tmp_path: Path
) -> None:
    """Client 1 fails three times; the round asks it again, and ends as an undisturbed round does."""
    failures = iter(range(3))

    def tamper(client: int, round: int, packet: Packet) -> Packet | str | None:
        return "out of order" if (client, round) == (1, 1) and next(failures, None) is not None else packet

    records, server, log, _ = play(CONFIG, write_nodes(federation, tmp_path / "n"), tmp_path / "runs", tamper)
    assert [r["clients"] for r in records] == [[0, 1, 2]] * 3
    assert any("round 2 waits: 2 of the 3 replies it needs" in text for text in log)
    assert farthest(server, expected.server) <= 1e-5


# -- restarts ------------------------------------------------------------------------------------------------


class Crash(Exception):
    pass


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_server_that_crashed_in_mid_round_ends_as_an_undisturbed_one(
    at: int, federation: FederatedData, expected: State, tmp_path: Path
) -> None:
    """It dies after some of the clients have trained and written their records, and while it wrote a line."""

    def crash(client: int, round: int, packet: Packet) -> Packet:
        if (client, round) == (at, 1):
            raise Crash
        return packet

    nodes = write_nodes(federation, tmp_path / "n")
    with pytest.raises(Crash):
        play(CONFIG, nodes, tmp_path / "runs", crash)
    with (tmp_path / "runs" / "test" / "rounds.jsonl").open("a") as lines:
        lines.write('{"round":2,"cli')
    records, server, *_ = play(CONFIG | {"session.resume": True}, nodes, tmp_path / "runs")
    assert [r["round"] for r in records] == [2, 3]
    assert [r["round"] for r in ServerFolder(str(tmp_path / "runs"), "test", resume=True).rounds()] == [
        1,
        2,
        3,
    ]
    assert farthest(server, expected.server) <= 1e-5
    rows = expected.clients.rows(torch.arange(3))
    for client, config in enumerate(nodes):
        assert farthest(client_of(settings_of(CONFIG), config, client, 2), tree.row(rows, client)) <= 1e-5


def test_a_server_that_lost_its_masks_gets_them_again(
    federation: FederatedData, expected: State, tmp_path: Path
) -> None:
    nodes = write_nodes(federation, tmp_path / "n")
    play(CONFIG | {"run.rounds": 2}, nodes, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "test" / "masks")
    records, server, *_ = play(CONFIG | {"session.resume": True}, nodes, tmp_path / "runs")
    assert records[0]["clients"] == [0, 1, 2]
    assert farthest(server, expected.server) <= 1e-5


def test_a_run_is_not_started_twice(federation: FederatedData, tmp_path: Path) -> None:
    nodes = write_nodes(federation, tmp_path / "n")
    play(CONFIG | {"run.rounds": 1}, nodes, tmp_path / "runs")
    with pytest.raises(RunError, match="already holds rounds of this run"):
        play(CONFIG, nodes, tmp_path / "runs")
    with pytest.raises(RunError, match="there is no checkpoint"):
        play(CONFIG | {"session.run": "other", "session.resume": True}, nodes, tmp_path / "runs")


def test_a_node_that_lost_its_folder_starts_again_and_reports_it(
    federation: FederatedData, tmp_path: Path
) -> None:
    nodes = write_nodes(federation, tmp_path / "n")
    play(CONFIG | {"run.rounds": 2}, nodes, tmp_path / "runs")
    shutil.rmtree(nodes[1]["state-dir"])
    records, _, _, _ = play(CONFIG | {"session.resume": True}, nodes, tmp_path / "runs")
    assert records[0]["clients"] == [0, 1, 2]
    assert "started again: it has no record of round 2" in records[0]["notes"]["1"]


def test_a_damaged_record_is_refused_by_its_node(federation: FederatedData, tmp_path: Path) -> None:
    nodes = write_nodes(federation, tmp_path / "n")
    play(CONFIG | {"run.rounds": 2}, nodes, tmp_path / "runs")
    path = Path(nodes[1]["state-dir"], "test", "round-000001.copfl")
    path.write_bytes(path.read_bytes()[:-5])
    records, _, _, _ = play(
        CONFIG | {"session.resume": True, "network.min_replies": 2}, nodes, tmp_path / "runs"
    )
    assert records[0]["clients"] == [0, 2]
    assert "cannot be used" in records[0]["why"]["1"]


def test_an_old_message_does_not_set_a_node_back(federation: FederatedData, tmp_path: Path) -> None:
    nodes = write_nodes(federation, tmp_path / "n")
    _, _, _, transport = play(CONFIG, nodes, tmp_path / "runs")
    first = next(p for n, q, p in transport.sent if n == 100 and q == "train")
    with pytest.raises(RunError, match=r"already taken part in round 3.*asked for round 1"):
        update.local_update(settings_of(CONFIG), node_of(nodes[0]), first)


def test_the_name_of_a_run_leads_to_no_other_folder(federation: FederatedData, tmp_path: Path) -> None:
    nodes = write_nodes(federation, tmp_path / "n")
    _, _, _, transport = play(CONFIG, nodes, tmp_path / "runs")
    first = next(p for n, q, p in transport.sent if n == 100 and q == "train")
    fields = {**wire.opened_head(first), "run": "../other"}
    head = wire._canonical({**fields, "sha256": wire._checksum(fields, first.body)})
    with pytest.raises(WireError, match="not a plain name"):
        update.local_update(settings_of(CONFIG), node_of(nodes[0]), first._replace(head=head))
    assert not (tmp_path / "n" / "other").exists()


def test_a_server_that_lost_rounds_sets_its_nodes_back(federation: FederatedData, tmp_path: Path) -> None:
    """The checkpoint after round 2 of 4 is restored; the nodes return to it, if they are asked to."""
    nodes, checkpoint = write_nodes(federation, tmp_path / "n"), tmp_path / "runs" / "test" / "server.copfl"
    play(CONFIG | {"run.rounds": 2}, nodes, tmp_path / "runs")
    earlier = checkpoint.read_bytes()
    play(CONFIG | {"run.rounds": 4, "session.resume": True}, nodes, tmp_path / "runs")
    expected = server_of(settings_of(CONFIG), tmp_path / "runs")
    checkpoint.write_bytes(earlier)

    config = CONFIG | {"run.rounds": 4, "session.resume": True}
    records: list[str] = []
    with pytest.raises(Crash):  # it would wait for ever
        play(config, nodes, tmp_path / "runs", declined_by_all(records))
    assert all("resume with rollback=true" in text for text in records)
    again = play(config | {"session.rollback": True}, nodes, tmp_path / "runs")
    assert [r["round"] for r in again.records] == [3, 4]
    assert [r["clients"] for r in again.records] == [[0, 1, 2]] * 2
    assert farthest(again.server, expected) == 0
    assert not any(r["notes"] for r in again.records)  # no node started again


def declined_by_all(seen: list[str]) -> Any:
    """Remembers what the nodes answer, and ends the server after three answers."""

    def fault(client: int, round: int, packet: Packet) -> Packet:
        seen.append(packet.head)
        if len(seen) == 3:
            raise Crash
        return packet

    return fault


def test_a_node_keeps_the_last_counted_records(federation: FederatedData, tmp_path: Path) -> None:
    nodes = write_nodes(federation, tmp_path / "n")
    play(CONFIG | {"run.rounds": 6}, nodes, tmp_path / "runs")
    kept = sorted(int(p.stem[-6:]) for p in Path(nodes[0]["state-dir"], "test").glob("round*"))
    assert kept == [2, 3, 4, 5]


EVIL = "\x1b[2J\nround 9: client 0 \u202e" + "x" * 100_000


@pytest.mark.parametrize(
    "answer",
    [
        Packet(json.dumps({"refused": EVIL}), b""),
        Packet(json.dumps({"format": EVIL}), b""),
        Packet(json.dumps({"refused": "x" * 2**21}), b""),
        EVIL,
    ],
)
def test_the_text_of_another_machine_is_escaped_and_cut(
    answer: Packet | str, federation: FederatedData, tmp_path: Path
) -> None:
    """A node's refusal, its fields and Flower's report of its error: in the log, in the record, on a line."""

    def tamper(client: int, round: int, packet: Packet) -> Packet | str:
        return answer if client == 1 else packet

    config = CONFIG | {"network.min_replies": 2, "run.rounds": 1}
    records, _, log, _ = play(config, write_nodes(federation, tmp_path / "n"), tmp_path / "runs", tamper)
    for text in (*log, records[0]["why"]["1"]):
        assert text.isprintable()
        assert len(text) < 700


# -- clients that come and go --------------------------------------------------------------------------------


def run_with_changes(
    config: dict[str, Any],
    nodes: list[dict[str, Any]],
    runs: Path,
    online: Any,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The records and the log of a run; `online(round)` has the clients that are connected in a round."""
    settings, log = settings_of(config), list[str]()
    transport = DirectTransport(settings, {})
    folder = ServerFolder(str(runs), settings.federation.session.run, resume=False)
    server = new_server(settings, transport, folder, kept(log), pause=0, retry=0)
    rounds, records = server.rounds(), []
    for round in range(settings.federation.rounds):
        transport.online = {100 + client: nodes[client] for client in online(round)}
        records.append(next(rounds))
    return records, log


def small_nodes(federation: FederatedData, folder: Path) -> list[dict[str, Any]]:
    """Nodes with a few samples: a round takes milliseconds."""
    nodes = write_nodes(federation, folder)
    for config in nodes:
        with np.load(config["data"]) as arrays:
            np.savez(config["data"], **{name: arrays[name][:16] for name in arrays})
    return nodes


def test_a_client_that_joins_during_the_run_takes_part(federation: FederatedData, tmp_path: Path) -> None:
    """It starts with its first record, and with the global model of that round."""
    config, nodes = (
        CONFIG | {"network.min_replies": 2, "run.rounds": 4},
        small_nodes(federation, tmp_path / "n"),
    )
    records, log = run_with_changes(
        config, nodes, tmp_path / "runs", lambda round: [0, 1] if round < 2 else [0, 1, 2]
    )
    assert [r["clients"] for r in records] == [[0, 1]] * 2 + [[0, 1, 2]] * 2
    assert [r["why"] for r in records] == [{"2": "not connected"}] * 2 + [{}] * 2
    assert "client 2 connected (node 102)" in log
    assert ClientRecords(Path(nodes[2]["state-dir"]), "test").rounds() == [2, 3]


def test_a_client_that_leaves_for_good_is_named_in_every_round(
    federation: FederatedData, tmp_path: Path
) -> None:
    config, nodes = (
        CONFIG | {"network.min_replies": 2, "run.rounds": 4},
        small_nodes(federation, tmp_path / "n"),
    )
    records, log = run_with_changes(
        config, nodes, tmp_path / "runs", lambda round: [0, 1, 2] if round < 1 else [0, 2]
    )
    assert [r["clients"] for r in records] == [[0, 1, 2]] + [[0, 2]] * 3
    assert [r["why"] for r in records[1:]] == [{"1": "not connected"}] * 3
    assert log.count("client 1 disconnected (node 101)") == 1


def test_a_node_that_was_offline_for_many_rounds_continues_from_its_record(
    federation: FederatedData, tmp_path: Path
) -> None:
    config, nodes = (
        CONFIG | {"network.min_replies": 2, "run.rounds": 23},
        small_nodes(federation, tmp_path / "n"),
    )
    kept: list[bytes] = []

    def online(round: int) -> list[int]:
        if round in (1, 21):
            kept.append(Path(nodes[1]["state-dir"], "test", "round-000000.copfl").read_bytes())
        return [0, 2] if 1 <= round <= 20 else [0, 1, 2]

    records, _ = run_with_changes(config, nodes, tmp_path / "runs", online)
    assert [r["clients"] for r in records[20:]] == [[0, 2], [0, 1, 2], [0, 1, 2]]
    assert kept[0] == kept[1]
    assert not any(r["notes"] for r in records)
    assert ClientRecords(Path(nodes[1]["state-dir"]), "test").rounds() == [0, 21, 22]


def test_a_node_that_returns_under_another_id_is_accepted_when_the_old_one_is_gone(
    federation: FederatedData, tmp_path: Path
) -> None:
    """Flower lists a killed node as connected for a minute."""
    nodes, settings = small_nodes(federation, tmp_path / "n"), settings_of(CONFIG)
    transport, registry = DirectTransport(settings, {1: nodes[0]}), Registry("test", 3, silent)
    registry.refresh(transport)
    transport.online[2] = nodes[0]
    registry.refresh(transport)
    assert registry.nodes == {0: 1}
    assert "which node 1 is already" in registry.rejected[2]
    del transport.online[1]
    registry.refresh(transport)
    assert registry.nodes == {0: 2}
    assert registry.rejected == {}


# -- the clients' numbers ------------------------------------------------------------------------------------


def test_nodes_without_a_number_are_assigned_one_for_the_run(
    federation: FederatedData, expected: State, tmp_path: Path
) -> None:
    nodes = write_nodes(federation, tmp_path / "n", named=False)
    play(CONFIG | {"run.rounds": 2}, nodes, tmp_path / "runs")
    another_order = nodes[::-1]
    _, server, _, _ = play(CONFIG | {"session.resume": True}, another_order, tmp_path / "runs")
    assert farthest(server, expected.server) <= 1e-5


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "which node 100 is already"), (7, "clients are 0 to 2")]
)
def test_a_wrong_number_is_rejected(
    number: int, expected: str, federation: FederatedData, tmp_path: Path
) -> None:
    nodes = write_nodes(federation, tmp_path / "n")
    nodes[2]["client"] = number
    records, _, log, _ = play(CONFIG | {"network.min_replies": 2, "run.rounds": 1}, nodes, tmp_path / "runs")
    assert records[0]["why"] == {"2": "not connected"}
    assert any(expected in text for text in log)


# -- the node's data -----------------------------------------------------------------------------------------


def test_classes_are_matched_by_name(tmp_path: Path) -> None:
    """A node with two of three classes numbers them as the federation does."""
    from PIL import Image

    for label in ("bird", "cat"):
        for split, count in (("train", 3), ("test", 1)):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for n in range(count):
                shade = 10 * n + 2 * (split == "test") + (label == "cat")  # none is a copy of another
                Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(folder / f"{n}.png")
    settings = settings_of({"samples.shape": [3, 8, 8], "samples.classes": ["ant", "bird", "cat"]})
    assert node_data(settings, node_of({"data": str(tmp_path)})).train.y.tolist() == [1, 1, 1, 2, 2, 2]
    with pytest.raises(DataError, match="no class 'bird'"):
        node_data(
            settings_of({"samples.shape": [3, 8, 8], "samples.classes": ["ant", "cat"]}),
            node_of({"data": str(tmp_path)}),
        )


def test_data_of_a_custom_function(federation: FederatedData) -> None:
    settings = settings_of(CONFIG)
    with named_code.scope():
        named_code.name("tests.federation.server.test_rounds")
        data = node_data(settings, node_of({"data": "tests.federation.server.test_rounds:custom_data"}))
    assert data.train.y.shape[0] > 1000


def custom_data(node_config: dict[str, Any]) -> Any:
    return digits().dataset


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "has no data"),
        ({"data": "nowhere:nothing"}, "there is no module nowhere"),
        ({"data": "tests.federation.server.test_rounds:CONFIG"}, "not callable"),
    ],
)
def test_a_node_without_data_is_an_error_with_a_remedy(config: dict[str, Any], expected: str) -> None:
    with named_code.scope():
        named_code.name("nowhere", "tests.federation.server.test_rounds")
        with pytest.raises((UsageError, DataError), match=expected):
            node_data(settings_of(CONFIG), node_of(config))


def test_runs_one_after_another_on_the_same_nodes(tmp_path: Path) -> None:
    """Each has its own state: the second run ends as the first, and the first continues afterwards."""
    nodes = write_nodes(digits(), tmp_path / "nodes")
    short = CONFIG | {"run.rounds": 2}
    first = play(short | {"session.run": "first"}, nodes, tmp_path / "runs")
    other = play(short | {"session.run": "other", "algorithm.name": "fedavg"}, nodes, tmp_path / "runs")
    second = play(short | {"session.run": "second"}, nodes, tmp_path / "runs")
    assert farthest(first.server, second.server) == 0
    assert [r["clients"] for r in other.records] == [[0, 1, 2]] * 2
    more = play(CONFIG | {"session.run": "first", "session.resume": True}, nodes, tmp_path / "runs")
    assert (more.records[0]["round"], more.records[0]["notes"]) == (3, {})
    folders = sorted(p.name for p in Path(nodes[0]["state-dir"]).iterdir())
    assert folders == [".secure", "first", "other", "second"]


# -- new clients ---------------------------------------------------------------------------------------------


def test_a_new_client_personalises_the_shared_model(tmp_path: Path) -> None:
    federation = digits(4)
    nodes = write_nodes(federation, tmp_path / "n", named=False)
    members = [config | {"client": client} for client, config in enumerate(nodes[:3])]
    play(CONFIG, members, tmp_path / "runs")
    settings = settings_of(CONFIG | {"session.join": 3})
    transport = DirectTransport(settings, {1: nodes[3], 2: members[0]})
    folder = ServerFolder(str(tmp_path / "runs"), "test", resume=True)
    server = new_server(settings, transport, folder, pause=0)
    results = server.personalise_new_clients()
    new_client, member = sorted(results, key=lambda r: r["node"])
    assert new_client["accuracy_after"] > new_client["accuracy_before"]
    assert "only a new client" in member["why"]
    reply = next(p for p in transport.received if "accuracy_after" in p.head)
    assert len(reply.body) < 20  # two accuracies, no weights
    bundle = copfl.load(nodes[3]["state-dir"])
    assert (bundle.description.origin.client, bundle.description.origin.round) == (None, 3)
    assert bundle.description.scores[0].value == new_client["accuracy_after"]


@pytest.mark.parametrize("name", ["fedavg", "reads"])  # reads has a model for each client
def test_a_new_client_continues_from_its_last_update(name: str, tmp_path: Path) -> None:
    """As in the simulation; with one batch of all samples, three updates are three steps."""
    nodes = write_nodes(digits(4), tmp_path / "n", named=False)
    config = for_algorithm(name) | {"run.batch": 2000}
    play(config, [node | {"client": client} for client, node in enumerate(nodes[:3])], tmp_path / "runs")
    state = server_of(settings_of(config), tmp_path / "runs")
    start = state.w if name == "fedavg" else state.models.mean(0)
    moved = []
    for updates in (1, 3):
        settings = settings_of(config | {"session.join": updates})
        folder = ServerFolder(str(tmp_path / "runs"), "test", resume=True)
        server = new_server(settings, DirectTransport(settings, {1: nodes[3]}), folder, pause=0)
        assert "accuracy_after" in server.personalise_new_clients()[0]
        moved.append(float((vectors_of(copfl.load(nodes[3]["state-dir"]).model) - start).norm()))
    assert moved[1] > 2 * moved[0]


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"run.round": 3}, r'run.round=3 is no setting; did you mean "rounds"'),
        ({"round": 3}, r"round=3 is no setting; a setting is TABLE.KEY"),
        ({"rum.rounds": 3}, r'rum=.* is no setting; did you mean "run"'),
        ({"run.rounds": "3"}, "must be a whole number"),
        ({"run.rounds": 0}, "at least 1"),
        ({"network.wire": "fp8"}, "network.wire=.fp8. is unknown; allowed are bf16, fp16, fp32"),
        ({"run.clients": 3, "network.min_replies": 9}, "at most 3: so many clients a round selects"),
        ({"session.run": "../../etc"}, "must be a plain name"),
        ({"algorithm.rat": 0.1}, 'did you mean "rate"'),
        ({"samples.mean": [0.1, 0.2]}, "must have 1 numbers, one for each channel"),
        ({"samples.shape": "1,x"}, "must be a list of whole numbers|must be a whole number"),
        ({"run.participation": 0.0}, "above 0"),
        ({"network.deadline": 0}, "above 0"),
    ],
)
def test_an_invalid_run_config_is_an_error(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        settings_of(config)


def test_the_defaults_fit() -> None:
    federation = settings_of({}).federation
    assert (federation.selected, federation.minimum) == (10, 5)
