"""A server that forges, repeats and weakens secure sums: it calls the nodes' own functions with any message."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import received
from copfl.data.contract.contract import Column, Contract
from copfl.errors import RunError, UsageError, WireError
from copfl.federation.node import (
    secure_memory,
    secure_phases,
    secure_update,
    update,
)
from copfl.federation.node.data import node_data
from copfl.federation.node.known_data import hashes_of
from copfl.federation.node.secure_memory import Objective, RememberedSum, SumHistory
from copfl.federation.policy.file import FILE, write_policy
from copfl.federation.policy.record import Policy
from copfl.federation.policy.refusal import PolicyError
from copfl.federation.protocol import secure_sum
from copfl.federation.protocol.keys import own_key
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.proposal import Proposal, Rotation, rotation_statement
from copfl.federation.protocol.secure_members import Subject, context_of, keys_statement
from copfl.federation.protocol.secure_sum import Floats, Keys, MaskedSum, neighbours
from copfl.federation.protocol.settings import federation_of, settings_of
from copfl.parts.mixed_model import unpacked
from copfl.wire import Head, Packet
from tests.federation.network import CONFIG, digits, node_of, write_nodes
from tests.federation.signing import key_of, proposed

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

ALL, WITHOUT_4 = (0, 1, 2, 3, 4), (0, 1, 2, 3)
Nodes = dict[int, dict[str, Any]]
REFUSED = "difference of (two|both) sums .*single uploads"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of nodes that nothing was asked of."""
    folder = tmp_path_factory.mktemp("fresh") / "nodes"
    write_nodes(digits(5), folder)
    return folder


class OneSum(NamedTuple):
    """A sum over all nodes, and their folder after it."""

    total: Floats
    folder: Path


@pytest.fixture(scope="module")
def one_sum(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> OneSum:
    folder = tmp_path_factory.mktemp("summed")
    return OneSum(Malicious(copied(fresh, folder)).total(ALL), folder / "nodes")


def copied(folder: Path, to: Path) -> Nodes:
    """The nodes of the folder, which are files alone, in another one."""
    place = shutil.copytree(folder, to / "nodes")
    return {
        n: {"data": str(place / f"{n}.npz"), "state-dir": str(place / f"state-{n}"), "client": n} for n in ALL
    }


@pytest.fixture
def nodes(fresh: Path, tmp_path: Path) -> Nodes:
    return copied(fresh, tmp_path)


@pytest.fixture
def summed(one_sum: OneSum, tmp_path: Path) -> Nodes:
    """Nodes that remember a sum over all of them, of the run "test"."""
    return copied(one_sum.folder, tmp_path)


class Malicious:
    """One secure sum, asked for by a server that may show each client something else."""

    def __init__(
        self,
        nodes: Nodes,
        *,
        run: str = "test",
        round: int = 0,
        proposal: Proposal | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.nodes, self.run, self.round = nodes, run, round
        given = {
            "secure.aggregation": True,
            "algorithm.name": "fedavg",
            "run.clients": 5,
            "network.min_replies": 0,
        }
        given |= {"optimizer.lr": 0.1, **(config or {})}
        every = {k: v for k, v in CONFIG.items() if k != "session.run"} | given
        left_out = (("model.width", 0), ("optimizer.lr", 0))
        self.settings = settings_of({k: v for k, v in every.items() if (k, v) not in left_out})
        self.session, self.proposal = secrets.token_hex(8), proposal
        self.noise: dict[int, float] = {}  # what is added to the model that a client receives
        self.shown_keys: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
        self.shown_survivors: dict[int, Collection[int]] = {}
        self.counted: dict[
            int, int
        ] = {}  # from which of its records a client is told to start; -1: the initial one
        self.persists = False  # although a node reveals no shares
        self.asked: list[tuple[str, int]] = []

    def ask(self, phase: str, client: int, fields: dict[str, Any]) -> Packet:
        """A node's answer."""
        self.asked.append((phase, client))
        head = Head(
            "down" if phase == "masked" else phase, self.run, self.settings.layout, self.round, client
        )
        record = self.model(client) if phase == "masked" else ()
        if phase == "masked":
            fields = {**fields, Field.COUNTED: self.counted.get(client, -1)}
        packet = wire.encode(record, head, about={Field.SESSION: self.session, **fields})
        node_config = self.nodes[client]
        return secure_update.round_answer(self.settings, node_of(node_config, self.proposal), packet)

    def about(self, phase: str, client: int, fields: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads(self.ask(phase, client, fields).head)["about"])

    def model(self, client: int) -> Any:
        algorithm, task = self.settings.algorithm, self.settings.task
        down = received(algorithm, algorithm.server_init(task, 5), torch.tensor(client))
        added = self.noise.get(client, self.noise.get(-1, 0.0))
        return tree.each(lambda t: t + added if t.is_floating_point() else t, down)

    def total(self, clients: Collection[int], survivors: Collection[int] = ()) -> Floats:
        """The sum over these clients; an error if a node refuses."""
        rules, order = self.settings.rules, sorted(clients)
        begun = {n: self.about("keys", n, {}) for n in order}
        keys = {n: Keys(*map(bytes.fromhex, begun[n][Field.KEYS])) for n in order}
        cohort = {n: begun[n][Field.MEMBER] for n in order}
        found = MaskedSum(rules, keys, neighbours(order, 0), {}, {})
        shown = {
            Field.COHORT: {str(n): member for n, member in cohort.items()},
            Field.KEYS: {str(n): [key.hex() for key in pair] for n, pair in keys.items()},
            Field.SIGNATURE: {str(n): begun[n][Field.SIGNATURE] for n in order},
        }
        for n in order:
            answer = self.about("shares", n, self.shown_keys.get(n, dict)(shown))
            found.sealed[n] = {int(m): text.encode() for m, text in answer[Field.SHARES].items()}
            found.commitments[n] = bytes.fromhex(answer[Field.COMMITMENT])
        for n in survivors or order:
            texts = {str(m): text.decode() for m, text in found.sealed_for(n).items()}
            packet = self.ask("masked", n, {Field.SHARES: texts})
            size = int.from_bytes(packet.body[:8], "little")  # of safetensors' own head
            content = packet.body[8 + size :]
            found.add(n, content, len(content) // rules.width)
        body = wire.encode(self.model(order[0]), Head("", "", "", 0, 0)).body
        subject = Subject(self.run, self.round, self.session)
        found.context = context_of(self.settings, subject, cohort, body)
        signed = {
            n: self.about(
                "consistent",
                n,
                {Field.SURVIVORS: sorted(self.shown_survivors.get(n, found.survivors))},
            )[Field.SIGNATURE]
            for n in sorted(found.survivors)
        }
        revealed = {}
        for n in signed:
            with contextlib.suppress(*([WireError] if self.persists else [])):
                fields = {Field.SIGNATURE: {str(m): text for m, text in signed.items()}}
                revealed[n] = self.about("revealed", n, fields)
        return found.total(
            {
                n: {int(m): bytes.fromhex(share) for m, share in fields[Field.SHARES].items()}
                for n, fields in revealed.items()
            }
        )


# -- sums that could be subtracted ---------------------------------------------------------------------------


def test_the_sum_is_that_of_the_uploads(nodes: Nodes) -> None:
    """Two sums with the same members are the same to a step: asked for again, a node gives nothing new."""
    first, again = Malicious(nodes).total(ALL), Malicious(nodes, run="second").total(ALL)
    settings = Malicious(nodes).settings
    assert np.array_equal(first, again)
    uploads = []
    for n in ALL:
        server = Malicious(nodes)
        head = Head("down", "plain", settings.layout, 0, n)
        trained = update.train(
            settings, node_of(nodes[n]), wire.encode(server.model(n), head, about={}), node_data
        )
        assert trained.output is not None
        upload = trained.output.upload
        uploads.append((upload.w.double() * upload.size).numpy())
    start = np.abs(first[: len(uploads[0])] - sum(uploads)).max()
    assert start <= 5 * settings.rules.step


REPEATS: dict[str, dict[str, Any]] = {
    "the same run": {},
    "after a rollback": {"config": {"session.rollback": True}},
    "a run of another name": {"run": "second"},
    "another seed": {"run": "second", "config": {"run.seed": 7}},
    "another round": {"round": 2},
    "other settings": {"run": "second", "config": {"secure.bits": 40, "optimizer.lr": 0.09}},
    "another algorithm": {"run": "second", "config": {"algorithm.name": "fedprox"}},
}


@pytest.mark.parametrize("how", REPEATS)
def test_a_second_sum_without_one_member_is_refused(how: str, summed: Nodes) -> None:
    second = Malicious(summed, **REPEATS[how])
    with pytest.raises(WireError, match=REFUSED):
        second.total(WITHOUT_4)
    assert second.asked[-1] == ("masked", 0)  # the first node that is asked for a vector


def test_a_smaller_cohort_first_and_the_larger_one_later_is_refused(nodes: Nodes) -> None:
    Malicious(nodes).total(WITHOUT_4)
    with pytest.raises(WireError, match=REFUSED):
        Malicious(nodes, run="second").total(ALL)


def test_a_second_sum_that_leaves_out_rows_is_refused(summed: Nodes) -> None:
    """Of the same members: the difference of both sums would be the update of the rows that are left out."""
    fewer = {"run.validation": 0.1}
    second = Malicious(summed, run="second", config=fewer)
    with pytest.raises(WireError, match="two sums over different rows reveals them"):
        second.total(ALL)
    assert second.asked[-1] == ("masked", 0)
    allowed = {n: config | {secure_memory.CHANGES: 1} for n, config in summed.items()}
    Malicious(allowed, run="second", config=fewer).total(ALL)


def test_an_algorithm_that_holds_one_row_out_is_refused(nodes: Nodes) -> None:
    """`holdout` of kNN-Per: every so manieth sample, of as many as the largest member has the last one alone."""
    arrays = {n: np.load(nodes[n]["data"]) for n in ALL}
    largest = max(ALL, key=lambda n: len(arrays[n]["y"]))
    size = len(arrays[largest]["y"])
    config = {"algorithm.name": "knn_per", "model.name": "linear", "model.width": 0, "run.batch": size}
    config |= {"optimizer.name": "sgd", "algorithm.weights": "equal", "algorithm.samples": 5}
    every, but_one = (config | {"algorithm.holdout": count} for count in (0, size))
    whole = Malicious(nodes, config=every).total(ALL)
    second = Malicious(nodes, run="second", config=but_one)
    with pytest.raises(WireError, match=f'"but samples at multiples of {size}" are asked for'):
        second.total(ALL)
    assert second.asked[-1] == ("masked", 0)
    allowed = {n: options | {secure_memory.CHANGES: 1} for n, options in nodes.items()}
    asked = Malicious(allowed, run="third", config=but_one)
    entries = asked.settings.task.classes * 64
    difference = (asked.total(ALL) - whole)[:entries].reshape(-1, 64)
    row = arrays[largest]["x"][-1].reshape(1, 64)
    found = np.abs(np.corrcoef(difference, row)[-1, :-1]).max()
    assert found > 0.9  # what the refusal is for


def test_the_settings_that_leave_out_rows() -> None:
    """Also those that decide which rows are test rows. Another column or target is another model, which is allowed."""
    target = Column(name="outcome", type="category", categories=("ill", "well"))

    def rows(
        missing: str,
        client: int = 0,
        names: tuple[str, ...] = ("age",),
        run: dict[str, Any] | None = None,
        **of_contract: Any,
    ) -> str:
        columns = tuple(Column(name=name, type="number", mean=0.0, deviation=1.0) for name in names)
        contract = Contract(missing=missing, columns=columns, targets=(target,), **of_contract)
        table = {"model.name": "mlp", "samples.contract": contract.as_json()}
        return secure_memory.rows_of(federation_of(table | (run or {})), client)

    assert rows("refuse") == rows("fill") == rows("fill", run={"run.seed": 7}) == rows("fill", 2) == ""
    assert rows("fill", names=("age", "lab")) == ""
    assert rows("drop") == "complete in age, outcome"
    assert rows("fill", run={"run.validation": 0.15}) != rows("fill", run={"run.validation": 0.1500000001})
    validated = rows("drop", 1, run={"run.validation": 0.2})
    assert validated == (
        "but 0.2 for validation with seed 0 as client 1; drawn by outcome of age, outcome; complete in age, outcome"
    )
    backwards = {"run.validation": 0.2, "samples.classes": ["well", "ill"]}
    assert rows("fill", run=backwards).endswith("in the order well, ill")
    assert rows("fill", split=1) == "split 1"
    assert rows("fill", run={"algorithm.name": "fedpoe"}) == "but samples at multiples of 5"
    assert rows("fill", run={"algorithm.name": "fedpoe", "algorithm.holdout": 0}) == ""
    trusting = {"algorithm.name": "copfl", "algorithm.trust": "held_out"}
    assert rows("fill", run=trusting) == "but samples at multiples of 5"
    assert rows("fill", time="day") == "before the last by day"
    assert rows("drop", group="lab") == "complete in age, lab, outcome; together by lab"


def test_the_settings_by_which_rows_count() -> None:
    """All of an objective but its metrics; of another target it may be another one."""
    columns = (Column(name="age", type="number", mean=0.0, deviation=1.0),)

    def objective(*targets: str, **settings: Any) -> Objective:
        task = "survival" if len(targets) > 1 else "regression"
        named = tuple(Column(name=name, type="number", mean=0.0, deviation=1.0) for name in targets)
        contract = Contract(missing="fill", task=task, columns=columns, targets=named)
        tables = {
            "model": {"name": "mlp"},
            "samples": {"contract": contract.as_json(), "kind": task, "classes": 1},
        }
        given = {title: tables.get(title, {}) | settings.get(title, {}) for title in (*tables, "task")}
        return secure_memory.objective_of(federation_of(given))

    days = objective("days")
    for same in ({}, {"task": {"loss": "squared"}}, {"task": {"metrics": ["mae"]}}, {"model": {"width": 3}}):
        assert objective("days", **same) == days
    for other in ({"loss": "huber"}, {"loss": "huber", "delta": 0.5}, {"loss": "absolute"}):
        assert objective("days", task=other) != days
    assert objective("days", samples={"target_mean": [3.0], "target_std": [1.0]}) != days
    assert objective("days", model={"max_length": 5}) != days
    history = SumHistory([RememberedSum("data", frozenset("abc"), "", days, frozenset())])

    def changes(further: Objective) -> int:
        return history.changes(history[0]._replace(objective=further))

    assert (changes(days), changes(objective("cost")), changes(Objective())) == (0, 0, 0)
    assert changes(objective("days", task={"loss": "absolute"})) == 1
    assert changes(objective("days", "died")) == changes(objective("days", "died", "began")) == 1
    cox, breslow = (objective("days", "died", task=task) for task in ({}, {"ties": "breslow"}))
    assert SumHistory(history[0]._replace(objective=one) for one in (cox, days, breslow)).changes() == 2


@pytest.mark.parametrize("weights", [[1.0, 1.0, 0.0], [1.0, 1.0, 1e-6], [0.0, 0.0, 0.0], [1.0, 1.0, -1.0]])
def test_weights_that_leave_out_a_class_are_refused_in_secure_sums(weights: list[float]) -> None:
    config = {"model.name": "linear", "samples.classes": 3, "task.class_weights": weights}
    with pytest.raises(UsageError, match=r"task\.class_weights.* at least 0.001 of the largest"):
        federation_of(config | {"secure.aggregation": True})
    federation_of(config)
    federation_of(config | {"secure.aggregation": True, "task.class_weights": [1.0, 1.0, 0.01]})


PLAIN = {"model.name": "linear", "model.width": 0, "optimizer.name": "sgd", "algorithm.weights": "equal"}


class ObjectiveAttack(NamedTuple):
    """Two runs that differ in an option of the objective, about data in which it concerns the last row of node 0."""

    targets: Callable[[int, int], Any]  # of a node, with so many rows
    first: dict[str, Any]
    second: dict[str, Any]


def rare_class(node: int, count: int) -> Any:
    """Classes 0 to 8; the last row of node 0 alone has the class 9."""
    y = np.arange(count) % 9
    return np.where((np.arange(count) == count - 1) & (node == 0), 9, y)


def times(node: int, count: int) -> Any:
    """Events at odd times; the last row of node 0 alone has one at 2."""
    y = 1.0 + 2 * (np.arange(count) % 20)
    y = np.where((np.arange(count) == count - 1) & (node == 0), 2.0, y)
    return np.stack([y, np.ones(count)], 1).astype(np.float32)


def values(node: int, count: int) -> Any:
    """Quarters; the last row of node 0 alone is 2.5."""
    y = (np.arange(count) % 7 + 0.25).astype(np.float32)
    return np.where((np.arange(count) == count - 1) & (node == 0), np.float32(2.5), y)


SURVIVAL = {"samples.kind": "survival", "task.loss": "discrete_time", "samples.classes": 2}
ABSOLUTE = {
    "samples.kind": "regression",
    "task.loss": "absolute",
    "samples.classes": 1,
    "samples.target_std": [1.0],
}
OBJECTIVES = {
    "class weights": ObjectiveAttack(rare_class, {}, {"task.class_weights": [1.0] * 9 + [0.5]}),
    "cuts": ObjectiveAttack(
        times, SURVIVAL | {"task.cuts": [1.9, 30.0]}, SURVIVAL | {"task.cuts": [2.1, 30.0]}
    ),
    "scale": ObjectiveAttack(
        values, ABSOLUTE | {"samples.target_mean": [2.49]}, ABSOLUTE | {"samples.target_mean": [2.51]}
    ),
}


@pytest.mark.parametrize("option", OBJECTIVES)
def test_a_second_sum_in_which_rows_count_otherwise_is_refused(
    option: str, nodes: Nodes, tmp_path: Path
) -> None:
    """With a model of zeros the difference of both sums was the row, whose pixels anybody can look at."""
    attack = OBJECTIVES[option]
    other = with_targets(nodes, tmp_path, attack.targets)
    row = np.load(nodes[0]["data"])["x"][-1].reshape(1, 64)
    whole = of_zeros(other, "first", attack.first)
    with pytest.raises(WireError, match="two sums in which rows count differently reveals them"):
        of_zeros(other, "second", attack.second)
    allowed = {n: config | {secure_memory.CHANGES: 1} for n, config in other.items()}
    difference = of_zeros(allowed, "third", attack.second) - whole
    assert np.abs(np.corrcoef(difference, row)[-1, :-1]).max() > 0.999  # what the refusal is for


def with_targets(nodes: Nodes, folder: Path, targets: Callable[[int, int], Any]) -> Nodes:
    """The nodes with the same samples, and other targets."""
    changed = {}
    for n, config in nodes.items():
        arrays = dict(np.load(config["data"]))
        arrays |= {name: targets(n, len(arrays[name])) for name in ("y", "y_test")}
        np.savez(folder / f"{n}.npz", **arrays)
        changed[n] = config | {"data": str(folder / f"{n}.npz")}
    return changed


def of_zeros(nodes: Nodes, run: str, settings: dict[str, Any], round: int = 0) -> Floats:
    """The weights of each output in a sum after one step on all rows, from a linear model of zeros."""
    size = max(len(np.load(config["data"])["y"]) for config in nodes.values())
    server = Malicious(nodes, run=run, config=PLAIN | {"run.batch": size} | settings, round=round)
    initial, outputs = server.model(0), int(settings.get("samples.classes", 10))
    server.model = lambda client: tree.each(torch.zeros_like, initial)  # type: ignore[method-assign]
    return server.total(ALL)[: 64 * outputs].reshape(outputs, 64)


# -- one sum with many outputs -------------------------------------------------------------------------------


def found_rows(nodes: Nodes, found: Floats) -> int:
    """How many rows of node 0 are told by the weights of some outputs.

    Two classes differ by their rows. Of an interval the weights are those of the rows that go through it, less those
    that end in it, so one interval after the other tells who goes on.
    """
    rows = np.load(nodes[0]["data"])["x"].reshape(-1, 64).astype(float)
    through, ends = np.zeros(64), list[Floats]()
    for of_interval in found:
        through, before = of_interval + through / 2, through
        ends.append(before - through)
    vectors = np.concatenate([np.diff(found, axis=0), found - found[-1], ends])
    vectors = vectors[np.abs(vectors).max(1) > 1e-3]
    both = np.corrcoef(np.concatenate([rows, vectors]))[: len(rows), len(rows) :]
    return int((np.abs(both) > 0.999).any(1).sum()) if len(vectors) else 0


MANY = 400
UNIQUE_TIMES = SURVIVAL | {"task.cuts": [n + 0.5 for n in range(MANY)], "samples.classes": MANY}
UNIQUE_CLASSES = {"samples.classes": MANY}
MANY_OUTPUTS: dict[str, tuple[Callable[[int, int], Any], dict[str, Any]]] = {
    "intervals": (
        lambda node, count: np.stack(
            [MANY // 5 * (4 - node) + 1.0 + np.arange(count) % 80, np.ones(count)], 1
        ),
        UNIQUE_TIMES,
    ),
    "classes": (lambda node, count: MANY // 5 * node + np.arange(count) % 79, UNIQUE_CLASSES),
}


@pytest.mark.job
@pytest.mark.parametrize("what", MANY_OUTPUTS)
def test_a_sum_with_many_outputs_is_of_no_single_row(what: str, nodes: Nodes, tmp_path: Path) -> None:
    """Each class of one row, and each interval in which one row ends, was this row in the sum."""
    targets, settings = MANY_OUTPUTS[what]
    few = with_targets(nodes, tmp_path, targets)
    arrays = dict(np.load(few[0]["data"]))
    arrays |= {name: arrays[name][:60] for name in ("x", "y")}
    np.savez(few[0]["data"], **arrays)
    whole = of_zeros(few, "first", settings)
    assert found_rows(few, whole) > 40  # what the policy's line is for
    for config in few.values():
        write_policy(Path(config["state-dir"]) / FILE, Policy(least_rows=5))
    merged = of_zeros(few, "second", settings)
    assert found_rows(few, merged) == 0
    if what == "intervals":
        assert np.abs(merged).max() > 0.01  # they are learned from, in groups


@pytest.mark.job
def test_products_of_columns_are_of_no_single_row(nodes: Nodes, tmp_path: Path) -> None:
    """The sums of `levels` have a row of products for each column: one that a row alone has was this row."""
    regression = {"samples.kind": "regression", "samples.classes": 1, "algorithm.name": "levels"}
    config = {"model.name": "linear", "model.width": 0, "algorithm.varying": "none", "optimizer.lr": 0}
    alone = with_targets(nodes, tmp_path, values)
    for n, options in alone.items():
        arrays = dict(np.load(options["data"]))
        arrays["x"][:, 0, 0, 0] = 0
        arrays["x"][-1:, 0, 0, 0] = 255 if n == 0 else 0
        np.savez(options["data"], **arrays)
    row = np.load(alone[0]["data"])["x"][-1].reshape(64)

    def told(run: str) -> float:
        asked = Malicious(alone, run=run, config=regression | config)
        sums = asked.total(ALL)[: 2 + 66 * 67 // 2]
        (products,) = unpacked(torch.from_numpy(sums), 1, 66, 0).g[:, 0].numpy()
        usual = (0 - 0.3) / 0.37  # of the column
        found = products[0, 1:64] - usual * products[64, 1:64]
        return float(np.corrcoef(found, row[1:])[0, 1]) if np.abs(found).max() > 0.1 else 0.0

    assert told("first") > 0.999  # what the policy's line is for
    for options in alone.values():
        write_policy(Path(options["state-dir"]) / FILE, Policy(least_rows=5))
    assert told("second") < 0.9


@pytest.mark.parametrize("wire_format", ["fp32", "bf16"])
def test_a_first_model_of_the_servers_choice_is_refused(wire_format: str, nodes: Nodes) -> None:
    """A model of zeros shows sums of rows by class. Later models follow from sums that a node does not see."""
    for config in nodes.values():
        write_policy(Path(config["state-dir"]) / FILE, Policy(first_model=True))
    how = {"network.wire": wire_format}
    honest, chosen = Malicious(nodes, config=how), Malicious(nodes, run="second", config=how)
    honest.total(ALL)
    chosen.noise[-1] = 0.5
    with pytest.raises(PolicyError, match=r"first model is not the one .* \[first_model\]"):
        chosen.total(ALL)
    skipped = Malicious(nodes, run="third", round=1, config=how)
    skipped.total(ALL)  # the first round had no result
    skipped = Malicious(nodes, run="fourth", round=1, config=how)
    skipped.noise[-1] = 0.5
    with pytest.raises(PolicyError, match=r"has seen no earlier round of run fourth.* \[first_model\]"):
        skipped.total(ALL)
    later = Malicious(nodes, round=1, config=how)
    later.noise[-1] = 0.5
    later.total(ALL)


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ({"run.steps": 1}, True),
        ({"optimizer.lr": 0.01}, True),
        ({"optimizer.lr": 0.01, "run.even_batches": True}, False),
    ],
    ids=["steps", "epoch", "even batches"],
)
def test_two_sums_of_batches_differ_by_one_row(settings: dict[str, Any], is_told: bool, nodes: Nodes) -> None:
    """Why a policy refuses run.steps in secure sums: the others send the same in both rounds.

    The last step of an epoch is of what is left, too: a row of it counts more than one of the other steps, so that
    two rows are the whole difference. Even batches have no such step: it is of many rows, and a fortieth in size.
    """
    arrays = {n: np.load(nodes[n]["data"]) for n in ALL}
    largest = max(ALL, key=lambda n: len(arrays[n]["y"]))
    config = settings | {"model.name": "linear", "run.batch": len(arrays[largest]["y"]) - 1}
    config |= {"model.width": 0, "optimizer.name": "sgd", "algorithm.weights": "equal"}
    totals = []
    for round in range(2):
        asked = Malicious(nodes, config=config, round=round)
        asked.counted = dict.fromkeys(ALL, round - 1)
        totals.append(asked.total(ALL))
    entries = asked.settings.task.classes * 64
    difference = (totals[1] - totals[0])[:entries].reshape(-1, 64)
    rows = arrays[largest]["x"].reshape(-1, 64)
    found = np.corrcoef(difference, rows)[: len(difference), len(difference) :].max()
    directions = np.linalg.svd(difference, compute_uv=False) ** 2
    share = directions[:2].sum() / directions.sum()
    assert found > 0.98 if is_told else share < 0.9  # 1 of an epoch whose last batch is of one row
    assert is_told or np.abs(difference).max() < 0.001  # 0.02 without them


def test_a_second_sum_with_one_member_from_another_record_is_refused(nodes: Nodes) -> None:
    """All others send the same again, so the difference of both sums was what one member's own rows give."""
    config = {"algorithm.name": "fedper"}  # a member's record has its own head
    Malicious(nodes, config=config).total(ALL)
    first, second = (Malicious(nodes, config=config, round=1) for _ in range(2))
    first.counted = second.counted = dict.fromkeys(ALL, 0)
    first.total(ALL)
    second.total(ALL)  # the same again: no further question
    second = Malicious(nodes, config=config, round=1)
    second.counted = {n: 0 for n in ALL if n != 2}
    with pytest.raises(WireError, match="with another record of its own"):
        second.total(ALL)
    assert second.asked[-1] == ("masked", 2)


def test_a_member_lost_after_the_keys_is_noticed(summed: Nodes) -> None:
    second = Malicious(summed, run="second")
    with pytest.raises(WireError, match=REFUSED):
        second.total(ALL, survivors=WITHOUT_4)
    assert second.asked[-1] == ("consistent", 0)


@pytest.mark.parametrize("perturbed", [1e-9, 1e-3])
def test_a_nearly_equal_model_is_refused_too(perturbed: float, summed: Nodes) -> None:
    second = Malicious(summed, run="second")
    second.noise[-1] = perturbed
    with pytest.raises(WireError, match=REFUSED):
        second.total(WITHOUT_4)


@pytest.mark.parametrize("how", ["removed", "renamed", "restored"])
def test_the_memory_is_not_in_the_folder_of_the_run(how: str, nodes: Nodes, tmp_path: Path) -> None:
    states = {n: Path(config["state-dir"]) for n, config in nodes.items()}
    first = Malicious(nodes)
    for n in ALL:
        first.about("keys", n, {})
        shutil.copytree(states[n] / "test", tmp_path / "backup" / str(n))
    Malicious(nodes).total(ALL)
    for n in ALL:
        if how == "renamed":
            (states[n] / "test").rename(states[n] / "second")
        else:
            shutil.rmtree(states[n] / "test")
        if how == "restored":
            shutil.copytree(tmp_path / "backup" / str(n), states[n] / "test")
    with pytest.raises(WireError, match=REFUSED):
        Malicious(nodes, run="second" if how == "renamed" else "test").total(WITHOUT_4)


def test_another_node_under_the_same_number_is_another_member(summed: Nodes, tmp_path: Path) -> None:
    stranger = write_nodes(digits(6), tmp_path / "other")[5] | {"client": 4}
    with pytest.raises(WireError, match=REFUSED):
        Malicious({**summed, 4: stranger}, run="second").total(ALL)


def changed_data(nodes: Nodes, folder: Path, change: Callable[[Any], Any]) -> Nodes:
    """The same nodes after their data have changed."""
    changed = {}
    for n, config in nodes.items():
        arrays = dict(np.load(config["data"]))
        arrays |= change(arrays)
        np.savez(folder / f"changed-{n}.npz", **arrays)
        changed[n] = config | {"data": str(folder / f"changed-{n}.npz")}
    return changed


def test_data_with_a_sample_in_common_are_the_same_data(summed: Nodes, tmp_path: Path) -> None:
    fewer = changed_data(summed, tmp_path, lambda a: {"x": a["x"][3:], "y": a["y"][3:]})
    with pytest.raises(WireError, match=REFUSED):
        Malicious(fewer, run="second").total(WITHOUT_4)
    relabelled = changed_data(summed, tmp_path, lambda a: {"y": a["y"][::-1]})
    with pytest.raises(WireError, match=REFUSED):
        Malicious(relabelled, run="second").total(WITHOUT_4)


@pytest.mark.job
def test_other_data_have_a_cohort_of_their_own(summed: Nodes, tmp_path: Path) -> None:
    other = changed_data(summed, tmp_path, lambda a: {"x": 255 - a["x"]})
    Malicious(other, run="second").total(WITHOUT_4)
    with pytest.raises(WireError, match=REFUSED):
        Malicious(other, run="third").total(ALL)
    both = changed_data(
        summed,
        tmp_path,
        lambda a: {"x": np.concatenate([a["x"], 255 - a["x"]]), "y": np.concatenate([a["y"], a["y"]])},
    )
    for cohort in (ALL, WITHOUT_4):  # a cohort of a part, and another one of the rest
        with pytest.raises(WireError, match=REFUSED):
            Malicious(both, run="fourth").total(cohort)


def test_a_single_upload_after_a_secure_sum_is_refused(summed: Nodes) -> None:
    plain = Malicious(summed, run="plain", config={"secure.aggregation": False})
    head = Head("down", "plain", plain.settings.layout, 0, 0)
    packet = wire.encode(plain.model(0), head, about={})
    with pytest.raises(WireError, match=REFUSED):
        secure_update.round_answer(plain.settings, node_of(summed[0]), packet)
    assert not list(Path(summed[0]["state-dir"]).glob("plain/round-*"))
    allowed = summed[0] | {secure_memory.CHANGES: 1}
    assert secure_update.round_answer(plain.settings, node_of(allowed), packet).body


@pytest.mark.parametrize("phase", secure_sum.PHASES)
def test_a_node_that_is_killed_in_a_phase_answers_the_repeated_request(
    phase: str, one_sum: OneSum, summed: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its file is written, and again after it: the sum is the same, and is remembered once."""
    write, ask, kills = secure_phases.write_session, Malicious.ask, list[str]()

    def killed(path: Path, session: secure_phases.SecureSession) -> None:
        if list(session.requests)[-1] == phase and len(kills) < 2:
            kills.append(phase)
            if len(kills) == 2:
                write(path, session)
            raise KeyboardInterrupt
        write(path, session)

    def repeated(server: Malicious, *request: Any) -> Packet:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return ask(server, *request)

    monkeypatch.setattr(secure_phases, "write_session", killed)
    monkeypatch.setattr(Malicious, "ask", repeated)
    assert np.array_equal(Malicious(summed, run="second").total(ALL), one_sum.total)
    assert kills == [phase, phase]
    memory = json.loads((Path(summed[0]["state-dir"]) / ".secure" / secure_memory.FILE).read_text())
    assert [(len(members), rows, len(uploads)) for _, members, rows, _, uploads in memory] == [(5, "", 1)]


# -- what the owner may allow --------------------------------------------------------------------------------


@pytest.mark.job
def test_the_owner_allows_a_number_of_other_cohorts(summed: Nodes) -> None:
    allowed = {n: config | {secure_memory.CHANGES: 1} for n, config in summed.items()}
    with pytest.raises(WireError, match="same upload of this node"):  # the same upload: never
        Malicious(allowed, run="second").total(WITHOUT_4)
    for n in (1, 2):
        later = Malicious(allowed, round=n)
        later.noise[-1] = 0.01 * n
        later.total(WITHOUT_4)
    for cohort in (ALL, (0, 1, 2, 4)):  # back is a change, too
        with pytest.raises(WireError, match=f"{secure_memory.CHANGES}=2"):
            Malicious(allowed, round=3, config={"run.rounds": 4}).total(cohort)


@pytest.mark.parametrize("changes", [-1, True, "many"])
def test_the_number_of_cohorts_is_a_number(changes: Any, nodes: Nodes) -> None:
    given = {n: config | {secure_memory.CHANGES: changes} for n, config in nodes.items()}
    with pytest.raises(UsageError, match="must be a whole number"):
        Malicious(given).total(ALL)


@pytest.mark.parametrize("damage", ["sums", "samples"])
def test_a_damaged_memory_is_no_empty_one(damage: str, summed: Nodes, tmp_path: Path) -> None:
    folder = Path(summed[0]["state-dir"]) / ".secure"
    if damage == "sums":
        (folder / secure_memory.FILE).write_text('[["a"')
    else:
        next(folder.glob("*.samples")).unlink()
    fewer = changed_data(summed, tmp_path, lambda a: {"x": a["x"][3:], "y": a["y"][3:]})
    with pytest.raises(RunError, match="restore the node's state-dir"):
        Malicious(fewer, run="second").total(ALL)


# -- forged keys, members, models and lists ------------------------------------------------------------------


def test_a_servers_own_keys_are_refused(nodes: Nodes) -> None:
    _, own = secure_sum.begin(4)
    forged = Malicious(nodes)
    forged.shown_keys[0] = lambda shown: (
        shown | {Field.KEYS: shown[Field.KEYS] | {"4": [key.hex() for key in own]}}
    )
    with pytest.raises(WireError, match="keys of client 4 are not signed"):
        forged.total(ALL)


def test_signed_keys_of_another_sum_are_refused(nodes: Nodes) -> None:
    earlier, forged = Malicious(nodes), Malicious(nodes)
    old = earlier.about("keys", 4, {})
    forged.shown_keys[0] = lambda shown: (
        shown
        | {Field.KEYS: shown[Field.KEYS] | {"4": old[Field.KEYS]}}
        | {Field.SIGNATURE: shown[Field.SIGNATURE] | {"4": old[Field.SIGNATURE]}}
    )
    with pytest.raises(WireError, match="keys of client 4 are not signed"):
        forged.total(ALL)


def as_member(forged: Malicious, folder: Path, client: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Shows the server itself in place of a client: with a member key of its own, and valid signatures."""
    member, (_, keys) = own_key(folder / "key"), secure_sum.begin(client)
    subject = Subject(forged.run, forged.round, forged.session)
    signature = member.sign(keys_statement(subject, client, forged.settings.rules, keys))
    name = str(client)
    return lambda shown: {
        Field.COHORT: shown[Field.COHORT] | {name: member.public},
        Field.KEYS: shown[Field.KEYS] | {name: [key.hex() for key in keys]},
        Field.SIGNATURE: shown[Field.SIGNATURE] | {name: signature},
    }


def test_a_server_that_takes_a_members_place_is_noticed(summed: Nodes, tmp_path: Path) -> None:
    forged = Malicious(summed, run="second")
    forged.shown_keys = dict.fromkeys(ALL[:4], as_member(forged, tmp_path / "server", 4))
    with pytest.raises(WireError, match=REFUSED):
        forged.total(ALL)


def test_members_that_the_server_invents_are_refused(nodes: Nodes, tmp_path: Path) -> None:
    """In the first sum already. Without a signed list of members, a node accepts whoever is in it."""
    proposal = proposed(CONFIG | {"run.clients": 5}, list(nodes.values())).proposal
    forged = Malicious(nodes, proposal=proposal)
    forged.shown_keys[0] = as_member(forged, tmp_path / "server", 4)
    with pytest.raises(WireError, match="client 4 is not the member that the accepted proposal names"):
        forged.total(ALL)
    swapped = Malicious(nodes, proposal=proposal)
    swapped.shown_keys[0] = lambda shown: (
        shown
        | {Field.COHORT: shown[Field.COHORT] | {"3": shown[Field.COHORT]["4"], "4": shown[Field.COHORT]["3"]}}
    )
    with pytest.raises(WireError, match="client 3 is not the member"):
        swapped.total(ALL)
    further = Malicious(nodes, proposal=proposal)
    further.shown_keys[0] = as_member(further, tmp_path / "server", 9)
    with pytest.raises(WireError, match="client 9 is not the member"):
        further.total(ALL)
    Malicious(nodes, proposal=proposal).total(ALL)
    unsigned = Malicious(nodes)
    begun = {str(n): unsigned.about("keys", n, {}) for n in ALL}
    shown = {
        Field.COHORT: {n: about[Field.MEMBER] for n, about in begun.items()},
        Field.KEYS: {n: about[Field.KEYS] for n, about in begun.items()},
        Field.SIGNATURE: {n: about[Field.SIGNATURE] for n, about in begun.items()},
    }
    assert unsigned.about(
        "shares", 0, as_member(unsigned, tmp_path / "server", 4)(shown)
    )  # trust on first use


@pytest.mark.job
def test_a_member_that_rotated_its_key_is_in_the_same_cohort(nodes: Nodes, tmp_path: Path) -> None:
    """With a key that the old one signed; another key of that name is another member."""
    proposal = proposed(CONFIG | {"run.clients": 5}, list(nodes.values())).proposal
    Malicious(nodes, proposal=proposal).total(ALL)
    *others, last = proposal.members
    new = own_key(tmp_path / "new")
    signature = key_of(nodes[4]).sign(rotation_statement(new.public))
    rotated = last._replace(key=new.public, rotations=(Rotation(last.key, signature),))
    moved = nodes | {4: nodes[4] | {"key": str(tmp_path / "new")}}
    stranger = last._replace(key=new.public)
    second = CONFIG | {"run.clients": 5, "session.run": "second"}
    for member, is_same in ((stranger, False), (rotated, True)):
        agreed = proposed(second, [], members=(*others, member)).proposal
        sums = Malicious(moved, run="second", proposal=agreed)
        if is_same:
            sums.total(ALL)
        else:
            with pytest.raises(WireError, match=REFUSED):
                sums.total(ALL)


@pytest.mark.parametrize("wrong", ["own", "twice"])
def test_a_cohort_names_each_member_once(wrong: str, nodes: Nodes) -> None:
    forged = Malicious(nodes)
    forged.shown_keys[0] = lambda shown: (
        shown
        | {
            Field.COHORT: shown[Field.COHORT]
            | ({"0": shown[Field.COHORT]["1"]} if wrong == "own" else {"3": shown[Field.COHORT]["1"]})
        }
    )
    with pytest.raises(WireError, match=r"does not name this node|same member for two"):
        forged.total(ALL)


@pytest.mark.parametrize("persists", [False, True])
def test_different_models_give_no_sum(persists: bool, nodes: Nodes) -> None:
    """Pasquini et al., 2022: the others receive a model whose update is zero, so the sum is one client's.

    Client 2 notices it. The shares of the four others are enough for the seeds, but the masks do not cancel
    out.
    """
    forged = Malicious(nodes)
    forged.noise, forged.persists = {n: -100.0 for n in ALL if n != 2}, persists
    if not persists:
        with pytest.raises(WireError, match="1 clients signed the same model, settings and members"):
            forged.total(ALL)
        assert forged.asked[-1] == ("revealed", 2)
    else:
        assert np.median(np.abs(forged.total(ALL))) > forged.settings.rules.range / 8


def test_different_cohorts_are_noticed_before_shares_are_revealed(nodes: Nodes, tmp_path: Path) -> None:
    forged = Malicious(nodes)
    forged.shown_keys[0] = lambda shown: shown | {Field.COHORT: shown[Field.COHORT] | {"9": "ab" * 32}}
    with pytest.raises(WireError, match="signed the same model, settings and members"):
        forged.total(ALL)
    assert forged.asked[-1] == ("revealed", 0)


def test_both_secrets_of_a_client_are_never_revealed(nodes: Nodes) -> None:
    """Some clients are told that client 4 sent its vector, the others that it did not."""
    forged = Malicious(nodes)
    forged.shown_survivors = dict.fromkeys((0, 1), WITHOUT_4)
    with pytest.raises(WireError, match="2 clients signed the same model, settings and members"):
        forged.total(ALL)
    assert forged.asked[-1] == ("revealed", 0)


@pytest.mark.parametrize("survivors", [(0, 1), (1, 2, 3, 4), (0, 1, 2, 3, 9)])
def test_a_sum_without_this_node_or_of_strangers_or_too_few_is_not_signed(
    survivors: tuple[int, ...], nodes: Nodes
) -> None:
    forged = Malicious(nodes)
    forged.shown_survivors[0] = survivors
    with pytest.raises(WireError, match=r"at least 3|threshold is 4|did not take part"):
        forged.total(ALL)
    assert forged.asked[-1] == ("consistent", 0)
    assert secure_memory.SumMemory(Path(nodes[0]["state-dir"]) / ".secure").is_empty


# -- hashes of samples ---------------------------------------------------------------------------------------


def test_samples_have_hashes_of_their_content() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert len(hashes_of(x)) == 4
    assert set(hashes_of(x[2:])) < set(hashes_of(x))
    assert not set(hashes_of(x)) & set(hashes_of(x + 0.5))
    assert len(hashes_of(np.array(["one text", "another", "one text"]))) == 2
    assert len(hashes_of({"a": x, "b": x[:, :1]})) == 4
