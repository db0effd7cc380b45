"""The audit log: each line has the hash of the line before it.

So a line that was changed or removed is seen, except at the end of the file: note the hash of the last line
elsewhere (`copfl federate status` prints it). Without torch.
"""

import datetime
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from copfl.errors import RunError
from copfl.federation.protocol.events import Event

AUDIT = "audit.jsonl"  # in the run's folder


FIRST_PREVIOUS = "0" * 64  # the first line has no line before it


# On disk before anything else is done.
SYNCED = (Event.STARTED, Event.ROUND_ENDED, Event.ENDED, Event.FAILED, Event.RELEASED, Event.SETTLED)


class AuditLog:
    """The open audit log of a run; lines are only appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        *lines, rest = path.read_bytes().split(b"\n")
        self._previous = _hash(lines[-1]) if lines else FIRST_PREVIOUS
        if rest:  # a kill cut it off
            self._write(b"\n")
            self._previous = _hash(rest)
            self.add(Event.RECOVERED)

    def add(self, event: str, **fields: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"at": now, "event": event, **fields, "previous": self._previous}).encode()
        self._write(line + b"\n")
        self._previous = _hash(line)
        if event in SYNCED:
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, content: bytes) -> None:
        start = os.fstat(self._file).st_size
        try:
            while content:
                content = content[os.write(self._file, content) :]
        except OSError as error:
            os.ftruncate(self._file, start)
            raise RunError(
                f"cannot write {self.path}: {error.strerror}; free some space, then resume"
            ) from error


class Verified(NamedTuple):
    """An audit log as it was read."""

    events: list[dict[str, Any]]
    problem: str  # empty: no line was changed or removed
    last_hash: str


def verified(path: Path) -> Verified:
    """The events of an audit log; an incomplete last line is being written, and is left out."""
    *lines, _ = path.read_bytes().split(b"\n")
    events, problem, previous, cut = list[dict[str, Any]](), "", FIRST_PREVIOUS, 0
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            is_chained = event["previous"] == previous and isinstance(event["event"], str)
            datetime.datetime.fromisoformat(event["at"])
            events.append(event)
            is_chained &= not cut or event["event"] == Event.RECOVERED
            cut = 0
        except (ValueError, TypeError, KeyError, RecursionError):
            is_chained, cut = not cut, number  # a kill cut it off, if the next line says so
        if not (is_chained or problem):
            problem = f"line {number} of {path.name} was changed, or lines before it were changed or removed"
        previous = _hash(line)
    if cut and not problem:
        problem = f"line {cut} of {path.name} was changed"
    return Verified(events, problem, previous)


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
