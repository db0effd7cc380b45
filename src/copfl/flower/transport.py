"""What the server needs of a network: who is there, send, and what came back. Flower is one; the tests have another."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

HELLO, TRAIN, JOIN = "query", "train", "evaluate"  # Flower's names for the three questions


class Reply(NamedTuple):
    """What came back for a message."""

    message_id: str
    head: str
    body: bytes
    error: str = ""  # why there is nothing else


class Transport(Protocol):
    """A network of nodes."""

    def nodes(self) -> list[int]:
        """The nodes that are connected now."""

    def send(self, node: int, question: str, head: str, body: bytes, seconds: float) -> str:
        """The ticket of a message that was handed over; after so many seconds it is void."""

    def replies(self, tickets: Collection[str]) -> list[Reply]:
        """The replies that have come for these tickets, each given out once."""
