"""What left a node, written down on the node: hash-chained lines of JSON in its state-dir. Without torch.

Each line has the hash of the line before, and its own. So a line that was changed, removed or moved is found.
Lines that were removed at the end are found by whoever noted the last hash (`copfl federate log` prints it).
Whoever can write to the file, and knows all lines, can write a whole new log: only noted hashes show that.
"""

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from copfl.errors import RunError, raised_as
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.messages import HELLO, Content, Field, parsed, printable
from copfl.federation.protocol.proposal import Proposal

FILE = "audit.jsonl"  # in the state-dir
FIRST_PREVIOUS = "0" * 64  # the first line has no line before it
SENT, REFUSED, RECOVERED = "sent", "refused", "recovered"  # events; recovered: a kill cut off the line before
LONGEST_LINE = 2**16  # bytes; texts of other machines are cut off
# What an answer has, by the kind in its head.
LEFT = {
    "upload": "update",
    "masked": "masked update",
    "keys": "keys",
    "shares": "key shares",
    "consistent": "signature",
    "revealed": "sum share",
    Field.NEW_CLIENT: "metrics",
    Field.LOSSES: "losses",
    Field.STATISTICS: "statistics",
}


class Entry(NamedTuple):
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
    request: str, asked: Content, answer: Content, proposal: Proposal | None, epsilon: float | None
) -> Entry:
    """What an answer of this node says, as a line of its log.

    Args:
        request: the kind of the server's message.
        asked: the server's message.
        answer: the node's.
        proposal: the one that a coordinator signed, accepted or not; None if there is none.
        epsilon: of the answer.
    """
    question, head = parsed(asked[0]), parsed(answer[0])
    run, round, reason = question.get("run"), question.get("round"), head.get(Field.REFUSED)
    left: list[str] = []
    if reason is None:
        kind = str(head.get("kind"))
        left = ["number"] if request == HELLO else [LEFT.get(kind, printable(kind, 40))]
        about = head.get("about")
        if isinstance(about, dict) and about.get(Field.METRICS):
            left.append("metrics")
        if isinstance(about, dict) and about.get(Field.STATISTICS):
            left = ["masked statistics"]
        if isinstance(about, dict) and Field.COMPARED in about:
            left = ["comparison"]
        if isinstance(about, dict) and about.get(Field.JUDGEMENT):
            left = ["masked judgement"]
        if isinstance(about, dict) and about.get(Field.CATEGORIES):
            left.append("categories")
    return Entry(
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


# -- writing -------------------------------------------------------------------------------------------------


def append(state: Path, entry: Entry) -> None:
    """Writes a line, which is on disk when this returns; RunError if it cannot be written."""
    failed = "its audit log cannot be written ({}); nothing is sent without it"
    with raised_as(RunError, failed, OSError, ValueError, KeyError, TypeError), _opened(state / FILE) as file:
        last = _last(file)
        if last.torn:  # a kill cut it off, maybe its line break alone
            mark = (
                b""
                if _is_whole(last.torn)
                else _line({"event": RECOVERED}, last.number + 2, _hash(last.torn))
            )
            _write(file, b"\n" + mark)
            last = _last(file)
        _write(file, _line(entry._asdict(), last.number + 1, last.hash))
        os.fsync(file)


class _Last(NamedTuple):
    number: int
    hash: str
    torn: bytes  # a line after it, which a kill cut off


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The file, for this process alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _last(file: int) -> _Last:
    size = os.fstat(file).st_size
    content = os.pread(file, 2 * LONGEST_LINE, max(0, size - 2 * LONGEST_LINE))
    *lines, torn = content.split(b"\n")
    if not lines:
        return _Last(0, FIRST_PREVIOUS, torn)
    fields = json.loads(lines[-1])
    return _Last(int(fields["n"]), str(fields["hash"]), torn)


def _line(fields: dict[str, Any], number: int, previous: str) -> bytes:
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    content = {"n": number, "at": at, **fields, "previous": previous}
    return _encoded(content | {"hash": _hash(_encoded(content))}) + b"\n"


def _is_whole(content: bytes) -> bool:
    """Whether this is all of a line, and has its own hash."""
    try:
        fields = json.loads(content)
        own = {key: value for key, value in fields.items() if key != "hash"}
        return bool(fields["hash"] == _hash(_encoded(own)) and _encoded(fields) == content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _write(file: int, content: bytes) -> None:
    start = os.fstat(file).st_size
    try:
        while content:
            content = content[os.write(file, content) :]
    except OSError:
        os.ftruncate(file, start)
        raise


def _encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -- reading -------------------------------------------------------------------------------------------------


class Verified(NamedTuple):
    """A log as it was read."""

    lines: list[dict[str, Any]]
    problem: str  # empty: no line was changed, removed or moved
    last_hash: str
    is_cut: bool  # whether a kill cut off the last line, or it is being written


def verified(path: Path, noted: Sequence[str] = ()) -> Verified:
    """The lines of a log, and the first line at which the chain breaks.

    Args:
        path: the file.
        noted: hashes of lines that somebody noted; a log that lacks one was cut off or replaced.
    """
    with raised_as(RunError, f"{path} cannot be read: {{}}", OSError):
        *raw, torn = path.read_bytes().split(b"\n")
    lines, problem, previous, cut = list[dict[str, Any]](), "", FIRST_PREVIOUS, False
    for number, content in enumerate(raw, 1):
        try:
            fields = json.loads(content)
            is_intact = _is_whole(content)
            is_next = fields["n"] == number and fields["previous"] == previous
            is_intact &= cut == (fields["event"] == RECOVERED)
            lines.append(fields)
            previous, was_cut, cut = str(fields["hash"]), cut, False
            if not is_intact or not is_next:
                where = "the line before it was" if was_cut else "it was"
                problem = problem or (
                    f"line {number}: {where} changed"
                    if not is_intact
                    else f"line {number}: lines before it were changed, removed or moved"
                )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            if cut:
                problem = problem or f"line {number - 1}: it was changed"
            cut, previous = True, _hash(content)  # a kill cut it off, if the next line says so
    if cut:
        problem = problem or f"line {len(raw)}: it was changed"
    hashes = {line.get("hash") for line in lines}
    for hash in noted:
        if hash not in hashes and not problem:
            problem = (
                f"no line has the noted hash {hash[:16]}: lines at the end were removed, or all were replaced"
            )
    return Verified(lines, problem, previous, bool(torn))


def as_text(line: dict[str, Any]) -> str:
    """A line of the log for people."""
    if line.get("event") == RECOVERED:
        return f"{line.get('at')}  the line before was cut off by a kill"
    asked = f"{line.get('request')} of run {line.get('run')}" + (
        f", round {line['round']}" if line.get("round") else ""
    )
    signed = f"proposal {str(line['proposal'])[:16]}" if line.get("proposal") else "unsigned"
    if line.get("event") == REFUSED:
        return f"{line.get('at')}  refused  {asked}, {signed}: {line.get('reason')}"
    epsilon = f", epsilon {line['epsilon']:.3g}" if line.get("epsilon") is not None else ""
    left = ", ".join(map(str, line.get("left", ())))
    return f"{line.get('at')}  sent     {left}, {line.get('bytes'):,} bytes{epsilon}: {asked}, {signed}"
