"""Which node is which client: as its configuration states, or as the server assigned. Without torch."""

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from copfl.errors import UsageError, WireError
from copfl.flower.keys import is_signed, own_key, statement
from copfl.flower.proposal import Proposal
from copfl.flower.transport import HELLO, Content, Field, Reply, Transport, parsed, printable, read_json
from copfl.settings.federation import is_plain_name

ANSWER_TIMEOUT = 600.0  # seconds that a node has for its answer
# Seconds after which a node that was rejected is greeted again: its owner may have approved the run.
RETRY = 30.0
NodeConfig = Mapping[str, Any]  # what a node's owner set, by key
WORKER = ".worker"  # the worker's folder in the state-dir; the name of a run begins with no dot
CHALLENGE = "challenge"  # in a greeting: what the node signs


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
    STATISTICS = "statistics"  # a pass over all members, for the encoders
    ENDED = "ended"
    FAILED = "failed"
    RECOVERED = "recovered"  # the line before was cut off by a kill
    RELEASED = "released"  # in a node's ledger: a value that depends on its data
    SETTLED = "settled"  # the noise of a release, when it is certain


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


def hello_statement(proposal: Proposal, challenge: str, client: int) -> bytes:
    """What a node signs when it is greeted: that it is this client of the proposal."""
    return statement("hello", proposal.digest, challenge, client)


def greeting(node_config: Mapping[str, Any], content: Content, proposal: Proposal | None = None) -> Content:
    """A node's answer to the server's greeting: the number of its client, signed with its key.

    Args:
        node_config: the node's configuration.
        content: the server's greeting.
        proposal: the accepted one; None if the policy allows run configs that nobody signed.
    """
    run, challenge = (parsed(content[0]).get(name) for name in ("run", CHALLENGE))
    if not isinstance(run, str) or not is_plain_name(run):  # the name of a folder on this node
        raise WireError("the server's greeting names no run")
    client = known_client(node_config, run)
    if proposal is None:
        return json.dumps({"client": client}), b""
    if run != proposal.run or not isinstance(challenge, str):
        raise WireError(f"the server's greeting is not of run {proposal.run}, or asks for no signature")
    key = own_key(key_path(node_config))
    signature = key.sign(hello_statement(proposal, challenge, client))
    return json.dumps({"client": client, Field.MEMBER: key.public, Field.SIGNATURE: signature}), b""


def state_dir(node_config: Mapping[str, Any]) -> Path:
    """The folder that the node's configuration names for its state."""
    path = node_config.get("state-dir")
    if not isinstance(path, str) or not path:
        raise UsageError("""the node has no folder for its state; set --node-config 'state-dir="..." ...'""")
    return Path(path).expanduser()


def key_path(node_config: Mapping[str, Any]) -> Path:
    """The file of the node's own key: as configured, or one in its state-dir."""
    path = node_config.get("key")
    if path is not None and (not isinstance(path, str) or not path):
        raise UsageError("key must be the path of the node's private key")
    return Path(path).expanduser() if path else state_dir(node_config) / ".secure" / "member.key"


@dataclass
class Registry:
    """The connected nodes by client. A client that returns with another node id is the same client.

    With a proposal a node is the client whose key it has, and a key that is revoked is nobody's.
    """

    run: str
    clients: int
    log: Log
    proposal: Proposal | None = None
    revoked: Callable[[], Collection[str]] = frozenset  # the keys that are revoked now
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    rejected: dict[int, str] = field(default_factory=dict)  # node -> reason
    rejected_at: dict[int, float] = field(default_factory=dict)  # node -> when
    challenges: dict[str, str] = field(default_factory=dict)  # message id -> what the node must sign
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
        for client, node in list(self.nodes.items()):
            if reason := self.refusal(client):
                del self.nodes[client]
                self._reject(node, reason)
        self.rejected = {node: reason for node, reason in self.rejected.items() if node in online}
        self.pending = {message_id: node for message_id, node in self.pending.items() if node in online}
        self.unassigned = [node for node in self.unassigned if node in online]
        late = time.monotonic() - RETRY
        settled = {node for node in self.rejected if self.rejected_at[node] > late}
        known = {*self.nodes.values(), *settled, *self.pending.values(), *self.unassigned}
        for node in online:
            if node not in known:
                challenge = secrets.token_hex(16)
                greeting = json.dumps({"run": self.run, CHALLENGE: challenge}), b""
                message_id = transport.send(node, HELLO, greeting, ANSWER_TIMEOUT)
                self.pending[message_id], self.challenges[message_id] = node, challenge
        for reply in transport.replies(list(self.pending)):
            node = self.pending.pop(reply.message_id)
            self._receive(node, reply, self.challenges.pop(reply.message_id))
        self.challenges = {i: text for i, text in self.challenges.items() if i in self.pending}
        if not self.pending:  # nodes that know their number go first
            free = iter([client for client in range(self.clients) if client not in self.nodes])
            for node in self.unassigned:
                if (client := next(free, -1)) < 0:
                    self._reject(node, f"all {self.clients} clients are connected already")
                else:
                    self._accept(client, node)
            self.unassigned = []

    def refusal(self, client: int) -> str:
        """Why nothing of a client counts any more; empty if it does."""
        member = self.proposal.numbers.get(client) if self.proposal is not None else None
        return f"the key of {member.name} is revoked" if member and member.key in self.revoked() else ""

    def _receive(self, node: int, reply: Reply, challenge: str) -> None:
        try:
            answer = parsed(reply.checked()[0])
            client = answer.get("client")
        except WireError as error:
            return self._reject(node, str(error))
        if self.proposal is not None and (problem := self._problem(self.proposal, answer, challenge)):
            return self._reject(node, problem)
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

    def _problem(self, proposal: Proposal, answer: Mapping[str, Any], challenge: str) -> str:
        """Why an answer to the greeting is not that of a member; empty if it is."""
        client = answer.get("client")
        member = proposal.numbers.get(client) if type(client) is int else None
        if member is None:
            return f"it reports client={printable(client, 40)}, which is no member's number"
        signature = printable(answer.get(Field.SIGNATURE))
        if not is_signed(member.key, hello_statement(proposal, challenge, member.number), signature):
            return f"it reports client={client}, and has not the key of {member.name}"
        return self.refusal(member.number)

    def _accept(self, client: int, node: int) -> None:
        self.nodes[client] = node
        self.rejected.pop(node, None)
        self.log(f"client {client} connected (node {node})", Event.JOINED, client=client, node=str(node))

    def _reject(self, node: int, reason: str) -> None:
        before, reason = self.rejected.get(node), printable(reason)
        self.rejected[node], self.rejected_at[node] = reason, time.monotonic()
        if reason == before:
            return
        self.log(f"node {node} is rejected: {reason}", Event.REFUSED, node=str(node), reason=reason)
