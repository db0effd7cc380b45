"""A coordinator, its proposals, and nodes that answer whole messages: with their policies and their audit logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from copfl.federation.node import resident, respond
from copfl.federation.protocol import proposal
from copfl.federation.protocol.keys import SigningKey, fingerprint, new_key
from copfl.federation.protocol.messages import Content, Message, Reply
from copfl.federation.protocol.proposal import Member, SignedProposal
from copfl.wire import Packet
from tests.federation.network import DirectTransport, node_of

COORDINATOR = SigningKey(new_key())


def key_of(config: dict[str, Any]) -> SigningKey:
    """The node's own key."""
    return node_of(config).key


def members_of(nodes: list[dict[str, Any]]) -> tuple[Member, ...]:
    """The nodes as members, in their order."""
    return tuple(Member(n, f"clinic-{n}", key_of(config).public) for n, config in enumerate(nodes))


def proposed(config: dict[str, Any], nodes: list[dict[str, Any]], **options: Any) -> SignedProposal:
    """The coordinator's proposal of this run config, with the nodes as members."""
    given: dict[str, Any] = {"members": members_of(nodes), "revoked": (), "key": COORDINATOR} | options
    return proposal.sign(config, **given)


def knowing(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The node, which accepts the coordinator's proposals and answers without a worker."""
    return config | {"coordinator": fingerprint(COORDINATOR.public), "worker": False} | options


def answer(node: dict[str, Any], run_config: dict[str, Any], kind: str, content: Content) -> Content:
    """The node's answer to a message, through its policy, its proposals and its audit log."""
    return respond.respond(Message(kind, content), run_config, node, 0)


class MessageTransport(DirectTransport):
    """Sends whole messages to the nodes, of a training or of the agreement on encoders before it."""

    def __init__(self, run_config: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
        # The nodes read their settings from the run config.
        super().__init__(None, dict(enumerate(nodes, 100)))  # type: ignore[arg-type]
        self.run_config = run_config

    def send(self, node_id: int, request: str, content: Content, seconds: float) -> str:
        message_id = str(len(self.sent))
        self.sent.append((node_id, request, Packet(*content)))
        own = self.residents[node_id]  # as its worker, which lives as long as the node
        with mock.patch.object(resident, "Resident", return_value=own):
            reply = answer(self.online[node_id], self.run_config, request, content)
        self.received.append(Packet(*reply))
        self.inbox[message_id] = Reply(message_id, reply)
        return message_id


def state_of(config: dict[str, Any]) -> Path:
    return Path(config["state-dir"])
