"""What a server or a coordinator learns from a node's answers and refusals, through its whole door.

Each message passes the node's policy, its proposals and its audit log.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import received
from copfl.data.contract.contract import Column, Contract
from copfl.errors import UsageError
from copfl.federation.node import acceptance, resident
from copfl.federation.node.data import NodeData, node_data
from copfl.federation.node.node import Node
from copfl.federation.policy.file import FILE, strict, write_policy
from copfl.federation.policy.record import Policy, ProposalRules, RequestBounds
from copfl.federation.protocol.chained_log import AUDIT, verified
from copfl.federation.protocol.keys import SigningKey, fingerprint, new_key
from copfl.federation.protocol.messages import Content, Field
from copfl.federation.protocol.proposal import KEY, Member, Rotation, rotation_statement
from copfl.federation.protocol.settings import TrainingSettings, settings_of
from copfl.federation.protocol.statistics import like_centres, terms_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.secure_exchange import exchange_of
from copfl.federation.server.statistics import StatisticsServer
from copfl.wire import Head
from tests.data.sites import rows_of, write_rows
from tests.federation.network import CONFIG, digits, write_nodes
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

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')


def refused(content: Content) -> str:
    """Why a node declines; empty: it answers."""
    return str(json.loads(content[0]).get(Field.REFUSED, ""))


def logged(node: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """What the node's audit log says of each request."""
    log = verified(state_of(node) / AUDIT)
    assert not log.problem
    return [(line["event"], line["left"]) for line in log.lines]


# -- statistics: the second pass of another contract ---------------------------------------------------------

NUMBERS = tuple(Column(name=name, type="number", minimum=0.0, maximum=200.0) for name in ("age", "lab"))
TARGET = Column(name="outcome", type="category", categories=("ill", "well"))
OF_ALL = Contract(missing="fill", columns=NUMBERS[:1], targets=(TARGET,))
BUT_ONE = Contract(missing="drop", columns=NUMBERS, targets=(TARGET,))  # leaves out the row without "lab"


def site(folder: Path) -> dict[str, Any]:
    """A node of which one row lacks a value."""
    files = {}
    for part in ("data", "test"):
        rows = [{**row, "lab": "" if n == 3 else n % 7} for n, row in enumerate(rows_of("north"))]
        files[part] = str(write_rows(folder / f"{part}.csv", rows))
    return knowing({**files, "state-dir": str(folder / "state")})


def passed(node: dict[str, Any], contract: Contract, run: str, number: int, centre: float = 0.0) -> Content:
    """The node's answer to a pass of statistics that a coordinator signed."""
    config = {
        "session.agree": True,
        "session.run": run,
        "run.clients": 1,
        "samples.contract": contract.as_json(),
    }
    terms = terms_of(config)
    centres = like_centres(terms.question) + centre
    packet = wire.encode(centres, Head("down", run, terms.layout, number, 0), about={})
    return answer(node, {**config, KEY: proposed(config, [node]).text}, "train", packet)


def test_the_second_pass_of_another_contract_is_another_question(tmp_path: Path) -> None:
    """The sum over all rows, and that of all but one at the centre 0: their difference was the row."""
    node = site(tmp_path)
    assert not refused(passed(node, OF_ALL, "a", 0))
    assert "raise statistics.questions above 1" in refused(passed(node, BUT_ONE, "b", 1))
    assert "raise statistics.questions above 1" in refused(passed(node, BUT_ONE, "c", 0))
    assert not refused(passed(node, OF_ALL, "a", 1, centre=40.0))
    assert "raise statistics.questions" in refused(passed(node, OF_ALL, "a", 1, centre=41.0))
    sent: tuple[str, list[str]] = ("sent", ["statistics"])
    no: tuple[str, list[str]] = ("refused", [])
    assert logged(node) == [sent, no, no, sent, no]


def test_a_second_pass_without_the_first_is_refused(tmp_path: Path) -> None:
    """Also where the owner allows several questions."""
    node = site(tmp_path)
    allowed = dataclasses.replace(Policy().statistics, questions=5)
    write_policy(state_of(node) / FILE, Policy(statistics=allowed))
    assert "has not answered the first pass of this contract" in refused(passed(node, OF_ALL, "a", 1))
    assert not refused(passed(node, OF_ALL, "a", 0))
    assert "has not answered the first pass" in refused(passed(node, BUT_ONE, "b", 1))
    assert not refused(passed(node, BUT_ONE, "b", 0))
    assert not refused(passed(node, BUT_ONE, "b", 1))


SUMMED = tuple(dataclasses.replace(column, mean=None, deviation=None, missing=True) for column in NUMBERS)
MEAN = {"mean": 50.0, "deviation": 10.0}


def test_a_training_on_other_rows_than_the_statistics_is_refused(tmp_path: Path) -> None:
    """The first sums of trees are of a column's values. Without one row they were, less the statistics, its cells."""
    nodes = []
    for n in range(3):
        (tmp_path / str(n)).mkdir()
        nodes.append(site(tmp_path / str(n)))
    open_one = dataclasses.replace(OF_ALL, columns=SUMMED[:1])
    secure: dict[str, Any] = {"run.clients": 3, "secure.aggregation": True, "network.min_replies": 3}
    agreed = {**secure, "session.agree": True, "session.run": "a", "samples.contract": open_one.as_json()}
    signed = proposed(agreed, nodes)
    transport = MessageTransport({**agreed, KEY: signed.text}, nodes)
    folder = ServerFolder(str(tmp_path / "runs"), "a", resume=False)
    folder.path.mkdir(parents=True)
    terms = terms_of(agreed)
    exchange = exchange_of(terms, transport, folder, pause=0, retry=0, proposal=signed.proposal)
    frozen = StatisticsServer(terms, exchange).agreed()
    fewer = dataclasses.replace(frozen, missing="drop", columns=(*frozen.columns, SUMMED[1])).replaced(
        {"lab": MEAN}
    )

    def why(contract: Contract, run: str) -> str:
        settings: dict[str, Any] = {"algorithm.name": "trees", "model.name": "trees", "session.run": run}
        settings |= {"samples.contract": contract.as_json(), "samples.classes": ["ill", "well"]}
        settings["samples.shape"] = [len(contract.columns)]
        federation = Federation(tmp_path, nodes=nodes, **secure, **settings)
        return refused(federation.masked(federation.model()))

    assert "two sums over different rows reveals them" in why(fewer, "b")
    assert "two sums over different rows" in why(dataclasses.replace(frozen, split=1), "c")
    assert "two sums over different rows" in why(dataclasses.replace(frozen, group="ward"), "d")
    assert not why(frozen, "e")


def test_another_target_and_other_columns_do_not_draw_other_test_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are drawn class by class: a second target had other test rows, and so two sums differed by a few rows."""
    nodes = []
    for n in range(3):
        (tmp_path / str(n)).mkdir()
        rows = [{"row": row, **cells} for row, cells in enumerate(rows_of("west", n)[:60])]
        data = str(write_rows(tmp_path / str(n) / "data.csv", rows))
        nodes.append(knowing({"data": data, "state-dir": str(tmp_path / str(n) / "state")}))
    row, age = (Column(name=name, type="number", mean=0.0, deviation=1.0) for name in ("row", "age"))
    ward = Column(name="ward", type="category", categories=("bone", "heart", "skin"))
    first = Contract(columns=(row, age), targets=(TARGET,))
    seen: list[list[list[int]]] = []

    def noted(settings: TrainingSettings, node: Node) -> NodeData:
        data = node_data(settings, node)
        seen.append([sorted(split.x[:, 0].int().tolist()) for split in (data.train, data.test)])
        return data

    monkeypatch.setattr(resident, "node_data", noted)

    def trained(contract: Contract, run: str) -> list[list[int]]:
        """The rows that the first node trains on, and its test rows."""
        settings: dict[str, Any] = {"run.clients": 3, "secure.aggregation": True, "network.min_replies": 3}
        settings |= {"algorithm.name": "fedavg", "model.name": "linear", "session.run": run}
        settings |= {"samples.contract": contract.as_json(), "samples.classes": list(contract.outputs)}
        settings["samples.shape"] = [len(contract.columns)]
        federation = Federation(tmp_path, nodes=nodes, **settings)
        assert not refused(federation.masked(federation.model()))
        return seen[-1]

    drawn = trained(first, "a")
    simulated = first.encoders.dataset(Path(nodes[0]["data"]))
    assert drawn == [
        sorted(split.x[:, 0].astype(int).tolist()) for split in (simulated.train, simulated.test)
    ]
    by_ward = Contract(columns=(row,), targets=(ward,))
    alone = by_ward.encoders.dataset(Path(nodes[0]["data"])).test
    assert sorted(alone.x[:, 0].astype(int).tolist()) != drawn[1]  # what it would draw
    assert trained(by_ward, "b") == drawn


# -- training: refusals tell nothing, and one model a round --------------------------------------------------

SECURE = CONFIG | {
    "secure.aggregation": True,
    "run.even_batches": True,
    "algorithm.name": "fedavg",
    "run.rounds": 2,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
}


class Federation:
    """Three nodes, of which a malicious server shows the first one models of its own."""

    def __init__(
        self,
        folder: Path,
        policy: Policy | None = None,
        nodes: list[dict[str, Any]] | None = None,
        **settings: Any,
    ) -> None:
        made = nodes or write_nodes(digits(), folder / "nodes", named=False)
        self.nodes = [knowing(config) for config in made]
        if policy is not None:
            write_policy(state_of(self.nodes[0]) / FILE, policy)
        self.config = (SECURE if nodes is None else {}) | settings
        self.run_config = {**self.config, KEY: proposed(self.config, self.nodes).text}
        self.settings = settings_of(self.config)
        self.sessions = 0

    def ask(self, kind: str, n: int, record: Any, about: dict[str, Any], round: int = 0) -> Content:
        head = Head(kind, str(self.config["session.run"]), self.settings.layout, round, n)
        packet = wire.encode(record, head, about=about)
        return answer(self.nodes[n], self.run_config, "train", packet)

    def model(self, added: float = 0.0) -> Any:
        algorithm, task = self.settings.algorithm, self.settings.task
        down = received(algorithm, algorithm.server_init(task, 3), torch.tensor(0))
        return tree.each(lambda t: t + added if t.is_floating_point() else t, down)

    def masked(self, model: Any, round: int = 0) -> Content:
        """The first node's answer to a fresh sum that goes as far as its vector."""
        self.sessions += 1
        session: dict[str, Any] = {Field.SESSION: f"session-{self.sessions}"}
        begun = [json.loads(self.ask("keys", n, (), session, round)[0])["about"] for n in range(3)]
        shown = {
            Field.COHORT: {str(n): one[Field.MEMBER] for n, one in enumerate(begun)},
            Field.KEYS: {str(n): one[Field.KEYS] for n, one in enumerate(begun)},
            Field.SIGNATURE: {str(n): one[Field.SIGNATURE] for n, one in enumerate(begun)},
        }
        shares = [json.loads(self.ask("shares", n, (), session | shown, round)[0])["about"] for n in range(3)]
        sealed = {str(n): shares[n][Field.SHARES]["0"] for n in (1, 2)}
        return self.ask("down", 0, model, session | {Field.SHARES: sealed, Field.COUNTED: -1}, round)


def form(content: Content) -> tuple[Any, ...]:
    """All that a server sees of an answer but random bytes: its fields, and its length."""
    head = json.loads(content[0])
    about = {name: value for name, value in head.get("about", {}).items() if name != Field.SESSION}
    return head.get("kind"), about, head.get(Field.REFUSED), len(content[0]), len(content[1])


@pytest.mark.parametrize("case", ["above the range", "too small", "diverged"])
def test_an_answer_has_one_form_whatever_the_data_give(case: str, tmp_path: Path, logged: list[str]) -> None:
    """A refusal of a value was a bit of it, as often as a server asked; now the owner alone learns it."""
    usual = form(Federation(tmp_path / "usual").masked(Federation(tmp_path / "like").model()))
    changed: dict[str, dict[str, Any]] = {
        "above the range": {"secure.range": 0.25},
        "too small": {"secure.bits": 4},
    }
    federation = Federation(tmp_path / case, **changed.get(case, {}))
    model = federation.model(1e30 if case == "diverged" else 0.0)
    found = form(federation.masked(model))
    assert found[:3] == usual[:3]
    if case == "diverged":  # the same number of bits in an entry
        assert found == usual
    words = {"above the range": "is above 0.25", "too small": "too small", "diverged": "training diverged"}
    assert any(words[case] in text for text in logged)


def test_a_node_trains_on_one_model_in_a_round(tmp_path: Path) -> None:
    """Each further one was another question about the same data, and without shares no sum was remembered."""
    federation = Federation(tmp_path)
    assert not refused(federation.masked(federation.model()))
    for added in (1e-6, 1.0, 1e30):
        assert "trains on one in a round" in refused(federation.masked(federation.model(added)))
    assert not refused(federation.masked(federation.model()))  # with fresh keys
    assert not refused(federation.masked(federation.model(0.5), round=1))
    assert "message is old" in refused(federation.masked(federation.model(), round=0))


def test_a_phase_that_failed_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is written down before anything is computed."""
    federation = Federation(tmp_path)
    data = Path(federation.nodes[0]["data"])
    content = data.read_bytes()
    data.write_bytes(b"no file of arrays")
    assert refused(federation.masked(federation.model())) == "its data cannot be used; see the node's log"
    data.write_bytes(content)
    again = {Field.SESSION: f"session-{federation.sessions}", Field.SHARES: {}}
    other = federation.ask("down", 0, federation.model(1.0), again)
    assert "out of turn, or a second time" in refused(other)


def test_refusals_for_the_data_are_bounded(tmp_path: Path) -> None:
    """Each is a bit about the data for each proposal; the policy says how many there are in a day."""
    federation = Federation(tmp_path, Policy(bounds=RequestBounds(refusals_per_day=3)))
    data = Path(federation.nodes[0]["data"])
    with np.load(data) as arrays:
        content = dict(arrays)
    np.savez(data, **{**content, "y": content["y"] + 50})  # classes that the federation does not have
    uniform = "its data cannot be used; see the node's log"
    assert [refused(federation.masked(federation.model())) for _ in range(3)] == [uniform] * 3
    assert "[bounds.refusals_per_day]" in refused(federation.ask("keys", 0, (), {Field.SESSION: "further"}))


# -- members: whom the owner compared ------------------------------------------------------------------------


def greeted(node: dict[str, Any], config: dict[str, Any], members: tuple[Member, ...]) -> str:
    """Why a node refuses a greeting of a run with these members."""
    signed = proposed(config, [], members=members)
    return refused(
        answer(node, {**config, KEY: signed.text}, "query", ('{"run": "test", "challenge": "a"}', b""))
    )


def invented(number: int) -> Member:
    return Member(number, f"invented-{number}", SigningKey(new_key()).public)


def trusting(node: dict[str, Any], members: str = "first") -> dict[str, Any]:
    """The node, whose owner has the strict policy and knows the coordinator."""
    path = state_of(node) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = strict().replace("coordinators = []", f'coordinators = ["{fingerprint(COORDINATOR.public)}"]')
    path.write_text(text.replace('members = "approved"', f'members = "{members}"'))
    return node


def test_invented_members_wait_for_the_owner(tmp_path: Path) -> None:
    """A sum of three with two members that the coordinator made up is the third one's upload."""
    victim = trusting(Federation(tmp_path).nodes[0], "approved")
    own = members_of([victim])
    config = SECURE
    why = greeted(victim, config, (*own, invented(1), invented(2)))
    assert "members that this node does not know" in why
    assert "[proposals.members]" in why
    (waiting,) = acceptance.pending(state_of(victim))
    assert len(acceptance.strangers(state_of(victim), waiting.proposal)) == 3
    acceptance.approve(state_of(victim), waiting)  # after people have compared fingerprints
    assert not greeted(victim, config, waiting.proposal.members)
    assert not greeted(victim, config | {"run.rounds": 1}, waiting.proposal.members)  # the same people
    assert "[proposals.members]" in greeted(victim, config, (*own, invented(1), waiting.proposal.members[2]))


def test_the_first_list_of_members_is_kept(tmp_path: Path) -> None:
    """Then a further member waits for the owner; fewer, and one with a new key that its old one signed, do not."""
    federation = Federation(tmp_path)
    node, members = federation.nodes[0], members_of(federation.nodes)
    assert not greeted(node, SECURE, members)
    assert "invented-2" in greeted(node, SECURE, (*members[:2], invented(2)))
    assert not greeted(node, SECURE, members)
    old, new = key_of(federation.nodes[2]), SigningKey(new_key())
    rotation = Rotation(old.public, old.sign(rotation_statement(new.public)))
    rotated = members[2]._replace(key=new.public, rotations=(rotation,))
    assert not greeted(node, SECURE, (*members[:2], rotated))
    assert not greeted(node, SECURE | {"secure.aggregation": False}, members[:2])


def test_a_few_of_the_approved_members_wait_for_the_owner(tmp_path: Path) -> None:
    """Four of fifteen that work with the coordinator are fewer than a third, and in a run of five all but one."""
    node = trusting(Federation(tmp_path).nodes[0], "approved")
    settings = SECURE | {"run.clients": 15, "network.min_replies": 0}
    everybody = (*members_of([node]), *(invented(number) for number in range(1, 15)))
    greeted(node, settings, everybody)
    acceptance.approve(state_of(node), acceptance.pending(state_of(node))[0])
    assert not greeted(node, settings | {"run.rounds": 1}, everybody)
    few = settings | {"run.clients": 5}
    why = greeted(node, few, everybody[:5])
    assert "lacks members of every list that its owner approved" in why
    assert "[proposals.members]" in why
    (waiting,) = acceptance.pending(state_of(node))
    acceptance.approve(state_of(node), waiting)  # as when the others have left
    assert not greeted(node, few | {"run.rounds": 1}, everybody[:5])
    assert not greeted(node, settings | {"run.rounds": 3}, everybody)
    assert "[proposals.members]" in greeted(node, settings | {"run.clients": 4}, everybody[:4])


def test_a_policy_names_no_other_rule() -> None:
    with pytest.raises(UsageError, match=r"proposals.members in a policy"):
        Policy(proposals=ProposalRules(members="all"))
