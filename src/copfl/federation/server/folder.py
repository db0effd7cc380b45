"""The server's folder of a run: the checkpoint, a line per round, and the masks of the clients.

`rounds` writes it, `bundle` reads it. `operations.watched` reads the lines without torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from copfl import wire
from copfl.core.tree import Masked
from copfl.errors import RunError, WireError, raised_as
from copfl.experiment import records
from copfl.federation.protocol.messages import read_json
from copfl.files import locked, remove_parts, write_bytes
from copfl.measures.metrics import MetricInfo
from copfl.wire import Head, Opened, Packet

NEW_CLIENTS = "new_clients.json"  # in the run's folder: the results of new clients


def started_before(runs: str, run: str, flower_run: int) -> bool:
    """Whether this run of Flower's has a checkpoint: Flower starts a crashed ServerApp again.

    Args:
        runs: The folder of all runs.
        run: The run's name.
        flower_run: Flower's number of it.
    """
    path = Path(runs).expanduser() / run
    is_same = read_json(path / "config.json").get("flower-run") == flower_run
    return is_same and (path / "server.copfl").exists()


def as_text(record: dict[str, Any]) -> str:
    """The record of a round in a line."""
    metric, sent = MetricInfo(record.get("metric", "accuracy")), record["bytes"]
    value = record["mean"].get(metric.name)
    words = [f"round {record['round']:>3}", f"{len(record['clients'])} clients"]
    words += [f"{metric.title} {value:.4f}"] if value is not None else []
    words += [f"{sent['up'] / 1e6:.2f} MB up, {sent['down'] / 1e6:.2f} MB down"]
    words += [f"{record['seconds']:.1f} s{_longest(record)}"] if "seconds" in record else []
    words += [f"client {client}: {reason}" for client, reason in record["why"].items()]
    return "  ".join(words)


def _longest(record: dict[str, Any]) -> str:
    """Of a secure round, the phase that took longest, and whose answer ended it."""
    phases = record.get("secure_aggregation", {}).get("phases")
    if not phases:
        return ""
    name, longest = max(phases.items(), key=lambda phase: phase[1]["seconds"])
    last = "" if longest["last"] is None else f", client {longest['last']} last"
    return f" ({longest['seconds']:.1f} s in phase {name!r}{last})"


class ServerFolder:
    """The server's files of one run: its checkpoint, a line per round, and a mask per client."""

    def __init__(self, runs: str, run: str, *, resume: bool) -> None:
        self.run = run
        self.path = Path(runs).expanduser() / run
        self.lines = self.path / "rounds.jsonl"
        self._checkpoint = self.path / "server.copfl"
        if not resume and self._checkpoint.exists():
            raise RunError(f"{self.path} already holds rounds of this run; resume it, or choose another name")

    def claimed(self) -> AbstractContextManager[None]:
        """The right to write here; Busy if another ServerApp has it. It ends with the process."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return locked(self.path / ".lock")

    def save(self, packet: Packet, record: dict[str, Any]) -> None:
        """Writes the checkpoint, then the round's line; the checkpoint contains the line too.

        Args:
            packet: The checkpoint.
            record: The round, as a line of JSON.
        """
        write_bytes(self._checkpoint, wire.to_bytes(packet), private=True)
        records.append(self.lines, record)

    def load(self, like: Any, head: Callable[[int], Head]) -> tuple[Opened, int]:
        """The last checkpoint and the number of the next round; a missing last line is written.

        Args:
            like: The structure of the server's record.
            head: Of a checkpoint, by its round.
        """
        remove_parts(self.path)  # of a process that was killed
        remove_parts(self.path / "masks")
        opened, round = self.checkpoint(like, head)
        last = opened.about["record"]
        earlier = [record for record in self.rounds() if record["round"] < last["round"]]
        write_bytes(self.lines, b"".join(map(records.encoded, (*earlier, last))), private=True)
        return opened, round

    def checkpoint(self, like: Any, head: Callable[[int], Head]) -> tuple[Opened, int]:
        """The last checkpoint and the number of the next round; nothing is written.

        Args:
            like: The structure of the server's record.
            head: Of a checkpoint, by its round.
        """
        if not self._checkpoint.exists():
            raise RunError(f"there is no checkpoint in {self.path}: no round was finished; start it again")
        with raised_as(RunError, f"{self._checkpoint} cannot be used: {{}}", OSError, WireError):
            packet = wire.from_bytes(self._checkpoint.read_bytes())
            round = int(wire.opened_head(packet)["round"])
            return wire.decode(packet, like, head(round), finite=False), round

    def rounds(self) -> list[dict[str, Any]]:
        """The records of the finished rounds."""
        return records.read(self.lines) if self.lines.exists() else []

    def masks(self, client: int, upload: Any) -> dict[str, Tensor]:
        """This client's stored masks by their path in an upload; none if the file is missing or damaged.

        Args:
            client: Its number.
            upload: The structure of every upload.
        """
        like = {path: piece.personal for path, piece in wire.pieces(upload) if isinstance(piece, Masked)}
        path, head = self._mask(client)
        try:
            return dict(wire.decode(wire.from_bytes(path.read_bytes()), like, head).record)
        except (OSError, WireError):  # the client sends them again
            return {}

    def save_masks(self, client: int, masks: dict[str, Tensor]) -> None:
        """Stores the masks that a client sent: it sends them again only when they change.

        Args:
            client: Its number.
            masks: By their path in an upload.
        """
        path, head = self._mask(client)
        write_bytes(path, wire.to_bytes(wire.encode(masks, head)), private=True)

    def _mask(self, client: int) -> tuple[Path, Head]:
        return self.path / "masks" / f"{client}.copfl", Head("masks", self.run, "", 0, client)
