"""Flower as the post, and its messages as packets."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from copfl.errors import WireError
from copfl.flower.transport import Reply

STYPE = "copfl.wire"  # so that nobody takes the bytes for an array


def content_of(head: str, body: bytes) -> RecordDict:
    """A packet as what a Flower message carries."""
    array = Array(dtype="uint8", shape=(len(body),), stype=STYPE, data=body)
    return RecordDict({"head": ConfigRecord({"copfl": head}), "body": ArrayRecord({"copfl": array})})


def packet_of(message: Message) -> tuple[str, bytes]:
    """The head and the body that a Flower message carries; WireError if it is not one of copfl's."""
    content: Any = message.content
    try:
        head, array = content["head"]["copfl"], content["body"]["copfl"]
    except (KeyError, TypeError) as error:
        raise WireError("the message does not carry what copfl's messages do") from error
    if not isinstance(head, str) or not isinstance(array, Array) or array.stype != STYPE:
        raise WireError("the message does not carry what copfl's messages do")
    return head, array.data


class FlowerTransport:
    """Flower's grid."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def nodes(self) -> list[int]:
        return [int(node) for node in self.grid.get_node_ids()]

    def send(self, node: int, question: str, head: str, body: bytes, seconds: float) -> str:
        message = Message(content_of(head, body), node, question, ttl=seconds)
        message_id = next(iter(self.grid.push_messages([message])), None)
        return (
            str(message_id) if message_id else f"lost-{id(message)}"
        )  # never answered: the deadline finds it

    def replies(self, tickets: Collection[str]) -> list[Reply]:
        if not tickets:
            return []
        result = []
        for message in self.grid.pull_messages(list(tickets)):
            message_id = message.metadata.reply_to_message_id
            if message.has_error():
                error = message.error
                result.append(Reply(message_id, "", b"", f"Flower says: {error.reason or error.code}"))
                continue
            try:
                result.append(Reply(message_id, *packet_of(message)))
            except WireError as error:
                result.append(Reply(message_id, "", b"", str(error)))
        return result
