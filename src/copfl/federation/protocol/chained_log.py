"""Hash-chained lines of JSON: the server's audit log, a node's audit log and its ledger. Without torch.

Each line has its number, the time, the hash of the line before, and its own hash. So a line that was changed,
removed or moved is found. Lines that were removed at the end are found by whoever noted the last hash
(`copfl federate status` and `copfl site log` print it). Whoever can write to the file, and knows all
lines, can write a whole new log: only noted hashes show that. A line that a kill cut off stays in the chain,
and the next one says so.
"""

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from copfl import foreign
from copfl.errors import RunError, raised_as

AUDIT = "audit.jsonl"  # in the folder of a server's run, and in a node's state-dir
FIRST_PREVIOUS = "0" * 64  # the first line has no line before it
RECOVERED = "recovered"  # the event of a line: a kill cut off the line before
CHAIN = ("n", "previous", "hash")  # the fields that chain a line to the others
WINDOW = 2**16  # bytes at the end of a file that are read to find its last line; more if that is longer


class Verified(NamedTuple):
    """A log as it was read."""

    lines: list[dict[str, Any]]
    problem: str  # empty: no line was changed, removed or moved
    last_hash: str
    is_cut: bool  # whether a kill cut off the last line, or it is being written


NO_LOG = Verified([], "", "", is_cut=False)


# -- writing -------------------------------------------------------------------------------------------------


def append(
    path: Path,
    fields: Mapping[str, Any],
    *,
    durable: bool = True,
    failed: str = "cannot write {path}: {}; free some space, then resume",
) -> None:
    """Writes a line; RunError if it cannot be written, or if the last line is damaged.

    Args:
        path: The file. Several processes may write to it.
        fields: What the line says; its `event` is a text.
        durable: Whether the line is on disk when this returns.
        failed: The text of the error.
    """
    with (
        raised_as(RunError, failed.replace("{path}", str(path)), OSError, *foreign.DAMAGE),
        _opened(path) as file,
    ):
        number, previous, torn = _last(file)
        # What stands after the last line break was cut off by a kill, or its line break was. It stays, whatever it is:
        # a chain from which something can be removed would prove nothing.
        if torn and not _is_whole(torn):
            torn_hash, number = _hash(torn), number + 2  # the line that was cut off has a number, too
            mark = _line({"event": RECOVERED}, number, torn_hash)
            _write(file, b"\n" + mark)
            previous = json.loads(mark)["hash"]
        elif torn:  # its line break alone was cut off
            _write(file, b"\n")
            number, previous = number + 1, json.loads(torn)["hash"]
        _write(file, _line(fields, number + 1, previous))
        if durable:
            os.fsync(file)


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


def _last(file: int) -> tuple[int, str, bytes]:
    """The number and the hash of the last line, and what a kill left of a line after it."""
    size, start, window = os.fstat(file).st_size, 1, WINDOW
    lines: list[bytes] = []
    while start > 0 and len(lines) < 2:  # of two lines in a window, the second one is whole
        start, window = max(0, size - window), 4 * window
        *lines, torn = os.pread(file, size - start, start).split(b"\n")
    if not lines:
        return 0, FIRST_PREVIOUS, torn
    fields = json.loads(lines[-1])
    return int(fields["n"]), str(fields["hash"]), torn


def _line(fields: Mapping[str, Any], number: int, previous: str) -> bytes:
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    content = {"n": number, "at": at, **fields, "previous": previous}
    return json.dumps(content | {"hash": _hash(json.dumps(content).encode())}).encode() + b"\n"


def _write(file: int, content: bytes) -> None:
    """All of the content, or nothing."""
    start = os.fstat(file).st_size
    try:
        while content:
            content = content[os.write(file, content) :]
    except OSError:
        os.ftruncate(file, start)
        raise


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -- reading -------------------------------------------------------------------------------------------------


def verified(path: Path, noted: Sequence[str] = ()) -> Verified:
    """The lines of a log, and the first line at which the chain breaks.

    Args:
        path: The file.
        noted: Hashes of lines that somebody noted; a log that lacks one was cut off or replaced.
    """
    with raised_as(RunError, f"{path} cannot be read: {{}}", OSError):
        *raw, torn = path.read_bytes().split(b"\n")
    lines, problem, previous, cut = list[dict[str, Any]](), "", FIRST_PREVIOUS, False
    for number, content in enumerate(raw, 1):
        try:
            fields = foreign.json_of(content)  # a person reads them in a terminal
            is_next = fields["n"] == number and fields["previous"] == previous
            # After a line that is none, the next one must say that a kill cut it off, and no other line may say so.
            is_intact = _is_whole(content) and cut == (fields["event"] == RECOVERED)
            previous, was_cut, cut = str(fields["hash"]), cut, False
        except foreign.DAMAGE:
            if cut:
                problem = problem or f"line {number - 1}: it was changed"
            cut, previous = True, _hash(content)  # a kill cut it off, if the next line says so
            continue
        if _is_event(fields):
            lines.append(fields)
        else:
            is_intact = False
        if not is_intact:
            where = "the line before it was" if was_cut else "it was"
            problem = problem or f"line {number}: {where} changed"
        elif not is_next:
            problem = problem or f"line {number}: lines before it were changed, removed or moved"
    if cut:
        problem = problem or f"line {len(raw)}: it was changed"
    hashes = {line["hash"] for line in lines}
    for hash in noted:
        if hash not in hashes and not problem:
            problem = (
                f"no line has the noted hash {hash[:16]}: lines at the end were removed, or all were replaced"
            )
    return Verified(lines, problem, previous, bool(torn))


def _is_whole(content: bytes) -> bool:
    """Whether this is all of a line, and has its own hash."""
    try:
        fields = json.loads(content)
        hashed = {key: value for key, value in fields.items() if key != "hash"}
        is_hashed = fields["hash"] == _hash(json.dumps(hashed).encode())
        return bool(is_hashed and json.dumps(fields).encode() == content)
    except foreign.DAMAGE:
        return False


def _is_event(fields: Mapping[str, Any]) -> bool:
    """Whether a line says what happened and when, in the form that readers of a log expect."""
    try:
        datetime.datetime.fromisoformat(fields["at"])
        return isinstance(fields["event"], str) and isinstance(fields["hash"], str)
    except foreign.DAMAGE:
        return False
