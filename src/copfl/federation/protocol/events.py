"""The names of what happens in a federation, and the log that takes them.

The server's rounds, its registry and its exchange write them (`operations.run_log` makes the log); `operations.history`
reads them back.
"""

from typing import Any, Protocol


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
    EVALUATED = "evaluated"  # after the last round: whom the last evaluation has
    NEW_CLIENT = "new_client"
    STATISTICS = "statistics"  # a pass over all members, for the encoders
    ENDED = "ended"
    FAILED = "failed"
    RELEASED = "released"  # in a node's ledger: a value that depends on its data
    SETTLED = "settled"  # the noise of a release, when it is certain


class Log(Protocol):
    """Takes a line for people, and an event with its fields for the audit log; each may be empty."""

    def __call__(self, text: str, /, event: str = "", **fields: Any) -> None: ...


def silent(text: str, /, event: str = "", **fields: Any) -> None:
    """A log that nobody reads.

    Args:
        text: For people.
        event: For the audit log; empty: none.
        fields: The event's.
    """
