"""Flower's network as the transport of copfl's messages: `server_app` sends with it, a node reads what arrives."""

import contextlib
from collections.abc import Collection
from typing import Any

from copfl.errors import WireError
from copfl.federation.protocol.messages import NO_PACKET, Content, Message, Reply

# Bytes of a body that travels with its head: Flower sends every object in a request of its own.
ONE_OBJECT = 2**20
STYPE = "copfl.wire"  # serialisation type in Flower's messages: no tool decodes these bytes as an array


class FlowerTransport:
    """Flower's grid."""

    def __init__(self, grid: Any) -> None:
        from copfl.federation.machines.flower_api import pull_objects

        self.grid = grid
        # A reply may be found while its objects are still on their way. Flower then waits a whole second.
        (pull_objects.__kwdefaults__ or {})["initial_backoff"] = 0.1

    def nodes(self) -> list[int]:
        return [int(node) for node in self.grid.get_node_ids()]

    def send(self, node: int, request: str, content: Content, seconds: float) -> str:
        """The id of the message; a message that Flower lost has one that no reply names.

        Args:
            node: The id of the receiver.
            request: HELLO, TRAIN or JOIN.
            content: A head and a body.
            seconds: How long the node has for its answer.
        """
        from flwr.app import Message

        message = Message(as_record(content), node, request, ttl=seconds)
        message_id = next(iter(self.grid.push_messages([message])), None)
        return str(message_id or f"lost-{id(message)}")  # a lost message ends at the round's deadline

    def replies(self, message_ids: Collection[str]) -> list[Reply]:
        replies = []
        for message in self.grid.pull_messages(list(message_ids)) if message_ids else []:
            message_id = message.metadata.reply_to_message_id
            try:
                if message.has_error():
                    raise WireError(f"Flower reports: {message.error.reason or message.error.code}")
                replies.append(Reply(message_id, content_of(message)))
            except WireError as error:
                replies.append(Reply(message_id, error=str(error)))
        return replies


def as_record(content: Content) -> Any:
    """The content of a Flower message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    head, body = content
    if len(body) <= ONE_OBJECT:
        return RecordDict({"head": ConfigRecord({"copfl": head, "body": body})})
    array = Array(dtype="uint8", shape=(len(body),), stype=STYPE, data=body)
    return RecordDict({"head": ConfigRecord({"copfl": head}), "body": ArrayRecord({"copfl": array})})


def content_of(message: Any) -> Content:
    """The head and the body in a Flower message; WireError if another program wrote it."""
    try:
        head, body = message.content["head"]["copfl"], message.content["head"].get("body")
        if body is None and message.content["body"]["copfl"].stype == STYPE:
            body = message.content["body"]["copfl"].data
        if isinstance(head, str) and isinstance(body, bytes):
            return head, body
    except (KeyError, TypeError, AttributeError):
        pass
    raise WireError(NO_PACKET)


def as_message(message: Any) -> Message:
    """A Flower message as a node of copfl takes it."""
    content = None
    with contextlib.suppress(WireError):
        content = content_of(message)
    return Message(str(message.metadata.message_type).partition(".")[0], content)
