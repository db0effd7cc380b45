"""A federation in one process: the server calls the nodes' functions, and faults can be injected."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.core import tree
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets.datasets import load
from copfl.engine.mapping import sequential
from copfl.engine.rounds import State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import CopflError
from copfl.federation.node import respond, secure_update
from copfl.federation.node.join import personalise
from copfl.federation.node.node import Node
from copfl.federation.node.records import ClientRecords
from copfl.federation.node.resident import Resident
from copfl.federation.policy.file import FILE, policy_of, write_policy
from copfl.federation.policy.record import Policy, ProposalRules
from copfl.federation.protocol.events import Log
from copfl.federation.protocol.messages import HELLO, JOIN, TRAIN, Content, Message, Reply
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.proposal import Proposal
from copfl.federation.protocol.settings import TrainingSettings, settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from copfl.wire import Head, Packet

CONFIG: dict[str, Any] = {
    "session.run": "test",
    "run.rounds": 3,
    "run.clients": 3,
    "network.min_replies": 3,
    "network.deadline": 60,
    "algorithm.name": "copfl",
    "model.name": "mlp",
    "samples.shape": [1, 8, 8],
    "samples.mean": [0.3],
    "samples.std": [0.37],
    "model.width": 16,
    "run.batch": 256,
    "optimizer.lr": 0.003,
}

Fault = Callable[[int, int, Packet], Packet | str | None]


def digits(clients: int = 3) -> FederatedData:
    """The digits, assigned to clients of unequal size and unequal classes."""
    dataset = load("digits")
    return FederatedData(dataset, SCHEMES["dirichlet"](dataset, clients, seed=1))


def write_nodes(federation: FederatedData, folder: Path, *, named: bool = True) -> list[dict[str, Any]]:
    """A node configuration per client, each with its data on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    dataset, split = federation.dataset, federation.partition
    configs = []
    for client in range(federation.clients):
        train, test = split.train[client], split.test[client]
        x, y = dataset.train.x[train], dataset.train.y[train]
        x_test, y_test = dataset.test.x[test], dataset.test.y[test]
        np.savez(folder / f"{client}.npz", x=x, y=y, x_test=x_test, y_test=y_test)
        config = {"data": str(folder / f"{client}.npz"), "state-dir": str(folder / f"state-{client}")}
        configs.append(config | ({"client": client} if named else {}))
    return configs


UNSIGNED = ProposalRules(unsigned=True)


def unsigned(config: dict[str, Any]) -> dict[str, Any]:
    """The node, whose owner accepts run configs that nobody signed."""
    write_policy(Path(config["state-dir"]) / FILE, Policy(proposals=UNSIGNED))
    return config


def node_of(config: dict[str, Any], proposal: Proposal | None = None) -> Node:
    """The node of these options, as its door makes it; its folder is of no matter if none is named."""
    parsed = NodeConfig.parse({"state-dir": "nowhere"} | config)
    return Node(parsed, policy_of(parsed.policy, parsed.state_dir), proposal)


def answered(
    config: dict[str, Any], run_config: dict[str, Any], content: Content = ("", b""), kind: str = TRAIN
) -> Content:
    """The node's answer to a message at its door, without a worker."""
    return respond.respond(Message(kind, content), run_config, config | {"worker": False}, 0)


class DirectTransport:
    """Calls the nodes. `fault` may change an upload, or return the error of its delivery, or None: it is lost."""

    def __init__(
        self, settings: TrainingSettings, nodes: dict[int, dict[str, Any]], fault: Fault | None = None
    ) -> None:
        self.settings, self.online, self.fault = settings, nodes, fault
        self.residents = defaultdict[int, Resident](
            Resident
        )  # of each node: it reads its data once, as a worker does
        self.inbox: dict[str, Reply] = {}
        self.sent: list[tuple[int, str, Packet]] = []
        self.received: list[Packet] = []

    def nodes(self) -> list[int]:
        return list(self.online)

    def send(self, node_id: int, request: str, content: Content, seconds: float) -> str:
        message_id, message = str(len(self.sent)), Packet(*content)
        self.sent.append((node_id, request, message))
        node, fields = node_of(self.online[node_id]), json.loads(message.head)
        try:
            if request == HELLO:
                packet = Packet(json.dumps({"client": node.client_in(fields["run"])}), b"")
            else:
                answer = personalise if request == JOIN else secure_update.round_answer
                packet = answer(self.settings, node, message, self.residents[node_id].data)
        except CopflError as error:
            packet = Packet(json.dumps({"refused": str(error)}), b"")
        result: Packet | str | None = packet
        if request != HELLO and self.fault is not None:
            result = self.fault(fields["client"], fields["round"], packet)
        if isinstance(result, Packet):
            self.received.append(result)
            self.inbox[message_id] = Reply(message_id, result)
        elif isinstance(result, str):
            self.inbox[message_id] = Reply(message_id, error=result)
        return message_id

    def replies(self, message_ids: Collection[str]) -> list[Reply]:
        return [self.inbox.pop(message_id) for message_id in message_ids if message_id in self.inbox]


def kept(lines: list[str]) -> Log:
    """A log whose lines for people are appended to a list."""

    def log(text: str, /, event: str = "", **fields: Any) -> None:
        if text:
            lines.append(text)

    return log


class Played(NamedTuple):
    """A run over `DirectTransport`."""

    records: list[dict[str, Any]]  # of the rounds
    server: Any  # the server's record after them
    log: list[str]
    transport: DirectTransport


def play(
    config: dict[str, Any],
    nodes: list[dict[str, Any]],
    runs: Path,
    fault: Fault | None = None,
    stop: int | None = None,
    **options: Any,
) -> Played:
    """The rounds of this run config, or the first `stop` of them."""
    settings, log = settings_of(config), list[str]()
    transport = DirectTransport(settings, dict(enumerate(nodes, 100)), fault)
    folder = ServerFolder(
        str(runs), settings.federation.session.run, resume=settings.federation.session.resume
    )
    server = new_server(settings, transport, folder, kept(log), pause=0, retry=0, **options)
    return Played(list(itertools.islice(server.rounds(), stop)), server_of(settings, runs), log, transport)


def server_of(settings: TrainingSettings, runs: Path) -> Any:
    """The server's record in the run's checkpoint."""
    like, run = (
        settings.algorithm.server_init(settings.task, settings.federation.clients),
        settings.federation.session.run,
    )
    folder = ServerFolder(str(runs), run, resume=True)
    return folder.load(like, lambda round: Head("server", run, settings.layout, round, -1))[0].record


def client_of(settings: TrainingSettings, config: dict[str, Any], client: int, round: int) -> Any:
    """The client's record after a round, out of its node's folder."""
    head = Head("client", settings.federation.session.run, settings.layout, round, client)
    records = ClientRecords(Path(config["state-dir"]), settings.federation.session.run)
    return records.load(head, settings.algorithm.client_init(settings.task))


def simulated(settings: TrainingSettings, federation: FederatedData) -> State:
    """The same run in the simulation."""
    config = settings.run.run
    state = begin(settings.algorithm, settings.task, federation.clients)
    rounds = simulate(
        Simulation(
            settings.algorithm, settings.task, federation, sequential(), seed=config.seed, batch=config.batch
        ),
        state,
        rounds=config.rounds,
        participation=config.participation,
        eval_every=config.rounds,
    )
    for _ in rounds:
        pass
    return state


def farthest(a: object, b: object) -> float:
    """The largest difference between two records."""
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return max(float((x.double() - y.double()).abs().max()) if x.numel() else 0.0 for x, y in pairs)
