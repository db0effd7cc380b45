"""The benefit of each client to the others in a federation: that of the simulation, with and without secure sums."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from copfl import wire
from copfl.core import tree
from copfl.core.halves import DIFFERENCE, HALF, first_half
from copfl.engine.halves import Halves
from copfl.engine.mapping import sequential
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import RunError, UsageError, WireError
from copfl.experiment import records
from copfl.experiment.analysis import evidence
from copfl.experiment.analysis.benefit import (
    Benefit,
    Judgement,
    design,
    group_benefit,
    judged,
    no_judgement,
    of_records,
)
from copfl.federation.machines.app import init
from copfl.federation.machines.local import follow
from copfl.federation.machines.local_federation import LocalFederation
from copfl.federation.node import halves_memory, secure_update
from copfl.federation.node.audit_log import entry_of
from copfl.federation.node.explanation import explained
from copfl.federation.node.message import message_like
from copfl.federation.node.secure_memory import Added, History, Memory, Upload, fingerprint
from copfl.federation.operations.page import document_of
from copfl.federation.operations.watched import read
from copfl.federation.policy.record import Policy, Privacy, SecureAggregation
from copfl.federation.policy.refusal import PolicyError
from copfl.federation.policy.request import refusals, require_half
from copfl.federation.protocol import halves as kinds
from copfl.federation.protocol.chained_log import AUDIT, verified
from copfl.federation.protocol.halves import BENEFIT, COMPARED, LOSSES
from copfl.federation.protocol.messages import TRAIN, Field
from copfl.federation.protocol.secure_sum import Rules, Words, dequantised
from copfl.federation.protocol.settings import Settings, settings_of
from copfl.federation.server import secure_benefit
from copfl.federation.server.exchange import Round
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import _record, new_server
from copfl.settings.flat import nested
from copfl.stats import Numbers
from copfl.wire import Head, Packet
from tests.federation.network import CONFIG, DirectTransport, Played, digits, kept, node_of, play, write_nodes
from tests.slow import slow

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


def refusal(config: dict[str, Any], nodes: list[dict[str, Any]], runs: Path) -> str:
    """The first message in which a node refuses this run."""
    refused: list[str] = []

    def fault(_client: int, _round: int, packet: Packet) -> Packet:
        if '"refused"' in packet.head:
            refused.append(packet.head)
            raise KeyboardInterrupt  # else the server begins again
        return packet

    with pytest.raises(KeyboardInterrupt):
        play(config, nodes, runs, fault)
    return refused[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Federated:
    folder = tmp_path_factory.mktemp("plain")
    nodes = write_nodes(digits(CLIENTS), folder / "nodes")
    return Federated(play(HALVES, nodes, folder / "runs"), nodes, folder / "runs")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Federated:
    folder = tmp_path_factory.mktemp("secure")
    nodes = write_nodes(digits(CLIENTS), folder / "nodes")
    return Federated(play(HALVES | SECURE, nodes, folder / "runs"), nodes, folder / "runs")


@pytest.fixture(scope="module")
def simulated() -> list[records.Record]:
    """The rounds of the same run in the simulation."""
    settings, federation = settings_of(HALVES), digits(CLIENTS)
    run = settings.run.run
    halves = Halves(np.arange(CLIENTS), CLIENTS)
    made = Simulation(
        settings.algorithm, settings.task, federation, sequential(), run.seed, run.batch, halves
    )
    state = begin(settings.algorithm, settings.task, CLIENTS)
    return [records.as_record(round) for round in simulate(made, state, rounds=ROUNDS, eval_every=ROUNDS)]


def benefit_of(lines: list[records.Record]) -> Benefit:
    found = of_records(lines, CLIENTS)
    assert found is not None
    return found


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


def test_secure_sums_have_the_same_benefit_to_rounding(
    secure: Federated, simulated: list[records.Record]
) -> None:
    content = json.loads((secure.runs / "test" / BENEFIT).read_text())
    expected = benefit_of(simulated)
    assert content["freedom"] == expected.freedom == ROUNDS - CLIENTS + 1
    np.testing.assert_allclose(content["value"], expected.value, atol=1e-2 * float(expected.error.min()))
    np.testing.assert_allclose(content["error"], expected.error, rtol=1e-2)
    for record in secure.played.records:
        assert sorted(record["per_client"]) == ["bytes_down", "bytes_up", HALF, COMPARED]


# -- weights by evidence -------------------------------------------------------------------------------------

MANY = 8  # halves keep three members without one
EVIDENCE = HALVES | {
    "run.clients": MANY,
    "run.rounds": 11,
    "run.eval_every": 11,
    "network.min_replies": MANY,
    "robust.name": "evidence",
}


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
    made = Simulation(*what, settings.run.run.batch, Halves(np.arange(MANY), MANY))
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


def test_with_secure_sums_no_loss_leaves_a_node(secure: Federated) -> None:
    """But in one secure sum over all, after the last round."""
    found = answers(secure, LOSSES)
    assert [head["about"] for head in found] == [{Field.COMPARED: True}] * (CLIENTS * ROUNDS)
    masked = [json.loads(p.head) for p in secure.played.transport.received if '"kind":"masked"' in p.head]
    judging = [head for head in masked if head["round"] == ROUNDS]
    assert [head["about"] for head in judging] == [{Field.JUDGEMENT: True}] * CLIENTS
    assert all(Field.JUDGEMENT not in head["about"] for head in masked if head["round"] < ROUNDS)


@pytest.mark.parametrize(
    ("about", "left"),
    [
        ({Field.LOSSES: [0.1, 0.2]}, ("losses",)),
        ({Field.COMPARED: True}, ("comparison",)),
    ],
)
def test_a_nodes_log_has_what_left(about: dict[str, Any], left: tuple[str, ...]) -> None:
    answer = wire.encode((), Head(LOSSES, "test", "", 0, 1), about=about)
    assert entry_of(TRAIN, ("{}", b""), answer, None, None).left == left


def test_a_nodes_log_has_its_judgement() -> None:
    answer = wire.encode((), Head("masked", "test", "", ROUNDS, 1), about={Field.JUDGEMENT: True})
    assert entry_of(TRAIN, ("{}", b""), answer, None, None).left == ("masked judgement",)


def test_what_a_node_calls_a_half_is_no_halfs() -> None:
    """A node reports metrics under any name; these are the server's."""
    reported = {HALF: 1.0, DIFFERENCE: 5.0, COMPARED: 1.0, "samples": 7.0, "accuracy": 0.5}
    now = Round(0, reports={0: {Field.METRICS: reported}}, bytes_up={0: 1}, bytes_down={0: 1})
    assert sorted(_record(now, {}, 1.0)["per_client"]) == ["accuracy", "bytes_down", "bytes_up"]


# -- what a node refuses -------------------------------------------------------------------------------------


def last_message(federated: Federated, client: int) -> Packet:
    """The models of both halves of the last round, as the server sent them to a client."""
    sent = [packet for _, _, packet in federated.played.transport.sent]
    heads = [(packet, json.loads(packet.head)) for packet in sent]
    return [p for p, head in heads if (head.get("kind"), head.get("client")) == (kinds.HALVES, client)][-1]


def other_models(packet: Packet, settings: Settings) -> Packet:
    """The same message with models that differ a little."""
    head = json.loads(packet.head)
    like = message_like(settings, head["client"])
    expected = Head(*(head[name] for name in Head._fields))
    models = wire.decode(packet, (like, like), expected).record
    return wire.encode(tree.each(lambda t: t + 1e-3, models), expected, settings.federation.network.wire)


def test_a_node_gives_two_losses_a_round(plain: Federated) -> None:
    settings, packet = plain.played.transport.settings, last_message(plain, 2)
    again = secure_update.local_update(settings, node_of(plain.nodes[2]), packet)
    (first,) = [head for head in answers(plain, LOSSES) if (head["round"], head["client"]) == (ROUNDS - 1, 2)]
    assert json.loads(again.head) == first
    with pytest.raises(WireError, match="asked to compare other models: it gives two losses a round"):
        secure_update.local_update(settings, node_of(plain.nodes[2]), other_models(packet, settings))


def test_a_rollback_gives_two_losses_for_each_training(plain: Federated, tmp_path: Path) -> None:
    one = {**plain.nodes[2], "state-dir": str(tmp_path / "state")}
    shutil.copytree(plain.nodes[2]["state-dir"], one["state-dir"])
    back, packet = settings_of(HALVES | {"session.rollback": True}), last_message(plain, 2)
    other = other_models(packet, back)
    with pytest.raises(WireError, match="it gives two losses a round"):
        secure_update.local_update(back, node_of(one), other)
    sent = [(p, json.loads(p.head)) for _, _, p in plain.played.transport.sent]
    train = [p for p, head in sent if (head.get("kind"), head.get("client")) == ("down", 2)][-1]
    for settings, is_answered in ((settings_of(HALVES), False), (back, True)):
        secure_update.local_update(settings, node_of(one), train)
        if is_answered:
            assert '"losses"' in secure_update.local_update(settings, node_of(one), other).head
        else:
            with pytest.raises(WireError, match="it gives two losses a round"):
                secure_update.local_update(settings, node_of(one), other)


def test_halves_are_compared_only_where_the_run_says_so(plain: Federated, tmp_path: Path) -> None:
    packet = last_message(plain, 2)
    without = settings_of(HALVES | {"run.benefit": False})
    with pytest.raises(WireError, match="the run does not measure the benefit"):
        secure_update.local_update(without, node_of(plain.nodes[2]), packet)
    stranger = {**plain.nodes[2], "state-dir": str(tmp_path)}
    with pytest.raises(WireError, match=f"this node has not trained in round {ROUNDS}"):
        secure_update.local_update(settings_of(HALVES), node_of(stranger), packet)


@pytest.mark.parametrize("is_secure", [True, False])
def test_with_secure_sums_nobody_learns_that_a_loss_is_not_finite(
    is_secure: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A model that is nearly infinite for a class would count the samples of it, a bit a round."""
    federated: Federated = request.getfixturevalue("secure" if is_secure else "plain")
    state = tmp_path / "state"
    shutil.copytree(federated.nodes[2]["state-dir"], state)
    (state / "test" / halves_memory.FILE).unlink()
    settings = federated.played.transport.settings
    like, head = message_like(settings, 2), Head(kinds.HALVES, "test", settings.layout, ROUNDS - 1, 2)
    most = int(np.bincount(np.load(federated.nodes[2]["data"])["y"]).argmax())
    bias = torch.zeros(10).index_fill(0, torch.tensor(most), -3e38)  # of the last layer; all else is zero
    hostile = wire.encode(tree.each(lambda t: torch.cat([0 * t[:-10], bias]), (like, like)), head)
    answer = secure_update.local_update(
        settings, node_of({**federated.nodes[2], "state-dir": str(state)}), hostile
    )
    about = json.loads(answer.head)["about"]
    assert about == ({Field.COMPARED: True} if is_secure else {Field.LOSSES: [None, None]})
    if is_secure:
        assert halves_memory.read(state / "test")[ROUNDS - 1].difference == 0


def test_no_loss_is_of_a_few_rows(plain: Federated, tmp_path: Path) -> None:
    """With run.validation near zero it would be of one, and run.seed chooses which."""
    one = {**plain.nodes[2], "state-dir": str(tmp_path / "state")}
    shutil.copytree(plain.nodes[2]["state-dir"], one["state-dir"])
    (tmp_path / "state" / "test" / halves_memory.FILE).unlink()
    settings = settings_of(HALVES | {"run.validation": 1e-9})
    answer = secure_update.local_update(settings, node_of(one), last_message(plain, 2))
    assert json.loads(answer.head)["about"] == {Field.LOSSES: [None, None]}


def of_other_models(rounds: list[int], messages: list[str]) -> kinds.Question:
    return kinds.question_of(rounds, ["00" * 32, *messages[1:]])


def of_fewer_rounds(rounds: list[int], messages: list[str]) -> kinds.Question:
    return kinds.question_of(rounds[:-1], messages[:-1])


def of_a_round_twice(rounds: list[int], messages: list[str]) -> kinds.Question:
    return kinds.question_of([*rounds[:-1], rounds[0]], [*messages[:-1], messages[0]])


@pytest.mark.parametrize(
    ("forged", "refused"),
    [
        (of_other_models, "this node has not compared these halves in round 1"),
        (of_fewer_rounds, "this node has concluded what the others are worth, and does so once in a run"),
        (of_a_round_twice, "concluded what the others are worth"),
    ],
)
def test_a_node_answers_one_question_about_models_that_all_were_shown(
    forged: Any, refused: str, secure: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the conclusions of all but one could be made zero, or solved for from several sums."""
    path = secure.runs / "test" / BENEFIT
    content = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(secure_benefit, "question_of", forged)
    again = HALVES | SECURE | {"session.resume": True, "network.deadline": 0.5}
    played = play(again, secure.nodes, secure.runs)
    assert not path.exists()
    assert sum(refused in line for line in played.log) >= CLIENTS
    assert "there is no benefit" in played.log[-1]
    monkeypatch.undo()
    play(again | {"network.deadline": 60}, secure.nodes, secure.runs)
    assert path.read_bytes() == content  # the same sum of the same clients, asked for again


def test_another_run_asks_nothing_further_of_the_same_data(secure: Federated) -> None:
    """Its server shows other models, so that the sum tells other things: refused before a node trains."""
    refused = refusal(HALVES | SECURE | {"session.run": "second"}, secure.nodes, secure.runs)
    assert "from the same data in another run" in refused
    assert "raise statistics.questions above 1" in refused


def test_the_owner_allows_further_questions(tmp_path: Path) -> None:
    concluded = halves_memory.Concluded(tmp_path)
    rows, others = (concluded.name_of(np.arange(n, n + 5, dtype=np.uint64)) for n in (0, 7))
    concluded.enter(rows, "first", "a", 1)
    concluded.enter(rows, "first", "a", 1)  # the same again
    concluded.enter(others, "second", "b", 1)
    more = concluded.name_of(np.arange(4, 6, dtype=np.uint64))  # one row of the first
    with pytest.raises(WireError, match=r"raise statistics\.questions above 1"):
        concluded.enter(more, "second", "b", 1)
    concluded.enter(more, "second", "b", 2)
    with pytest.raises(WireError, match=r"raise statistics\.questions above 2"):
        concluded.expect(rows, "third", 2)
    (tmp_path / halves_memory.CONCLUDED).write_text("{")
    with pytest.raises(RunError, match="restore the node's state-dir"):
        concluded.expect(rows, "third", 2)


# -- forged parts, and models that hardly differ -------------------------------------------------------------


def judges(differences: Numbers, rounds: int = 16, clients: int = 6) -> list[Judgement]:
    """What each client concludes from its column of differences, [rounds, clients]."""
    drawn = [np.isin(np.arange(clients), first_half(4, t, np.arange(clients))) for t in range(rounds)]
    regression = design(np.where(np.stack(drawn), 1.0, -1.0))
    assert regression is not None
    return [judged(regression, differences[:, n], n) for n in range(clients)]


def summed(parts: list[Judgement], rules: Rules, added: Judgement | None = None) -> Judgement:
    """The secure sum of the judges' parts, and of numbers that a member adds."""
    words = [kinds.words_of(part, rules) for part in (*parts, *(() if added is None else (added,)))]
    total = dequantised(np.sum(words, axis=0, dtype=np.uint64), rules)
    rounds, clients = parts[0].errors.shape
    return kinds.judgement_from(total, rounds, clients, rules)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e6])
def test_what_judges_say_is_no_forgery(scale: float) -> None:
    """Whatever their losses are, also where some have none, and some are nearly above the range of a sum."""
    rules = Rules(6)
    for seed in range(20):
        draw = np.random.default_rng(seed)
        differences = scale * np.exp(3 * draw.normal(size=6)) * draw.standard_t(2, size=(16, 6))
        differences[:, :2] *= draw.integers(0, 2, size=2)
        said = judges(differences)
        is_above = [judge.log_scale >= -math.log(rules.range) for judge in said]
        expected = sum(judge.judges for judge, is_counted in zip(said, is_above, strict=True) if is_counted)
        np.testing.assert_array_equal(summed(said, rules).judges, expected)


def lone(entry: int, clients: int = 6, rounds: int = 16) -> tuple[Numbers, Numbers]:
    """An entry of a client, and of a client in a round."""
    value, errors = np.zeros(clients), np.zeros((rounds, clients))
    value[entry] = errors[0, entry] = 0.01
    return value, errors


@pytest.mark.parametrize("part", ["value", "judges", "errors"])
def test_numbers_that_no_losses_give_are_refused(part: str) -> None:
    """A member that adds to its own benefit alone, judges itself, or makes an error larger."""
    value, errors = lone(2)
    nothing = no_judgement(16, 6)
    forged = {"value": value, "judges": 100 * value, "errors": errors}
    added = nothing._replace(**{part: forged[part]})
    honest = judges(np.random.default_rng(0).normal(size=(16, 6)))
    summed(honest, Rules(6), nothing)
    with pytest.raises(WireError, match="a member added numbers that no losses give"):
        summed(honest, Rules(6), added)


@pytest.mark.parametrize("log_scale", [-100.0, 100.0])
def test_a_unit_that_no_judges_have_is_refused(log_scale: float) -> None:
    """It would make the benefit of all clients zero or infinite."""
    rules = Rules(6)
    words = [kinds.words_of(part, rules) for part in judges(np.random.default_rng(0).normal(size=(16, 6)))]
    total = dequantised(np.sum(words, axis=0, dtype=np.uint64), rules)
    total[0] += log_scale
    with pytest.raises(WireError, match="a member added numbers that no losses give"):
        kinds.judgement_from(total, 16, 6, rules)


def test_there_is_no_benefit_from_a_forged_sum(secure: Federated, monkeypatch: pytest.MonkeyPatch) -> None:
    path = secure.runs / "test" / BENEFIT
    content, honest = path.read_bytes(), kinds.words_of
    path.unlink()

    def forged(judgement: Judgement, rules: Rules) -> Words:
        is_forger = judgement.judges[0] == 0  # no client judges itself
        return honest(judgement._replace(value=judgement.value + lone(0)[0] * is_forger), rules)

    monkeypatch.setattr(kinds, "words_of", forged)
    played = play(HALVES | SECURE | {"session.resume": True}, secure.nodes, secure.runs)
    assert played.log[-1] == "there is no benefit: a member added numbers that no losses give"
    assert not path.exists()
    path.write_bytes(content)


def test_models_that_hardly_differ_reveal_no_further_digits() -> None:
    """A part is relative to the size of a judge's differences, and there is none where that is below 1 / range."""
    rules, differences = Rules(6), np.random.default_rng(0).normal(size=(16, 6))
    usual = summed(judges(1e-3 * differences), rules)
    assert np.abs(usual.value).min() > 1000 * rules.step
    for size in (1e-12, 1e-30):
        found = summed(judges(size * differences), rules)
        assert not any(part.any() for part in found)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"run.clients": 5, "network.min_replies": 5},
            "halves, here of 2 clients, and 3 are the least: it needs 6",
        ),
        ({**SECURE, "run.clients": 5, "network.min_replies": 5}, "it needs 6 clients in a round, not 5"),
        (
            {**SECURE, "run.clients": 12, "run.participation": 0.5},
            "needs every client in every round; set run.participation=1",
        ),
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
        (Policy(), SECURE, ["benefit"]),
        (Policy(benefit="sums"), {}, ["benefit"]),
        (Policy(benefit="sums"), SECURE, []),
        (Policy(benefit="all"), {}, []),
        (Policy(benefit="all", reports="none"), {}, []),
        (Policy(benefit="all"), {"run.clients": 5}, ["secure_aggregation.cohort"]),
        (
            Policy(benefit="all", secure_aggregation=SecureAggregation(cohort=4)),
            SECURE,
            ["secure_aggregation.cohort"],
        ),
        (Policy(benefit="all"), {"run.benefit": "yes"}, ["benefit"]),
        (Policy(benefit="all", privacy=Privacy(lifetime_epsilon=3.0)), {}, ["privacy.lifetime_epsilon"]),
    ],
)
def test_the_owner_decides_on_the_benefit(policy: Policy, config: dict[str, Any], lines: list[str]) -> None:
    found = refusals(policy, HALVES | config)
    assert [refusal.line for refusal in found] == lines
    if lines == ["secure_aggregation.cohort"]:
        least = 2 * policy.secure_aggregation.cohort
        assert f"a round must select at least {least} clients" in found[0].why


def test_an_owner_reads_what_leaves(tmp_path: Path) -> None:
    plain_lines = explained(Policy(benefit="all"), HALVES)
    assert "benefit     two losses a round are sent  [benefit]" in plain_lines
    (line,) = [line for line in explained(Policy(benefit="sums"), HALVES | SECURE) if "[benefit]" in line]
    assert "the sums of two halves of the clients in each round" in line


def test_a_half_of_too_few_is_not_signed() -> None:
    require_half(Policy(), 3)
    for policy, members, needed in (
        (Policy(), 2, 6),
        (Policy(secure_aggregation=SecureAggregation(cohort=1)), 2, 6),
        (Policy(secure_aggregation=SecureAggregation(cohort=5)), 4, 10),
    ):
        with pytest.raises(PolicyError, match=f"a half of {members} clients.*must have {needed} clients"):
            require_half(policy, members)


def test_a_lost_client_leaves_no_half_of_two(tmp_path: Path) -> None:
    """Six clients, of which one is lost after the keys: five nodes refuse to sign, and the round begins again."""
    lost = iter(["Node Unavailable"])

    def fault(client: int, _round: int, packet: Packet) -> Packet | str:
        return next(lost, packet) if client == 3 and '"kind":"masked"' in packet.head else packet

    config = HALVES | SECURE | {"run.rounds": 1, "network.min_replies": 5}
    played = play(config, write_nodes(digits(CLIENTS), tmp_path / "nodes"), tmp_path / "runs", fault)
    assert any("a half of 2 clients, and 3 are the least: a round must have 6" in line for line in played.log)
    assert played.records[0]["clients"] == list(range(CLIENTS))


# -- what a node remembers of halves -------------------------------------------------------------------------

ALL, ONE, OTHER = frozenset("abcdef"), fingerprint("abc"), fingerprint("abd")


def added(seed: str, *uploads: Upload, cohort: frozenset[str] = ALL) -> Added:
    return Added("data", cohort, "", seed, frozenset(uploads))


def test_an_upload_is_in_one_half_and_in_the_sum_of_both() -> None:
    history = History([added("4", Upload("u", ONE))])
    history.admit(added("4", Upload("u", ONE)), 0)  # asked for again
    history.admit(added("", Upload("u")), 0)  # the sum of both halves is known
    history.admit(added("4", Upload("v", OTHER)), 0)  # the next round
    for allowed in (0, 9):
        with pytest.raises(WireError, match="the same upload of this node was added up with other members"):
            history.admit(added("4", Upload("u", OTHER)), allowed)
        with pytest.raises(WireError, match="the same upload of this node was added up with other members"):
            history.admit(added("4", Upload("u", ONE), cohort=ALL - {"f"}), allowed)


def test_halves_of_another_seed_are_a_change() -> None:
    history = History([added("4", Upload("u", ONE)), added("", Upload("v"))])
    with pytest.raises(
        WireError, match=r"by another seed, .* keep run.seed, .* leave out run.benefit, or .*changes=1"
    ):
        history.admit(added("5", Upload("w", ONE)), 0)
    with pytest.raises(WireError, match="by another seed"):
        history.expect(added("5"), 0)
    history.admit(added("5", Upload("w", ONE)), 1)
    History([added("", Upload("u"))]).admit(added("4", Upload("u", ONE)), 0)  # whole sums before halves


def test_the_memory_has_the_halves(secure: Federated) -> None:
    memory = Memory(Path(secure.nodes[0]["state-dir"]) / ".secure")
    (name,) = {added.samples for added in memory._read()}
    of_halves, judgement = memory.history(name)
    assert (of_halves.divided, judgement.divided) == ("4, client 0 of 6", "")
    assert of_halves.cohort == judgement.cohort
    assert len(of_halves.uploads) == ROUNDS
    assert all(upload.half for upload in of_halves.uploads)
    with pytest.raises(WireError, match="by another seed"):
        memory.history(name).expect(of_halves._replace(divided="5"), 0)


@pytest.mark.parametrize("change", ["a client more", "other numbers"])
def test_other_numbers_of_the_clients_are_other_halves(change: str, tmp_path: Path) -> None:
    """The same seed divides seven clients otherwise, of which one is never there, and members with other numbers."""
    nodes, runs = write_nodes(digits(CLIENTS), tmp_path / "nodes"), tmp_path / "runs"
    config = HALVES | SECURE | {"run.rounds": 1}
    play(config, nodes, runs)
    again = config | {"session.run": "again", "optimizer.lr": 0.11}  # no upload is the same
    if change == "a client more":
        again |= {"run.clients": CLIENTS + 1}
    else:
        nodes[1:3] = [{**nodes[1], "client": 2}, {**nodes[2], "client": 1}]
    refused = refusal(again, nodes, runs)
    assert "with other numbers of the clients" in refused


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
    """A member of a secure sum may add any numbers to a half; the server goes on."""
    settings = settings_of(HALVES | {"network.wire": "fp16"})
    folder, log = ServerFolder(str(tmp_path), "test", resume=False), list[str]()
    server = new_server(settings, DirectTransport(settings, {}), folder, kept(log))
    total = settings.algorithm.summand(settings.task, server.state, torch.tensor(0), server.upload)
    now = Round(0, reports={n: {} for n in range(CLIENTS)}, dtypes=[t.dtype for t in tree.leaves(total)])
    now.half = tree.wide(
        tree.each(lambda t: torch.full_like(t, 1e9) if t.dim() else torch.ones_like(t), total)
    )
    server._compare_halves(now, server.state, tree.each(lambda t: 2 * torch.ones_like(t), total))
    assert "halves are not compared: 0.w has 1e+09, which does not fit into fp16" in log[-1]
    assert HALF not in now.per_client


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


# -- real processes ------------------------------------------------------------------------------------------


@slow  # the same without processes is above
def test_six_nodes_as_processes_with_secure_sums(tmp_path: Path, simulated: list[records.Record]) -> None:
    config = HALVES | SECURE | {"network.deadline": 240}
    app = init(tmp_path / "app", nested(config))
    nodes = write_nodes(digits(CLIENTS), tmp_path / "nodes")
    with LocalFederation(app, policy=Policy(benefit="sums")) as local:
        local.start_superlink()
        for client, one in enumerate(nodes):
            local.start_node(f"node-{client}", one)
        process = local.start_run({})
        folder = ServerFolder(str(app / "runs"), "test", resume=True)
        lines = list(follow(local, process, folder, ROUNDS, closing=240))
    assert len(lines) == ROUNDS
    content = json.loads((app / "runs" / "test" / BENEFIT).read_text())
    expected = benefit_of(simulated)
    np.testing.assert_allclose(content["value"], expected.value, atol=1e-2 * float(expected.error.min()))
    left = {tuple(line["left"]) for line in verified(Path(nodes[0]["state-dir"]) / AUDIT).lines}
    assert {("comparison",), ("masked judgement",)} <= left
    assert ("losses",) not in left
    (table,) = next(part for part in document_of(read(app)).sections if part.name == "benefit").tables
    assert [row[1] for row in table.rows] == [f"{1000 * value:+.2f}" for value in content["value"]]
