"""The benefit of each client to the others in a federation: that of the simulation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from copfl import wire
from copfl.algorithms.fedavg import FedAvg
from copfl.core import tree
from copfl.core.halves import DIFFERENCE, HALF
from copfl.engine.halves import ClientHalves
from copfl.engine.mapping import sequential
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import UsageError, WireError
from copfl.experiment import records
from copfl.experiment.analysis import evidence
from copfl.experiment.analysis.benefit import (
    Benefit,
    group_benefit,
    halves_of,
)
from copfl.federation.node import halves, secure_update
from copfl.federation.node.audit_log import entry_of
from copfl.federation.node.explanation import explained
from copfl.federation.node.incoming import message_like
from copfl.federation.policy.record import Policy, PrivacyRules, SumRules
from copfl.federation.policy.request import refusals
from copfl.federation.protocol import halves as kinds
from copfl.federation.protocol.halves import LOSSES
from copfl.federation.protocol.messages import TRAIN, Field
from copfl.federation.protocol.settings import TrainingSettings, settings_of
from copfl.federation.server.exchange import ServerRound
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import TrainingServer, _record, new_server
from copfl.stats import Numbers
from copfl.wire import Head, Packet
from tests.federation.network import CONFIG, DirectTransport, Played, digits, kept, node_of, play, write_nodes

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

CLIENTS, ROUNDS = 6, 9
HALVES = CONFIG | {
    "run.clients": CLIENTS,
    "run.rounds": ROUNDS,
    "run.benefit": True,
    "run.seed": 4,  # its halves leave no round without an error
    "run.eval_every": ROUNDS,
    "network.min_replies": CLIENTS,
    "algorithm.name": "fedavg",
    "model.width": 8,
    "optimizer.name": "sgd",  # `init` would choose another one
    "optimizer.lr": 0.1,
}
SECURE = {"secure.aggregation": True, "secure.bits": 44}


class Federated(NamedTuple):
    played: Played
    nodes: list[dict[str, Any]]
    runs: Path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Federated:
    folder = tmp_path_factory.mktemp("plain")
    nodes = write_nodes(digits(CLIENTS), folder / "nodes")
    return Federated(play(HALVES, nodes, folder / "runs"), nodes, folder / "runs")


@pytest.fixture(scope="module")
def simulated() -> list[records.Record]:
    """The rounds of the same run in the simulation."""
    settings, federation = settings_of(HALVES), digits(CLIENTS)
    run = settings.run.run
    halves = ClientHalves(np.arange(CLIENTS), CLIENTS)
    made = Simulation(
        settings.algorithm, settings.task, federation, sequential(), run.seed, run.batch, halves
    )
    state = begin(settings.algorithm, settings.task, CLIENTS)
    return [records.as_record(round) for round in simulate(made, state, rounds=ROUNDS, eval_every=ROUNDS)]


def benefit_of(lines: list[records.Record]) -> Benefit:
    halves = halves_of(lines, CLIENTS)
    assert halves is not None
    return group_benefit(*halves)


@pytest.mark.job
def test_a_federation_has_the_benefit_of_the_simulation(
    plain: Federated, simulated: list[records.Record]
) -> None:
    for ours, theirs in zip(plain.played.records, simulated, strict=True):
        for name in (HALF, DIFFERENCE):
            assert ours["per_client"][name] == theirs["per_client"][name]
    found = benefit_of(plain.played.records)
    assert np.isfinite(found.value).all()
    np.testing.assert_array_equal(found.value, benefit_of(simulated).value)
    np.testing.assert_array_equal(found.error, benefit_of(simulated).error)


# -- weights by evidence -------------------------------------------------------------------------------------

MANY = 8  # halves keep three members without one
EVIDENCE = HALVES | {
    "run.clients": MANY,
    "run.rounds": 11,
    "run.eval_every": 11,
    "network.min_replies": MANY,
    "robust.name": "evidence",
}


@pytest.mark.job
def test_a_federation_takes_the_weights_that_the_simulation_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After nine rounds, here from the client with the lowest benefit; also after a server that was stopped."""

    def lowest(membership: Numbers, differences: Numbers) -> Any:
        values = group_benefit(membership, differences).value
        return values == values.min()

    monkeypatch.setattr(evidence, "looks", lambda rounds, clients: rounds == 9)
    monkeypatch.setattr(evidence, "harmful", lowest)
    settings, lines = settings_of(EVIDENCE), list[records.Record]()
    what = settings.algorithm, settings.task, digits(MANY), sequential(), settings.run.run.seed
    made = Simulation(*what, settings.run.run.batch, ClientHalves(np.arange(MANY), MANY))
    state = begin(settings.algorithm, settings.task, MANY)
    for round in simulate(made, state, rounds=11, eval_every=11):
        lines.append(records.as_record(round))
        if evidence.looks(state.round, MANY):
            state.server = evidence.reweighted(settings.algorithm, state.server, lines, MANY)
    nodes = write_nodes(digits(MANY), tmp_path / "nodes")
    first = play(EVIDENCE, nodes, tmp_path / "runs", stop=9)
    second = play(EVIDENCE | {"session.resume": True}, nodes, tmp_path / "runs")
    (gone,) = np.flatnonzero(state.server.weight == 0).tolist()
    assert f"client {gone} has no weight from now on: it helps neither the others nor itself" in first.log
    assert tree.leaves(second.server)[-1].tolist() == state.server.weight.tolist()
    assert all(map(torch.equal, tree.leaves(second.server), tree.leaves(state.server)))
    for ours, theirs in zip([*first.records, *second.records], lines, strict=True):
        for name in (HALF, DIFFERENCE):
            assert ours["per_client"][name] == theirs["per_client"][name]
    assert second.records[-1]["per_client"][HALF][gone] == 0
    assert second.records[-1]["federation"]["without_weight"] == 1


def test_no_half_of_two_with_weight_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "without_weight", lambda algorithm, server: frozenset([0, 1]))
    nodes = write_nodes(digits(MANY), tmp_path / "nodes")
    seeds = [
        seed
        for seed in range(20)
        if len({0, 1} & kinds.first_clients(settings_of(EVIDENCE | {"run.seed": seed}).federation, 0)) != 1
    ]
    played = play(EVIDENCE | {"run.rounds": 1, "run.seed": seeds[0]}, nodes, tmp_path / "runs")
    assert HALF not in played.records[0]["per_client"]


# -- what leaves ---------------------------------------------------------------------------------------------


def answers(federated: Federated, kind: str) -> list[dict[str, Any]]:
    """The heads of the nodes' answers of a kind; their bodies have no tensor."""
    heads = [(json.loads(packet.head), packet.body) for packet in federated.played.transport.received]
    found = [(head, body) for head, body in heads if head.get("kind") == kind]
    assert {body for _, body in found} <= {wire.encode((), Head("", "", "", 0, 0)).body}
    return [head for head, _ in found]


def test_two_losses_a_round_leave_a_node(plain: Federated) -> None:
    found = answers(plain, LOSSES)
    assert len(found) == CLIENTS * ROUNDS
    assert len({(head["round"], head["client"]) for head in found}) == CLIENTS * ROUNDS
    for head in found:
        assert head["about"].keys() == {Field.LOSSES}
        assert [type(loss) for loss in head["about"][Field.LOSSES]] == [float, float]


@pytest.mark.parametrize(
    ("about", "left"),
    [
        ({Field.LOSSES: [0.1, 0.2]}, ("losses",)),
    ],
)
def test_a_nodes_log_has_what_left(about: dict[str, Any], left: tuple[str, ...]) -> None:
    answer = wire.encode((), Head(LOSSES, "test", "", 0, 1), about=about)
    assert entry_of(TRAIN, ("{}", b""), answer, None, None).left == left


def test_what_a_node_calls_a_half_is_no_halfs() -> None:
    """A node reports metrics under any name; these are the server's."""
    reported = {HALF: 1.0, DIFFERENCE: 5.0, "samples": 7.0, "accuracy": 0.5}
    now = ServerRound(0, reports={0: {Field.METRICS: reported}}, bytes_up={0: 1}, bytes_down={0: 1})
    assert sorted(_record(now, "accuracy", {}, 1.0).per_client) == ["accuracy", "bytes_down", "bytes_up"]


# -- what a node refuses -------------------------------------------------------------------------------------


def last_message(federated: Federated, client: int) -> Packet:
    """The models of both halves of the last round, as the server sent them to a client."""
    sent = [packet for _, _, packet in federated.played.transport.sent]
    heads = [(packet, json.loads(packet.head)) for packet in sent]
    return [p for p, head in heads if (head.get("kind"), head.get("client")) == (kinds.HALVES, client)][-1]


def other_models(packet: Packet, settings: TrainingSettings) -> Packet:
    """The same message with models that differ a little."""
    head = json.loads(packet.head)
    like = message_like(settings, head["client"])
    expected = Head(*(head[name] for name in Head._fields))
    models = wire.decode(packet, (like, like), expected).record
    return wire.encode(tree.each(lambda t: t + 1e-3, models), expected, settings.federation.network.wire)


def test_a_node_gives_two_losses_a_round(plain: Federated) -> None:
    settings, packet = plain.played.transport.settings, last_message(plain, 2)
    again = secure_update.round_answer(settings, node_of(plain.nodes[2]), packet)
    (first,) = [head for head in answers(plain, LOSSES) if (head["round"], head["client"]) == (ROUNDS - 1, 2)]
    assert json.loads(again.head) == first
    with pytest.raises(WireError, match="asked to compare other models: it gives two losses a round"):
        secure_update.round_answer(settings, node_of(plain.nodes[2]), other_models(packet, settings))


def test_a_rollback_gives_two_losses_for_each_training(plain: Federated, tmp_path: Path) -> None:
    one = {**plain.nodes[2], "state-dir": str(tmp_path / "state")}
    shutil.copytree(plain.nodes[2]["state-dir"], one["state-dir"])
    back, packet = settings_of(HALVES | {"session.rollback": True}), last_message(plain, 2)
    other = other_models(packet, back)
    with pytest.raises(WireError, match="it gives two losses a round"):
        secure_update.round_answer(back, node_of(one), other)
    sent = [(p, json.loads(p.head)) for _, _, p in plain.played.transport.sent]
    train = [p for p, head in sent if (head.get("kind"), head.get("client")) == ("down", 2)][-1]
    for settings, is_answered in ((settings_of(HALVES), False), (back, True)):
        secure_update.round_answer(settings, node_of(one), train)
        if is_answered:
            assert '"losses"' in secure_update.round_answer(settings, node_of(one), other).head
        else:
            with pytest.raises(WireError, match="it gives two losses a round"):
                secure_update.round_answer(settings, node_of(one), other)


def test_halves_are_compared_only_where_the_run_says_so(plain: Federated, tmp_path: Path) -> None:
    packet = last_message(plain, 2)
    without = settings_of(HALVES | {"run.benefit": False})
    with pytest.raises(WireError, match="the run does not measure the benefit"):
        secure_update.round_answer(without, node_of(plain.nodes[2]), packet)
    stranger = {**plain.nodes[2], "state-dir": str(tmp_path)}
    with pytest.raises(WireError, match=f"this node has not trained in round {ROUNDS}"):
        secure_update.round_answer(settings_of(HALVES), node_of(stranger), packet)


def test_no_loss_is_of_a_few_rows(plain: Federated, tmp_path: Path) -> None:
    """With run.validation near zero it would be of one, and run.seed chooses which."""
    one = {**plain.nodes[2], "state-dir": str(tmp_path / "state")}
    shutil.copytree(plain.nodes[2]["state-dir"], one["state-dir"])
    (tmp_path / "state" / "test" / halves.FILE).unlink()
    settings = settings_of(HALVES | {"run.validation": 1e-9})
    answer = secure_update.round_answer(settings, node_of(one), last_message(plain, 2))
    assert json.loads(answer.head)["about"] == {Field.LOSSES: [None, None]}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"run.clients": 5, "network.min_replies": 5},
            "halves, here of 2 clients, and 3 are the least: it needs 6",
        ),
        (SECURE, "run.benefit=true is not possible with secure.aggregation=true: sums of halves reveal"),
        ({"privacy.noise": 1.0}, "more sums of the same uploads than .privacy. accounts for"),
        ({"algorithm.name": "local"}, "no part of a client's model is a mean"),
        ({"robust.name": "median"}, "the server needs single uploads"),
    ],
)
def test_what_has_no_halves_is_refused_before_a_run(change: dict[str, Any], error: str) -> None:
    config = {key: v for key, v in HALVES.items() if not key.startswith("optimizer")}
    with pytest.raises(UsageError, match=error):
        settings_of(config | change)


@pytest.mark.parametrize(
    ("policy", "config", "lines"),
    [
        (Policy(), {}, ["benefit"]),
        (Policy(benefit=True), SECURE, ["benefit"]),
        (Policy(benefit=True), {}, []),
        (Policy(benefit=True, reports="none"), {}, []),
        (Policy(benefit=True), {"run.clients": 5}, ["secure_aggregation.cohort"]),
        (
            Policy(benefit=True, secure_aggregation=SumRules(cohort=4)),
            {},
            ["secure_aggregation.cohort"],
        ),
        (Policy(benefit=True), {"run.benefit": "yes"}, ["benefit"]),
        (Policy(benefit=True, privacy=PrivacyRules(lifetime_epsilon=3.0)), {}, ["privacy.lifetime_epsilon"]),
    ],
)
def test_the_owner_decides_on_the_benefit(policy: Policy, config: dict[str, Any], lines: list[str]) -> None:
    found = refusals(policy, HALVES | config)
    assert [refusal.line for refusal in found] == lines
    if lines == ["secure_aggregation.cohort"]:
        least = 2 * policy.secure_aggregation.cohort
        assert f"a round must select at least {least} clients" in found[0].why


def test_an_owner_reads_what_leaves(tmp_path: Path) -> None:
    assert "benefit     two losses a round are sent  [benefit]" in explained(Policy(benefit=True), HALVES)
    (line,) = [line for line in explained(Policy(benefit=True), HALVES | SECURE) if "[benefit]" in line]
    assert line.startswith("refused     run.benefit=true is not possible with secure.aggregation=true")


# -- faults --------------------------------------------------------------------------------------------------


def test_a_client_that_does_not_compare_still_counts(tmp_path: Path) -> None:
    def fault(client: int, round: int, packet: Packet) -> Packet | str:
        return "Node Unavailable" if client == 2 and '"kind":"losses"' in packet.head else packet

    nodes = write_nodes(digits(CLIENTS), tmp_path / "nodes")
    (record,) = play(HALVES | {"run.rounds": 1}, nodes, tmp_path / "runs", fault).records
    assert record["clients"] == list(range(CLIENTS))
    differences = record["per_client"][DIFFERENCE]
    assert [n for n, value in enumerate(differences) if value is None] == [2]
    assert record["halves"]["failed"] == {"2": "Node Unavailable"}
    assert record["left_out"] == []


def test_a_half_of_too_few_uploads_is_not_compared(tmp_path: Path) -> None:
    def fault(client: int, _round: int, packet: Packet) -> Packet | str:
        return "Node Unavailable" if client == 2 else packet

    nodes = write_nodes(digits(CLIENTS), tmp_path / "nodes")
    config = HALVES | {"run.rounds": 1, "network.min_replies": 5}
    (record,) = play(config, nodes, tmp_path / "runs", fault).records
    assert record["clients"] == [0, 1, 3, 4, 5]
    assert HALF not in record["per_client"]


def test_a_half_that_does_not_fit_into_a_message_is_not_compared(tmp_path: Path) -> None:
    """The server goes on."""
    settings = settings_of(HALVES | {"network.wire": "fp16"})
    folder, log = ServerFolder(str(tmp_path), "test", resume=False), list[str]()
    server = new_server(settings, DirectTransport(settings, {}), folder, kept(log))
    total = settings.algorithm.summand(settings.task, server.state, torch.tensor(0), server.upload)
    now = ServerRound(
        0, reports={n: {} for n in range(CLIENTS)}, dtypes=[t.dtype for t in tree.leaves(total)]
    )
    now.half = tree.wide(
        tree.each(lambda t: torch.full_like(t, 1e9) if t.dim() else torch.ones_like(t), total)
    )
    server._compare_halves(now, server.state, tree.each(lambda t: 2 * torch.ones_like(t), total))
    assert "halves are not compared: 0.w has 1e+09, which does not fit into fp16" in log[-1]
    assert HALF not in now.per_client


@pytest.mark.parametrize("attack", ["unsolvable", "not finite"])
def test_a_half_that_gives_no_model_is_not_compared(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of a member may have no solution in its half alone: that ended the server, in each round again."""
    honest, compare = FedAvg.server_update, TrainingServer._compare_halves

    def step(self: Any, task: Any, server: Any, total: Any) -> Any:
        if attack == "unsolvable":
            torch.linalg.cholesky(torch.full((2, 2), -1.0))
        after, metrics = honest(self, task, server, total)
        return after._replace(w=after.w * torch.inf), metrics

    def compared(self: Any, now: ServerRound, before: Any, whole: Any) -> None:
        with monkeypatch.context() as patched:
            if now.number == 0:
                patched.setattr(FedAvg, "server_update", step)
            compare(self, now, before, whole)

    monkeypatch.setattr(TrainingServer, "_compare_halves", compared)
    nodes = write_nodes(digits(CLIENTS), tmp_path / "nodes")
    played = play(HALVES | {"run.rounds": 2}, nodes, tmp_path / "runs")
    first, second = played.records
    assert first["clients"] == second["clients"] == list(range(CLIENTS))
    assert HALF not in first["per_client"]
    assert HALF in second["per_client"]
    assert any("halves are not compared: " in line for line in played.log)


@pytest.mark.parametrize("losses", [[0.1], [0.1, "0.2"], [0.1, 1e300], [0.1, True], None])
def test_nonsense_in_place_of_losses_is_refused(losses: Any, tmp_path: Path) -> None:
    settings = settings_of(HALVES)
    server = new_server(
        settings, DirectTransport(settings, {}), ServerFolder(str(tmp_path), "test", resume=False)
    )
    head = server.exchange.head(LOSSES, 0, 1)
    with pytest.raises(WireError, match=r"two losses|a loss that is no number"):
        server._losses(1, wire.encode((), head, about={Field.LOSSES: losses}))
    assert server._losses(1, wire.encode((), head, about={Field.LOSSES: [None, 0.1]})) is None
