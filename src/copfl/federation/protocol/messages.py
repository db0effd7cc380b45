"""How the server reaches the nodes: the interface of a network, and the fields of a message.

`machines.flower_transport` is the network of a deployment; the tests have one without processes. Texts of other
machines go through `printable` before they are logged, texts for other machines through `without_paths`.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from copfl import foreign
from copfl.errors import CopflError, DataError, WireError

HELLO, TRAIN, JOIN = "query", "train", "evaluate"  # the three requests, as Flower names its message types
REQUESTS = HELLO, TRAIN, JOIN
MAX_TEXT = 500  # characters of another machine's text that are logged or recorded
MAX_HEAD = 2**20  # characters of the head of a message from a node
NO_PACKET = "the message does not carry a copfl packet"

PATH = re.compile(r"""(?<![\w/.])~?/[^\s"'`,;:()]*""")  # of a file or folder, in a sentence

Content = tuple[str, bytes]  # a head and a body, such as `wire.Packet`


class Field:
    """Names inside messages of `wire.FORMAT`; another name needs another format."""

    COUNTED = "counted"  # to a client: the last round that counted its upload; -1: none
    KNOWN_MASKS = "known_masks"  # to a client: the fingerprints of its masks that the server has
    UPDATES = "updates"  # to a new client: number of local updates
    METRICS = "metrics"  # from a client, along with its upload
    NOTE = "note"
    SESSION = "session"  # of a sum; the following are of secure aggregation too
    KEYS = "keys"
    SHARES = "shares"
    COMMITMENT = "commitment"
    SURVIVORS = "survivors"
    MEMBER = "member"  # a client's long-term key
    COHORT = "cohort"  # the members by client
    SIGNATURE = "signature"
    REFUSED = "refused"  # from a node: why it does not answer
    CATEGORIES = "categories"  # from a client: the values of its columns that are open
    STATISTICS = "statistics"  # from a client: its masked vector is of statistics
    LOSSES = "losses"  # from a client: with the models of the two halves of a round
    NEW_CLIENT = "new_client"  # the kind of a new client's answer
    FINAL = "final"  # the kind of the message after the last round, to a member that no round evaluated
    EVALUATED = "evaluated"  # the kind of its answer


class Message(NamedTuple):
    """What a node receives, whatever the network is."""

    kind: str  # HELLO, TRAIN or JOIN
    content: Content | None  # None: another program wrote it


class Reply(NamedTuple):
    """The answer to a message, or the error of its delivery."""

    message_id: str
    content: Content = ("", b"")
    error: str = ""

    def checked(self) -> Content:
        """The content; WireError if the message was not delivered or the node refused it."""
        if self.error:
            raise WireError(printable(self.error))
        if len(self.content[0]) > MAX_HEAD:
            too_long = f"its head has {len(self.content[0]):,} characters"
            raise WireError(f"{too_long}; at most {MAX_HEAD:,} are read")
        fields = parsed(self.content[0])
        if Field.REFUSED in fields:
            raise WireError(f"it declined: {printable(fields[Field.REFUSED])}")
        return self.content


class Transport(Protocol):
    """A network of nodes."""

    def nodes(self) -> list[int]:
        """The ids of the nodes that are connected now."""

    def send(self, node: int, request: str, content: Content, seconds: float) -> str:
        """The id of the message, which expires after so many seconds.

        Args:
            node: The id of the receiver.
            request: HELLO, TRAIN or JOIN.
            content: A head and a body.
            seconds: How long the node has for its answer.
        """

    def replies(self, message_ids: Collection[str]) -> list[Reply]:
        """The replies to these messages that have arrived, each returned once."""


def parsed(head: str) -> dict[str, Any]:
    """The fields of a JSON object; none if the text is not one, or deeper than any of copfl's."""
    try:
        fields = json.loads(head)
        foreign.require_shallow(fields)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; none if it is missing or damaged."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return parsed(path.read_text())
    return {}


def printable(text: object, most: int = MAX_TEXT) -> str:
    """Another machine's text for a log or a record: in one line, without control characters, and not long.

    Args:
        text: Another machine's; what is no text is written as one.
        most: Characters; longer texts end in three points.
    """
    cut = str(text)[: most + 1]
    escaped = foreign.printable(cut[:most])
    return escaped[:most] + ("..." if len(cut) > most or len(escaped) > most else "")


def refusal(error: CopflError, private_texts: Iterable[str] = ()) -> Content:
    """The answer of a node that cannot do what it is asked; the whole error is in the node's log.

    It has no path of the machine.

    Args:
        error: Why the node does not do it.
        private_texts: What no other machine may read, such as paths of this one.
    """
    logging.getLogger("flwr").error("copfl: %s", printable(error, 10 * MAX_TEXT))
    # Such errors may describe samples or contain paths: the server receives only that there is one.
    is_file = isinstance(error.__cause__, OSError)
    private = "data" if isinstance(error, DataError) else "state-dir" if is_file else ""
    reason = f"its {private} cannot be used; see the node's log" if private else str(error)
    return json.dumps({Field.REFUSED: without_paths(reason, private_texts)}), b""


def without_paths(text: str, private_texts: Iterable[str] = ()) -> str:
    """A text for other machines: neither one of `places`, nor what looks like a path of this machine.

    Args:
        text: A sentence.
        private_texts: Of these, paths are replaced wherever they stand.
    """
    for path in sorted((path for path in private_texts if os.sep in path), key=len, reverse=True):
        text = text.replace(path, "[path]")
    return PATH.sub("[path]", text)
