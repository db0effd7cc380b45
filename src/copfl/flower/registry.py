"""Which node is which client: as its configuration states, or as the server assigned. Without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from copfl.errors import UsageError, WireError
from copfl.flower.run_config import is_plain_name
from copfl.flower.transport import HELLO, Content, Reply, Transport, parsed, printable, read_json

ANSWER_TIMEOUT = 600.0  # seconds that a node has for its answer


class Event:
    """Names of events in the audit log."""

    STARTED = "started"  # or resumed: the run, with its next round
    JOINED = "joined"  # a node, as a client
    LEFT = "left"
    REFUSED = "refused"  # a node that is no client
    ROUND_STARTED = "round_started"
    WAITING = "waiting"  # a round that lacks clients
    ACCEPTED = "accepted"  # a client's upload
    REJECTED = "rejected"
    NO_RESULT = "no_result"  # of a secure sum
    ROUND_ENDED = "round_ended"
    NEW_CLIENT = "new_client"
    ENDED = "ended"
    FAILED = "failed"
    RECOVERED = "recovered"  # the line before was cut off by a kill


class Log(Protocol):
    """Takes a line for people, and an event with its fields for the audit log; each may be empty."""

    def __call__(self, text: str, /, event: str = "", **fields: Any) -> None: ...


def silent(text: str, /, event: str = "", **fields: Any) -> None:
    """A log that nobody reads."""


def known_client(node_config: Mapping[str, Any], run: str) -> int:
    """The client's number, configured or assigned by the server in this run; -1 if neither."""
    configured = node_config.get("client", -1)
    if type(configured) is not int:
        raise UsageError(f"client={configured!r} must be a whole number, such as client=3")
    if configured >= 0:
        return configured
    assigned = read_json(state_dir(node_config) / run / "client.json").get("client")
    return assigned if type(assigned) is int else -1


def greeting(node_config: Mapping[str, Any], content: Content) -> Content:
    """A node's answer to the server's greeting: the number of its client."""
    run = parsed(content[0]).get("run")
    if not isinstance(run, str) or not is_plain_name(run):  # the name of a folder on this node
        raise WireError("the server's greeting names no run")
    client = known_client(node_config, run)
    return json.dumps({"client": client}), b""


def state_dir(node_config: Mapping[str, Any]) -> Path:
    """The folder that the node's configuration names for its state."""
    path = node_config.get("state-dir")
    if not isinstance(path, str) or not path:
        raise UsageError("""the node has no folder for its state; set --node-config 'state-dir="..." ...'""")
    return Path(path).expanduser()


@dataclass
class Registry:
    """The connected nodes by client. A client that returns with another node id is the same client."""

    run: str
    clients: int
    log: Log
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    rejected: dict[int, str] = field(default_factory=dict)  # node -> reason
    claims: dict[int, list[int]] = field(default_factory=dict)  # client -> nodes rejected because it is taken
    pending: dict[str, int] = field(default_factory=dict)  # message id -> node
    unassigned: list[int] = field(default_factory=list)  # nodes that have no number yet

    def refresh(self, transport: Transport) -> None:
        """Removes nodes that have left, greets new ones, and registers those that have answered."""
        online = transport.nodes()
        for client, node in list(self.nodes.items()):
            if node not in online:
                del self.nodes[client]
                text = f"client {client} disconnected (node {node})"
                self.log(text, Event.LEFT, client=client, node=str(node))
                for other in self.claims.pop(client, ()):  # it may be this client, started again
                    self.rejected.pop(other, None)
        self.rejected = {node: reason for node, reason in self.rejected.items() if node in online}
        self.pending = {message_id: node for message_id, node in self.pending.items() if node in online}
        self.unassigned = [node for node in self.unassigned if node in online]
        known = {*self.nodes.values(), *self.rejected, *self.pending.values(), *self.unassigned}
        for node in online:
            if node not in known:
                greeting = json.dumps({"run": self.run}), b""
                self.pending[transport.send(node, HELLO, greeting, ANSWER_TIMEOUT)] = node
        for reply in transport.replies(list(self.pending)):
            self._receive(self.pending.pop(reply.message_id), reply)
        if not self.pending:  # nodes that know their number go first
            free = iter([client for client in range(self.clients) if client not in self.nodes])
            for node in self.unassigned:
                if (client := next(free, -1)) < 0:
                    self._reject(node, f"all {self.clients} clients are connected already")
                else:
                    self._accept(client, node)
            self.unassigned = []

    def _receive(self, node: int, reply: Reply) -> None:
        try:
            client = parsed(reply.checked()[0]).get("client")
        except WireError as error:
            return self._reject(node, str(error))
        if type(client) is not int or client >= self.clients:
            reported = f"it reports client={printable(client, 40)}"
            self._reject(node, f"{reported}; clients are 0 to {self.clients - 1}")
        elif client < 0:
            self.unassigned.append(node)
        elif client in self.nodes:
            self.claims.setdefault(client, []).append(node)
            self._reject(node, f"it reports client={client}, which node {self.nodes[client]} is already")
        else:
            self._accept(client, node)

    def _accept(self, client: int, node: int) -> None:
        self.nodes[client] = node
        self.log(f"client {client} connected (node {node})", Event.JOINED, client=client, node=str(node))

    def _reject(self, node: int, reason: str) -> None:
        self.rejected[node] = printable(reason)
        reason = self.rejected[node]
        self.log(f"node {node} is rejected: {reason}", Event.REFUSED, node=str(node), reason=reason)
