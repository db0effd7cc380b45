"""The folder of a federation's server as a run leaves it, written line by line: no training and no network."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from copfl.core.halves import first_half
from copfl.federation.protocol.chained_log import AUDIT, append
from copfl.federation.protocol.keys import SigningKey, new_key, openssh_line
from copfl.federation.protocol.proposal import Member
from copfl.federation.server.membership import Roster, propose, write_roster
from copfl.files import locked
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
        rounds: Number of rounds that are planned.
        benefit: Whether the rounds compare halves: the first member is worth more than the others.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("north", "south", "west"),
        needed: int = 0,
        rounds: int = 4,
        benefit: bool = False,
    ) -> None:
        self.app, self.path, self.rounds, self.benefit = folder, folder / "runs" / RUN, rounds, benefit
        (folder / "keys").mkdir(parents=True)
        self.path.mkdir(parents=True)
        app = {"host": "127.0.0.1", "port": 9, "secure": False}  # nothing answers at port 9
        run = {"clients": len(names), "rounds": rounds, "benefit": benefit}
        config = CONFIG | {"run": run, "network": {"min_replies": needed}}
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
        append(self.path / AUDIT, {"event": event, **fields}, durable=False)

    def start(self) -> None:
        """The run, with all members connected."""
        about = {"algorithm": "copfl", "clients": len(self.clients), "secure": False}
        self.log("started", round=1, rounds=self.rounds, **about)
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
        if self.benefit and not why:
            halves = first_half(0, number, np.arange(len(self.clients))).tolist()
            per_client["half"] = [1.0 if client in halves else -1.0 for client in counted]
            better = 0.01 if 0 in halves else -0.01
            noise = np.random.default_rng(number).normal(size=len(counted))
            per_client["half_difference"] = [better + 0.001 * float(value) for value in noise]
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
