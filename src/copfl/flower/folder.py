"""The server's folder of one run: checkpoint, the rounds' lines, a mask per client. No client's record is ever here."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from copfl import wire
from copfl.core.tree import Masked
from copfl.errors import RunError, WireError
from copfl.flower.files import write
from copfl.wire import Head, Opened, Packet


def new_run() -> str:
    """A name that no other run has."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def started_before(runs: str, run: str, flower_run: int) -> bool:
    """Whether this very run of Flower's has finished a round here."""
    path = Path(runs).expanduser() / run
    try:
        known = json.loads((path / "config.json").read_text()).get("flower-run")
    except (OSError, ValueError):
        return False
    return bool(known == flower_run and (path / "server.copfl").exists())


class Folder:
    """Where the server writes one run."""

    def __init__(self, runs: str, run: str, *, goes_on: bool) -> None:
        self.run = run
        self.path = Path(runs).expanduser() / run
        self.lines = self.path / "rounds.jsonl"
        self._checkpoint = self.path / "server.copfl"
        self._held: dict[int, dict[str, str]] = {}
        if not goes_on and self._checkpoint.exists():
            raise RunError(
                f"{self.path} already holds rounds of this run; resume it, or give the new run another name"
            )

    # -- the checkpoint ------------------------------------------------------------------------------------------

    def save(self, packet: Packet, record: dict[str, Any]) -> None:
        """Writes the checkpoint, and then the round's line: a line that a crash prevents is in the checkpoint too."""
        write(self._checkpoint, wire.to_bytes(packet))
        self._append(record)

    def load(self, like: Any, head: Callable[[int], Head]) -> tuple[Opened, int]:
        """The last checkpoint, and the round that comes next."""
        if not self._checkpoint.exists():
            raise RunError(
                f"there is no checkpoint in {self.path}; the run ended before its first round did: start it again"
            )
        try:
            packet = wire.from_bytes(self._checkpoint.read_bytes())
            round = int(wire.opened_head(packet)["round"])
            opened = wire.decode(packet, like, head(round), finite=False)
        except (OSError, WireError) as error:
            raise RunError(f"{self._checkpoint} cannot be used: {error}") from error
        self._mend(opened.about["record"])
        return opened, round

    def _append(self, record: dict[str, Any]) -> None:
        try:
            with open(self.lines, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"cannot write {self.lines}: {error.strerror}; free some space, then resume"
            ) from error

    def _mend(self, last: dict[str, Any]) -> None:
        """Brings the lines to where the checkpoint is: without a line cut short, with the last one."""
        kept = [r for r in self.rounds() if r["round"] < last["round"]]
        text = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in [*kept, last])
        write(self.lines, text.encode())

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds' records so far."""
        result = []
        for line in self.lines.read_bytes().split(b"\n") if self.lines.exists() else []:
            try:
                record = json.loads(line)
                if type(record["round"]) is not int:
                    break
            except (ValueError, KeyError, TypeError, RecursionError):  # cut short, or damaged
                break
            result.append(record)
        return result

    # -- masks ---------------------------------------------------------------------------------------------------

    def holds(self, client: int) -> dict[str, str]:
        """The fingerprints of the masks held from this client, by their path in its upload."""
        if client not in self._held:
            try:
                packet = wire.from_bytes(self._mask_file(client).read_bytes())
                self._held[client] = dict(wire.opened_head(packet)["about"])
            except (OSError, WireError):  # none, or damaged: the client sends it again
                self._held[client] = {}
        return self._held[client]

    def masks(self, client: int, like: Any) -> dict[str, Tensor]:
        """The masks held from this client, for an upload that looks like this."""
        if not self.holds(client):
            return {}
        shape = {path: piece.personal for path, piece in wire.pieces(like) if isinstance(piece, Masked)}
        try:
            packet = wire.from_bytes(self._mask_file(client).read_bytes())
            result: dict[str, Tensor] = wire.decode(packet, shape, self._mask_head(client)).record
            return result
        except (OSError, WireError):
            self._held[client] = {}
            return {}

    def keep_masks(self, client: int, masks: dict[str, Tensor]) -> None:
        """Holds these masks from now on."""
        prints = {path: wire.fingerprint(mask) for path, mask in masks.items()}
        if prints and prints != self.holds(client):
            write(
                self._mask_file(client),
                wire.to_bytes(wire.encode(masks, self._mask_head(client), about=prints)),
            )
            self._held[client] = prints

    def _mask_head(self, client: int) -> Head:
        return Head("masks", self.run, "", 0, client)

    def _mask_file(self, client: int) -> Path:
        return self.path / "masks" / f"{client}.copfl"
