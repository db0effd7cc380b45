"""A client's records on its node: what it keeps between the rounds of a run, and which round it was asked for last."""

import hashlib
from pathlib import Path
from typing import Any

from copfl import wire
from copfl.errors import RunError, WireError, raised_as
from copfl.federation.protocol.files import stored, write_json
from copfl.files import remove_parts, write_bytes
from copfl.wire import Head

ASKED = "asked.json"  # in the run's folder: the last round that the node was asked for, and with what
NOTHING = {"round": -1, "model": "", "counted": -1}
KEPT_RECORDS = 3  # counted records of a client, so that a server that lost as many rounds can continue


class ClientRecords:
    """One client's records of one run, a file per round, in its node's folder: the last few."""

    def __init__(self, state_dir: Path, run: str) -> None:
        self.folder = state_dir / run

    def rounds(self) -> list[int]:
        """The rounds that have a record, in order."""
        numbers = [path.stem.removeprefix("round-") for path in self.folder.glob("round-*.copfl")]
        return sorted(int(number) for number in numbers if number.isdecimal())

    @property
    def has_been_asked(self) -> bool:
        """Whether the node has trained in a round of this run, or tried to."""
        return (self.folder / ASKED).exists()

    def ask(self, round: int, body: bytes, counted: int, *, may_return: bool) -> None:
        """Notes the model that this node is asked to train, before it does; WireError if it was another one.

        A node trains on one model in a round, also if that failed, and from one of its own records. With several
        of the server's choice each answer would tell something else of the same data. The other members of a
        secure sum do not see from which record this node starts: two sums would differ by its upload alone.

        Args:
            round: From 0.
            body: Of the server's message: its model.
            counted: The round after which its own record is the start; -1: the initial one.
            may_return: Whether the run may set the node back, with `rollback`.
        """
        path, asked = self.folder / ASKED, (hashlib.sha256(body).hexdigest(), counted)
        last, known = stored(
            path, lambda was: (int(was["round"]), (str(was["model"]), int(was["counted"]))), NOTHING
        )
        if (last, known) == (round, asked):
            return
        if round == last and not may_return:
            what = "model" if known[0] != asked[0] else "record of its own"
            raise WireError(
                f"this node was asked for round {round + 1} with another {what}, and trains on one in a round"
            )
        if round < last and not may_return:
            raise RunError(
                f"this node has already taken part in round {last + 1} of run {self.folder.name}, and is asked "
                f"for round {round + 1}: the message is old, or the server lost rounds; restore its checkpoint, "
                "or resume with rollback=true to set the nodes back"
            )
        write_json(path, {"round": round, "model": asked[0], "counted": counted})

    def load(self, head: Head, like: Any) -> Any:
        """The record after a round.

        Args:
            head: Of the record: its run, round and client.
            like: The structure of a record.
        """
        path = self._path(head.round)
        damaged = f"{path.name} cannot be used: {{}}; restore the node's state-dir"
        with raised_as(RunError, damaged, OSError, WireError):
            return wire.decode(wire.from_bytes(path.read_bytes()), like, head, finite=False).record

    def save(self, head: Head, record: Any, keep: int) -> None:
        """Writes the record after a round; of the others, the last ones up to round `keep` stay.

        Args:
            head: Of the record: its run, round and client.
            record: What the client keeps.
            keep: The last round that the server counted; later records are of uploads that have no effect
                yet.
        """
        remove_parts(self.folder)  # of a process that was killed
        write_bytes(self._path(head.round), wire.to_bytes(wire.encode(record, head)), private=True)
        rounds = [other for other in self.rounds() if other != head.round]
        # Later records are of uploads that did not count; the next round starts from the last counted one.
        counted_rounds = [other for other in rounds if other <= keep][-KEPT_RECORDS:]
        for other in rounds:
            if other not in counted_rounds:
                self._path(other).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.copfl"
