"""Which node is which client: as its configuration states, or as the server assigned. Without torch.

The exchange refreshes it at every poll. A node that connects is greeted, and signs the challenge with its member's
key; a node whose key is revoked is out at the next poll.
"""

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from copfl.errors import WireError
from copfl.federation.protocol.events import Event, Log
from copfl.federation.protocol.keys import is_signed
from copfl.federation.protocol.messages import (
    HELLO,
    Field,
    Reply,
    Transport,
    parsed,
    printable,
)
from copfl.federation.protocol.proposal import CHALLENGE, Proposal, hello_statement

ANSWER_TIMEOUT = 600.0  # seconds that a node has for its answer
# Seconds after which a node that was rejected is greeted again: its owner may have approved the run.
RETRY = 30.0


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
                text = f"client {self.named(client)} disconnected (node {node})"
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
        dealt_with = {*self.nodes.values(), *settled, *self.pending.values(), *self.unassigned}
        for node in online:
            if node not in dealt_with:
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

    def named(self, client: int) -> str:
        """The number of a client, with the name of its member: who reads it telephones a hospital."""
        member = self.proposal.numbers.get(client) if self.proposal is not None else None
        return f"{client} ({member.name})" if member is not None else str(client)

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
        """Why an answer to the greeting is no member's; empty if it is one's."""
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
        text = f"client {self.named(client)} connected (node {node})"
        self.log(text, Event.JOINED, client=client, node=str(node))

    def _reject(self, node: int, reason: str) -> None:
        before, reason = self.rejected.get(node), printable(reason)
        self.rejected[node], self.rejected_at[node] = reason, time.monotonic()
        if reason == before:
            return
        self.log(f"node {node} is rejected: {reason}", Event.REFUSED, node=str(node), reason=reason)
