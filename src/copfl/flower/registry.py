"""Which node is which client: as the node says, or as the server says to a node that does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from copfl.flower.transport import HELLO, Transport

Say = Callable[[str], None]


@dataclass
class Registry:
    """The nodes by client. A node is asked once; a client that comes back with another node id is the same client."""

    run: str
    clients: int
    say: Say
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    rejected: dict[int, str] = field(default_factory=dict)  # node -> why it takes no part
    greeted: dict[str, int] = field(default_factory=dict)  # ticket -> node
    nameless: list[int] = field(default_factory=list)  # nodes that do not know which client they are

    def refresh(self, transport: Transport, patience: float = 600) -> None:
        """Greets who is new, hears who answered, forgets who left."""
        online = transport.nodes()
        for client, node in list(self.nodes.items()):
            if node not in online:
                del self.nodes[client]
                self.say(f"client {client} left (node {node})")
        self.rejected = {node: why for node, why in self.rejected.items() if node in online}
        self.greeted = {message_id: node for message_id, node in self.greeted.items() if node in online}
        self.nameless = [node for node in self.nameless if node in online]
        asked = {*self.nodes.values(), *self.rejected, *self.greeted.values(), *self.nameless}
        for node in online:
            if node not in asked:
                self.greeted[transport.send(node, HELLO, json.dumps({"run": self.run}), b"", patience)] = node
        for reply in transport.replies(list(self.greeted)):
            self._heard(self.greeted.pop(reply.message_id), reply.head, reply.error)
        if not self.greeted:  # those who know who they are come first
            self._name()

    def _heard(self, node: int, head: str, error: str) -> None:
        try:
            said = json.loads(head)
        except (ValueError, RecursionError):
            said = None
        if error or not isinstance(said, dict) or "client" not in said:
            refused = said.get("refused") if isinstance(said, dict) else None
            return self._refuse(node, error or refused or "it does not say which client it is")
        client = said["client"]
        if type(client) is not int or client >= self.clients:
            return self._refuse(node, f"it says it is client {client!r}; clients are 0 to {self.clients - 1}")
        if client < 0:
            self.nameless.append(node)
        elif client in self.nodes:
            self._refuse(node, f"it says it is client {client}, which node {self.nodes[client]} is already")
        else:
            self._take(client, node)

    def _name(self) -> None:
        for node in self.nameless:
            free = [client for client in range(self.clients) if client not in self.nodes]
            if free:
                self._take(free[0], node)
            else:
                self._refuse(node, f"all {self.clients} clients are here already")
        self.nameless = []

    def _take(self, client: int, node: int) -> None:
        self.nodes[client] = node
        self.say(f"client {client} is here (node {node})")

    def _refuse(self, node: int, why: str) -> None:
        self.rejected[node] = why
        self.say(f"node {node} takes no part: {why}")
