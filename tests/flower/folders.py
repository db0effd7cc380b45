"""The folder of a federation's server as a run leaves it, written line by line: no training and no network."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from copfl.files import locked
from copfl.flower.events import AUDIT, AuditLog
from copfl.flower.keys import SigningKey, new_key, openssh_line
from copfl.flower.membership import Roster, propose, write_roster
from copfl.flower.proposal import Member
from copfl.settings.toml import written

RUN = "trial"
CONFIG: dict[str, Any] = {
    "session": {"run": RUN},
    "run": {"clients": 3, "rounds": 4},
    "algorithm": {"name": "copfl"},
    "privacy": {"delta": 1e-5},
}


class ServerState:
    """An app with members of these names and one run; events and rounds are added one by one.

    Args:
        folder: A new one.
        names: Of the members.
        needed: Number of replies that a round needs; 0: half of them.
    """

    def __init__(
        self, folder: Path, names: Sequence[str] = ("north", "south", "west"), needed: int = 0
    ) -> None:
        self.app, self.path = folder, folder / "runs" / RUN
        (folder / "keys").mkdir(parents=True)
        self.path.mkdir(parents=True)
        app = {"host": "127.0.0.1", "port": 9, "secure": False}  # nothing answers at port 9
        config = CONFIG | {"run": {"clients": len(names), "rounds": 4}, "network": {"min_replies": needed}}
        tool = {"copfl": app, "flwr": {"app": {"config": {"proposal": "", **config}}}}
        (folder / "pyproject.toml").write_text(written({"tool": tool}))
        self.coordinator = SigningKey(new_key())
        (folder / "keys" / "coordinator.pub").write_bytes(openssh_line(self.coordinator.public))
        self.members = tuple(Member(n, name, SigningKey(new_key()).public) for n, name in enumerate(names))
        self.roster = Roster(self.members)
        write_roster(folder, self.roster)
        self.clients = list(range(len(names)))

    def sign(self) -> None:
        propose(self.app, {}, self.coordinator, self.roster)

    def log(self, event: str, **fields: Any) -> None:
        log = AuditLog(self.path / AUDIT)
        log.add(event, **fields)
        log.close()

    def start(self) -> None:
        """The run, with all members connected."""
        self.log("started", round=1, rounds=4, algorithm="copfl", clients=len(self.clients), secure=False)
        for client in self.clients:
            self.log("joined", client=client, node=str(100 + client))

    def begin_round(self, number: int, clients: Sequence[int] | None = None) -> None:
        self.log("round_started", round=number, clients=list(self.clients if clients is None else clients))

    def end_round(self, number: int, missing: dict[int, str] | None = None, **more: Any) -> None:
        """The rest of a round, whose members have accuracies of number/10 plus a hundredth each."""
        why = {str(client): reason for client, reason in (missing or {}).items()}
        counted = [client for client in self.clients if str(client) not in why]
        for client in counted:
            self.log("accepted", round=number, client=client, bytes=1000)
        accuracies = [number / 10 + client / 100 for client in counted]
        mean = {"accuracy": sum(accuracies) / len(counted)}
        sent = {"up": 1000 * len(counted), "down": 2000 * len(self.clients)}
        about = {"metric": "accuracy", "seconds": 1.5, "bytes": sent}
        ended = {"accepted": counted, "left_out": why, "value": mean["accuracy"], **about}
        self.log("round_ended", round=number, **ended)
        per_client = {
            "accuracy": accuracies,
            "weight": [1.0 + client for client in counted],
            "bytes_up": [1000.0] * len(counted),
            "bytes_down": [2000.0] * len(counted),
        }
        record = {
            "round": number,
            "clients": counted,
            "federation": {},
            "mean": mean,
            "left_out": sorted(why),
        }
        record |= {"why": why, "notes": {}, "per_client": per_client, **about, **more}
        with open(self.path / "rounds.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While a server has the run's folder."""
        with locked(self.path / ".lock"):
            yield
