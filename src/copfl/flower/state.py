"""Files of a federation: the server's folder of a run, and a client's records on its node."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from copfl import wire
from copfl.core.tree import Masked
from copfl.errors import RunError, WireError
from copfl.experiment import records
from copfl.files import write_bytes
from copfl.wire import Head, Opened, Packet

NEW_CLIENTS = "new_clients.json"  # in the run's folder: the results of new clients


def new_run() -> str:
    """A name that no other run has."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def started_before(runs: str, run: str, flower_run: int) -> bool:
    """Whether this run of Flower's has a checkpoint: Flower starts a crashed ServerApp again."""
    path = Path(runs).expanduser() / run
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(config.get("flower-run") == flower_run and (path / "server.copfl").exists())


class ServerFolder:
    """The server's files of one run: its checkpoint, a line per round, and a mask per client."""

    def __init__(self, runs: str, run: str, *, resume: bool) -> None:
        self.run = run
        self.path = Path(runs).expanduser() / run
        self.lines = self.path / "rounds.jsonl"
        self._checkpoint = self.path / "server.copfl"
        if not resume and self._checkpoint.exists():
            raise RunError(f"{self.path} already holds rounds of this run; resume it, or choose another name")

    def save(self, packet: Packet, record: dict[str, Any]) -> None:
        """Writes the checkpoint, then the round's line; the checkpoint contains the line too."""
        write_bytes(self._checkpoint, wire.to_bytes(packet), private=True)
        records.append(self.lines, record)

    def load(self, like: Any, head: Callable[[int], Head]) -> tuple[Opened, int]:
        """The last checkpoint and the number of the next round; a missing last line is written."""
        if not self._checkpoint.exists():
            raise RunError(
                f"there is no checkpoint in {self.path}: no round was finished; start the run again"
            )
        try:
            packet = wire.from_bytes(self._checkpoint.read_bytes())
            round = int(wire.opened_head(packet)["round"])
            opened = wire.decode(packet, like, head(round), finite=False)
        except (OSError, WireError) as error:
            raise RunError(f"{self._checkpoint} cannot be used: {error}") from error
        last = opened.about["record"]
        earlier = [record for record in self.rounds() if record["round"] < last["round"]]
        lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in (*earlier, last)]
        write_bytes(self.lines, "".join(lines).encode(), private=True)
        return opened, round

    def rounds(self) -> list[dict[str, Any]]:
        """The records of the finished rounds."""
        return records.read(self.lines) if self.lines.exists() else []

    def masks(self, client: int, upload: Any) -> dict[str, Tensor]:
        """This client's stored masks by their path in an upload; none if the file is missing or damaged."""
        like = {path: piece.personal for path, piece in wire.pieces(upload) if isinstance(piece, Masked)}
        try:
            packet = wire.from_bytes(self._mask_file(client).read_bytes())
            masks: dict[str, Tensor] = wire.decode(packet, like, self._mask_head(client)).record
            return masks
        except (OSError, WireError):  # the client sends them again
            return {}

    def save_masks(self, client: int, masks: dict[str, Tensor]) -> None:
        """Stores the masks of a client."""
        packet = wire.encode(masks, self._mask_head(client))
        write_bytes(self._mask_file(client), wire.to_bytes(packet), private=True)

    def _mask_head(self, client: int) -> Head:
        return Head("masks", self.run, "", 0, client)

    def _mask_file(self, client: int) -> Path:
        return self.path / "masks" / f"{client}.copfl"


class ClientRecords:
    """One client's records of one run, a file per round, in its node's folder. At most two are kept."""

    def __init__(self, state_dir: Path, run: str) -> None:
        self.folder = state_dir / run

    def rounds(self) -> list[int]:
        """The rounds that have a record, in order."""
        names = (re.fullmatch(r"round-(\d+)\.copfl", p.name) for p in self.folder.glob("round-*.copfl"))
        return sorted(int(match[1]) for match in names if match)

    def load(self, head: Head, like: Any) -> Any:
        """The record after a round."""
        path = self._path(head.round)
        try:
            return wire.decode(wire.from_bytes(path.read_bytes()), like, head, finite=False).record
        except (OSError, WireError) as error:
            raise RunError(f"{path.name} cannot be used: {error}; restore the node's state-dir") from error

    def save(self, head: Head, record: Any, keep: int) -> None:
        """Writes the record after a round; of the earlier ones, only that of round `keep` stays."""
        self.save_file(f"round-{head.round:06d}.copfl", head, record)
        for other in self.rounds():
            if other not in (head.round, keep):
                self._path(other).unlink(missing_ok=True)

    def save_file(self, name: str, head: Head, record: Any) -> None:
        """Writes a record under this name."""
        write_bytes(self.folder / name, wire.to_bytes(wire.encode(record, head)), private=True)

    def save_number(self, client: int) -> None:
        """Writes which client this node is in this run."""
        write_bytes(self.folder / "client.json", json.dumps({"client": client}).encode(), private=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.copfl"
