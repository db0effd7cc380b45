"""A client's records on its node: what it keeps between the rounds of a run."""

from pathlib import Path
from typing import Any

from copfl import wire
from copfl.errors import RunError, WireError, raised_as
from copfl.files import remove_parts, write_bytes
from copfl.wire import Head

KEPT_RECORDS = 3  # counted records of a client, so that a server that lost as many rounds can continue


class ClientRecords:
    """One client's records of one run, a file per round, in its node's folder: the last few."""

    def __init__(self, state_dir: Path, run: str) -> None:
        self.folder = state_dir / run

    def rounds(self) -> list[int]:
        """The rounds that have a record, in order."""
        numbers = [path.stem.removeprefix("round-") for path in self.folder.glob("round-*.copfl")]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def load(self, head: Head, like: Any) -> Any:
        """The record after a round."""
        path = self._path(head.round)
        damaged = f"{path.name} cannot be used: {{}}; restore the node's state-dir"
        with raised_as(RunError, damaged, OSError, WireError):
            return wire.decode(wire.from_bytes(path.read_bytes()), like, head, finite=False).record

    def save(self, head: Head, record: Any, keep: int) -> None:
        """Writes the record after a round; of the others, the last ones up to round `keep` stay."""
        remove_parts(self.folder)  # of a process that was killed
        write_bytes(self._path(head.round), wire.to_bytes(wire.encode(record, head)), private=True)
        rounds = [other for other in self.rounds() if other != head.round]
        kept = [other for other in rounds if other <= keep][-KEPT_RECORDS:]
        for other in rounds:
            if other not in kept:
                self._path(other).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.copfl"
