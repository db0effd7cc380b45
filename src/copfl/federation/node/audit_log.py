"""What left a node, written down on the node: lines of a chained log in its state-dir. Without torch.

`respond.logged` writes a line for each answer before it leaves, and `copfl site log` prints them.
"""

from pathlib import Path
from typing import Any, NamedTuple

from copfl.federation.protocol import chained_log
from copfl.federation.protocol.chained_log import AUDIT, RECOVERED
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.messages import HELLO, Content, Field, parsed, printable
from copfl.federation.protocol.proposal import Proposal

SENT, REFUSED = "sent", "refused"  # events
# What an answer has, by the kind in its head.
WHAT_LEAVES = {
    "upload": "update",
    "masked": "masked update",
    "keys": "keys",
    "shares": "key shares",
    "consistent": "signature",
    "revealed": "sum share",
    Field.NEW_CLIENT: "metrics",
    Field.EVALUATED: "metrics",
    Field.LOSSES: "losses",
    Field.STATISTICS: "statistics",
}


class AuditEntry(NamedTuple):
    """A line: what the server asked for, and what left."""

    event: str
    coordinator: str | None  # fingerprint of who signed the proposal; None: nobody did
    proposal: str | None  # SHA-256
    run: str | None
    round: int | None  # from 1
    request: str
    left: tuple[str, ...]  # kinds of values
    bytes: int  # of the answer
    epsilon: float | None  # of this answer alone; None: not private
    reason: str  # of a refusal


def entry_of(
    request: str, question: Content, answer: Content, proposal: Proposal | None, epsilon: float | None
) -> AuditEntry:
    """What an answer of this node says, as a line of its log.

    Args:
        request: The kind of the server's message.
        question: The server's message.
        answer: The node's.
        proposal: The one that a coordinator signed, accepted or not; None if there is none.
        epsilon: Of the answer.
    """
    asked, answered = parsed(question[0]), parsed(answer[0])
    run, round, reason = (
        asked.get("run"),
        asked.get("round"),
        answered.get(Field.REFUSED),
    )
    left: list[str] = []
    if reason is None:
        kind = str(answered.get("kind"))
        left = ["number"] if request == HELLO else [WHAT_LEAVES.get(kind, printable(kind, 40))]
        about = answered.get("about")
        if isinstance(about, dict) and about.get(Field.METRICS):
            left.append("metrics")
        if isinstance(about, dict) and about.get(Field.STATISTICS):
            left = ["masked statistics"]
        if isinstance(about, dict) and about.get(Field.CATEGORIES):
            left.append("categories")
    return AuditEntry(
        SENT if reason is None else REFUSED,
        None if proposal is None else fingerprint(proposal.coordinator),
        None if proposal is None else proposal.digest,
        printable(run, 100) if isinstance(run, str) else None,
        round + 1 if type(round) is int and abs(round) < 2**62 else None,
        printable(request, 40),
        tuple(left),
        len(answer[0].encode()) + len(answer[1]),
        epsilon if reason is None else None,
        "" if reason is None else printable(reason),
    )


def append(state: Path, entry: AuditEntry) -> None:
    """Writes a line, which is on disk when this returns; RunError if it cannot be written.

    Args:
        state: The node's state-dir.
        entry: What left.
    """
    failed = "its audit log cannot be written ({}); nothing is sent without it"
    chained_log.append(state / AUDIT, entry._asdict(), failed=failed)


def as_text(line: dict[str, Any]) -> str:
    """A line of the log for people."""
    if line.get("event") == RECOVERED:
        return f"{line.get('at')}  the line before was cut off by a kill"
    question = f"{line.get('request')} of run {line.get('run')}" + (
        f", round {line['round']}" if line.get("round") else ""
    )
    proposal = f"proposal {str(line['proposal'])[:16]}" if line.get("proposal") else "unsigned"
    if line.get("event") == REFUSED:
        return f"{line.get('at')}  refused  {question}, {proposal}: {line.get('reason')}"
    epsilon = f", epsilon {line['epsilon']:.3g}" if line.get("epsilon") is not None else ""
    what_left = ", ".join(map(str, line.get("left", ())))
    return f"{line.get('at')}  sent     {what_left}, {line.get('bytes'):,} bytes{epsilon}: {question}, {proposal}"
