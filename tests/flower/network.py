"""A federation in one process: the server's rounds over nodes that are called, not connected, with faults at will."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from copfl.core import tree
from copfl.data.datasets import load
from copfl.data.federation import Federation
from copfl.data.partition import partition
from copfl.engine.mapping import sequential
from copfl.engine.simulate import State, begin, simulate
from copfl.errors import CopflError
from copfl.flower import node
from copfl.flower.folder import Folder
from copfl.flower.identity import known_client
from copfl.flower.server import federate
from copfl.flower.settings import Settings, settings_of
from copfl.flower.transport import HELLO, JOIN, Reply
from copfl.wire import Head, Packet

CONFIG: dict[str, Any] = {
    "run": "test", "rounds": 3, "clients": 3, "min-replies": 3, "deadline": 60, "model": "mlp", "shape": "1,8,8",
    "mean": "0.3", "std": "0.37", "model-options.width": 16, "batch": 64, "optimizer.lr": 0.003,
}  # fmt: skip

Spoil = Callable[[int, int, Packet], Packet | str | None]


def digits(clients: int = 3) -> Federation:
    """The digits, dealt to clients of unequal size and unequal classes."""
    dataset = load("digits")
    return Federation(dataset, partition("dirichlet", dataset, clients, seed=1))


def write_nodes(federation: Federation, folder: Path, *, named: bool = True) -> list[dict[str, Any]]:
    """A node configuration per client, each with its data on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    dataset, split = federation.dataset, federation.partition
    configs = []
    for client in range(federation.clients):
        train, test = split.train[client], split.test[client]
        np.savez(
            folder / f"{client}.npz",
            x=dataset.train.x[train], y=dataset.train.y[train],
            x_test=dataset.test.x[test], y_test=dataset.test.y[test],
        )  # fmt: skip
        config = {"data": str(folder / f"{client}.npz"), "state-dir": str(folder / f"state-{client}")}
        configs.append(config | ({"client": client} if named else {}))
    return configs


class Called:
    """A post whose nodes answer at once. `spoil` may change an upload, or return why there is none, or None: lost."""

    def __init__(
        self, settings: Settings, nodes: dict[int, dict[str, Any]], spoil: Spoil | None = None
    ) -> None:
        self.settings, self.online, self.spoil = settings, nodes, spoil
        self.box: dict[str, Reply] = {}
        self.sent: list[tuple[int, str, Packet]] = []
        self.received: list[Packet] = []

    def nodes(self) -> list[int]:
        return list(self.online)

    def send(self, node_id: int, question: str, head: str, body: bytes, seconds: float) -> str:
        message_id = str(len(self.sent))
        self.sent.append((node_id, question, Packet(head, body)))
        config = self.online[node_id]
        try:
            if question == HELLO:
                packet = Packet(json.dumps({"client": known_client(config, json.loads(head)["run"])}), b"")
            else:
                answer = node.personalise if question == JOIN else node.answer
                packet = answer(self.settings, config, Packet(head, body))
        except CopflError as error:
            packet = Packet(json.dumps({"refused": str(error)}), b"")
        spoilt: Packet | str | None = packet
        if question != HELLO and self.spoil is not None:
            said = json.loads(head)
            spoilt = self.spoil(said["client"], said["round"], packet)
        if isinstance(spoilt, Packet):
            self.received.append(spoilt)
            self.box[message_id] = Reply(message_id, *spoilt)
        elif isinstance(spoilt, str):
            self.box[message_id] = Reply(message_id, "", b"", spoilt)
        return message_id

    def replies(self, tickets: Collection[str]) -> list[Reply]:
        return [self.box.pop(message_id) for message_id in tickets if message_id in self.box]


def play(
    config: dict[str, Any], nodes: list[dict[str, Any]], runs: Path, spoil: Spoil | None = None, **how: Any
) -> tuple[list[dict[str, Any]], Any, list[str], Called]:
    """The rounds' records, the server's record after them, what was said, and the post."""
    settings = settings_of(config | {"runs": str(runs)})
    transport, said = Called(settings, dict(enumerate(nodes, 100)), spoil), list[str]()
    folder = Folder(str(runs), settings.run, goes_on=settings.resume)
    records = list(federate(settings, transport, folder, said.append, pause=0, retry=0, **how))
    return records, server_of(settings, runs), said, transport


def server_of(settings: Settings, runs: Path) -> Any:
    """The server's record in the run's checkpoint."""
    like = settings.algorithm.server_init(settings.task, settings.clients)
    folder = Folder(str(runs), settings.run, goes_on=True)
    return folder.load(like, lambda round: Head("server", settings.run, settings.layout, round, -1))[0].record


def client_of(settings: Settings, config: dict[str, Any], client: int, round: int) -> Any:
    """The client's record after a round, out of its node's folder."""
    head = Head("client", settings.run, settings.layout, round, client)
    records = node.Records(Path(config["state-dir"]), settings.run)
    return records.load(head, settings.algorithm.client_init(settings.task))


def simulated(settings: Settings, federation: Federation) -> State:
    """The same run in the simulation."""
    state = begin(settings.algorithm, settings.task, federation.clients)
    for _ in simulate(
        settings.algorithm, settings.task, federation, sequential(), state,
        rounds=settings.rounds, seed=settings.seed, batch=settings.batch, participation=settings.participation,
    ):  # fmt: skip
        pass
    return state


def farthest(a: object, b: object) -> float:
    """The largest difference between two records."""
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return max(float((x.double() - y.double()).abs().max()) if x.numel() else 0.0 for x, y in pairs)
