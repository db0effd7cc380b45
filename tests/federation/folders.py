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
from copfl.federation.protocol.round_record import ROUNDS, RoundRecord
from copfl.federation.server.membership import Roster, propose, write_roster
from copfl.files import locked
from copfl.settings.toml import written

RUN = "trial"
CONFIG: dict[str, Any] = {
    "session": {"run": RUN},
    "run": {"clients": 3, "rounds": 4},
    "algorithm": {"name": "copfl"},
    "model": {"name": "mlp", "width": 16},
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

    def end_round(
        self, number: int, missing: dict[int, str] | None = None, *, scores: Sequence[str] = (), **more: Any
    ) -> None:
        """The rest of a round, whose members have accuracies of number/10 plus a hundredth each.

        Args:
            number: Of the round.
            missing: Client -> why it is left out.
            scores: Names of scores that every member has beside its weight.
            more: Other fields of the round's record.
        """
        counted = [client for client in self.clients if client not in (missing or {})]
        for client in counted:
            self.log("accepted", round=number, client=client, bytes=1000)
        accuracies = {client: number / 10 + client / 100 for client in counted}
        per_client: dict[str, dict[int, float | None]] = {
            "accuracy": {**accuracies},
            "weight": {client: 1.0 + client for client in counted},
            **{score: {client: 0.5 + client / 10 for client in counted} for score in scores},
            "bytes_up": dict.fromkeys(counted, 1000.0),
            "bytes_down": dict.fromkeys(counted, 2000.0),
        }
        if self.benefit and not missing:
            halves = first_half(0, number, np.arange(len(self.clients))).tolist()
            per_client["half"] = {client: 1.0 if client in halves else -1.0 for client in counted}
            better = 0.01 if 0 in halves else -0.01
            noise = np.random.default_rng(number).normal(size=len(counted))
            differences = [better + 0.001 * float(value) for value in noise]
            per_client["half_difference"] = dict(zip(counted, differences, strict=True))
        record = RoundRecord(
            number=number,
            seconds=1.5,
            clients=counted,
            left_out=missing or {},
            metric="accuracy",
            mean={"accuracy": sum(accuracies.values()) / len(counted)},
            per_client=per_client,
            federation={},
            bytes_up=1000 * len(counted),
            bytes_down=2000 * len(self.clients),
        )._replace(**more)
        line = record.as_json()
        about = {name: line[name] for name in ("metric", "seconds", "bytes")}
        value = record.mean["accuracy"]
        self.log("round_ended", round=number, accepted=counted, left_out=line["why"], value=value, **about)
        with open(self.path / ROUNDS, "a") as file:
            file.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While a server has the run's folder."""
        with locked(self.path / ".lock"):
            yield
