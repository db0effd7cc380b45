"""Kills processes of a federation at random moments: the result must be that of an undisturbed one.

`flower_kills.py --kills 50`: three nodes with certificates and keys, digits, MLP, CO-PFL. Victims are workers,
nodes, the ServerApp and the SuperLink, each killed by SIGKILL alone. What a supervisor would do is done: a node and
the SuperLink are started again, and the run is resumed. Prints a line per kill, then the result as JSON: the largest
difference to an undisturbed federation, which must be 0; what is left: processes, sockets, temporary files; and how
often the SuperLink's database, which has the messages, had personal values at a kill. Exit code 1 if it is not as
promised. `--secure-aggregation`: the same with secure sums. A server that is killed while it adds one up loses that
round: nodes reveal their shares once. The undisturbed federation loses the same rounds, and the result names them.
The nodes have the strict policy that `copfl site policy` writes, and take part in runs that their coordinator
signed; without secure sums, it has no `secure_aggregation.required`. Kills are at random moments of random rounds, at
most three in one, over the whole run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the federation without a network is in the tests

from tests.federation.network import CONFIG, Fault, client_of, digits, farthest, play, server_of, write_nodes

from copfl.core import tree
from copfl.federation import init
from copfl.federation.machines.local_federation import LocalFederation
from copfl.federation.policy.file import strict
from copfl.federation.protocol.app_folder import LOCAL_HOME
from copfl.federation.protocol.chained_log import AUDIT, verified
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.secure_exchange import REVEALED
from copfl.settings.flat import nested
from copfl.wire import Packet

VICTIMS = ("worker", "node", "server", "superlink")
MOST = 3  # kills in a round
PATIENCE = 900.0  # seconds of a round with a kill; several deadlines on a busy machine
LEAK = 5  # personal values in one file: fewer may be equal to random bytes


class Killed:
    """A federation whose processes are killed and started again."""

    def __init__(self, folder: Path, rounds: int, seed: int, secure_aggregation: bool) -> None:
        self.config = CONFIG | {
            "run.rounds": rounds,
            "network.deadline": 60,
            "secure.aggregation": secure_aggregation,
            "run.even_batches": secure_aggregation,
        }
        self.settings = settings_of(self.config)
        self.nodes = write_nodes(digits(), folder / "nodes")
        self.runs, self.draw = folder / "app" / "runs", random.Random(seed)
        app = init(folder / "app", nested(self.config), secure=True)
        self.local = LocalFederation(app, secure=True)
        text = strict().replace(
            "coordinators = []", f'coordinators = ["{fingerprint(self.local.coordinator.public)}"]'
        )
        text = text.replace('members = "approved"', 'members = "first"')  # no owner is there to approve
        text = text if secure_aggregation else text.replace("required = true", "required = false")
        (folder / "policy.toml").write_text(text)
        for node in self.nodes:
            node["policy"] = str(folder / "policy.toml")
        (folder / "tmp").mkdir()
        self.local.options["env"]["TMPDIR"] = str(folder / "tmp")
        self.server_folder = ServerFolder(str(self.runs), "test", resume=True)
        self.rounds, self.kills = rounds, list[tuple[int, str]]()  # round, victim
        self.searched, self.leaks = 0, 0  # databases

    def with_word(self, word: str) -> list[int]:
        """The processes of the federation that have the word in their command."""
        found = []
        for pid in self.local.alive():
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found

    def done(self) -> int:
        return len(self.server_folder.rounds())

    def search_messages(self) -> None:
        """Counts the databases of the SuperLink that have values of the nodes' present personal entries."""
        home = self.local.folder / LOCAL_HOME
        contents = [path.read_bytes() for path in home.glob(f"{self.local.port}.db*")]
        for client, config in enumerate(self.nodes):
            with contextlib.suppress(Exception):  # a node may be about to replace its record
                last = max((Path(config["state-dir"]) / "test").glob("round-*.copfl"))
                record = client_of(self.settings, config, client, int(last.stem.removeprefix("round-")))
                personal = record.w[record.mask & (record.w != record.seen)]
                values = np.setdiff1d(personal.numpy(), self.settings.task.initial.numpy())
                found = [len(np.intersect1d(values, floats)) for c in contents for floats in _floats(c)]
                self.searched += len(contents) * (len(values) > 30)
                self.leaks += sum(count >= LEAK for count in found)

    def start_run(self) -> None:
        """Starts the run, or continues it from its checkpoint."""
        resume = (self.server_folder.path / "server.copfl").exists()
        self.local.start_run({"session.resume": resume})

    @property
    def length(self) -> float:
        """Seconds of the shortest round: a kill within them is in a round."""
        return min(float(record["seconds"]) for record in self.server_folder.rounds())

    def kill(self, victim: str) -> bool:
        """Kills one process, and starts again what its supervisor would; False if there is none."""
        client = self.draw.randrange(3)
        pids = {
            "worker": self.with_word("copfl.federation.node.worker"),
            "node": [self.local.running[f"node-{client}"].pid],
            "server": self.with_word("flwr-serverapp"),
            "superlink": [self.local.running["superlink"].pid],
        }[victim]
        if not pids:
            return False
        self.search_messages()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.draw.choice(pids), signal.SIGKILL)
            self.kills.append((self.done() + 1, victim))
            print(
                f"{time.strftime('%H:%M:%S')} kill {len(self.kills)}, round {self.done() + 1}: {victim}",
                flush=True,
            )
        if victim == "node":
            self.local.running[f"node-{client}"].wait(10)
            self.local.start_node(f"node-{client}", self.nodes[client])
        if victim == "superlink":
            self.local.running["superlink"].wait(10)
            for pid in (*self.with_word("flower-superexec"), *self.with_word("flwr-serverapp")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # its children, as systemd does: they may wait for minutes
        if victim in ("server", "superlink"):
            self.wait(self.has_no_server, 30)
            self.local.send_signal("run", signal.SIGKILL)
            if victim == "superlink":
                self.local.start_superlink()
            self.start_run()
        return True

    def has_no_server(self) -> bool:
        """Whether no ServerApp is left; each one that is, is killed.

        Flower starts a second one for a run whose first is slow to begin, and either may be the server.
        """
        pids = self.with_word("flwr-serverapp")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    def wait(self, what: Any, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not what():
            if time.monotonic() > until:
                raise SystemExit(f"stuck in round {self.done() + 1}: {self.local.tail('run')}")
            time.sleep(0.05)

    def run(self, kills: int, minutes: float) -> None:
        """All rounds with so many kills; after these minutes it ends two rounds after the last kill."""
        no_more_kills = time.monotonic() + 60 * minutes
        with self.local:
            self.local.start_superlink()
            for client, config in enumerate(self.nodes):
                self.local.add_node(f"node-{client}", config)
            self.start_run()
            self.wait(lambda: self.done() > 0, PATIENCE)
            # Not in the last round: the next message removes the socket of a worker that was killed.
            places = [round for round in range(1, self.rounds - 2) for _ in range(MOST)]
            for due in sorted(self.draw.sample(places, kills)):
                self.wait(lambda due=due: self.done() >= due, PATIENCE)
                self.wait(lambda: sum(round == self.done() + 1 for round, _ in self.kills) < MOST, PATIENCE)
                time.sleep(self.draw.uniform(0, self.length))
                before = self.done()
                # Too few kills are an error below.
                if before >= self.rounds - 1 or time.monotonic() > no_more_kills:
                    break
                while not self.kill(self.draw.choice(VICTIMS)):
                    time.sleep(0.2)
            last = self.rounds if len(self.kills) == kills else min(self.rounds, self.done() + 2)
            self.wait(lambda: self.done() >= last, PATIENCE + 10 * self.rounds)
            if last == self.rounds:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.local.running["run"].wait(60)

    def result(self, folder: Path) -> dict[str, Any]:
        """The end compared with that of an undisturbed federation, and what is left."""
        torch.set_num_threads(1)
        settings, others = self.settings, write_nodes(digits(), folder / "undisturbed")
        records = self.server_folder.rounds()
        lost = {record["round"] - 1 for record in records if not record["clients"]}
        whole = play(
            self.config, others, folder / "undisturbed-runs", _without_sums_of(lost), stop=len(records)
        )
        assert {r["round"] - 1 for r in whole.records if not r["clients"]} == lost, "other rounds were lost"
        far = farthest(server_of(settings, self.runs), whole.server)
        for client, (config, other) in enumerate(zip(self.nodes, others, strict=True)):
            ours, theirs = (client_of(settings, c, client, len(records) - 1) for c in (config, other))
            far = max(far, farthest(ours, theirs), 0 if tree.leaves(ours) else 1)
        left = [p for p in folder.rglob("*") if p.is_socket() or p.name.endswith((".part", ".tmp"))]
        return {
            "kills": dict(Counter(victim for _, victim in self.kills)),
            "rounds": [len(records), self.rounds],
            "rounds of the kills": [round for round, _ in self.kills],
            "rounds without a sum, here and undisturbed": {
                n + 1: next(iter(records[n]["why"].values())) for n in sorted(lost)
            },
            "largest difference": far,
            "left out of other rounds": {
                r["round"]: r["why"] for r in records if r["clients"] and r["left_out"]
            },
            "started again": {r["round"]: r["notes"] for r in records if r["notes"]},
            "audit logs that are broken": [
                found.problem
                for config in self.nodes
                if (found := verified(Path(config["state-dir"]) / AUDIT)).problem
            ],
            "processes left": len(self.local.alive()),
            "sockets and temporary files left": [str(p.relative_to(folder)) for p in left],
            "databases searched": self.searched,
            "databases with personal values": self.leaks,
            "files that Flower left in TMPDIR": len(list((folder / "tmp").iterdir())),
        }


def _without_sums_of(rounds: set[int]) -> Fault:
    """Loses the answers with the shares of these rounds: they have no sum, and clients keep their earlier states."""

    def fault(_client: int, round: int, packet: Packet) -> Packet | str:
        is_lost = round in rounds and json.loads(packet.head)["kind"] == REVEALED
        return "the server ended while it added up" if is_lost else packet

    return fault


def _floats(content: bytes) -> list[Any]:
    """The content as numbers of four bytes, from each of the four first bytes."""
    return [np.frombuffer(content[n : len(content) - (len(content) - n) % 4], "<f4") for n in range(4)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=0, help="default: twice the number of kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600, help="no kill is later; the run ends then")
    parser.add_argument("--secure-aggregation", action="store_true")
    args = parser.parse_args()
    rounds = args.rounds or 2 * args.kills
    with tempfile.TemporaryDirectory() as name:
        federation = Killed(Path(name), rounds, args.seed, args.secure_aggregation)
        started = time.monotonic()
        federation.run(args.kills, args.minutes)
        minutes = (time.monotonic() - started) / 60
        result = federation.result(Path(name))
    print(json.dumps(result | {"minutes": round(minutes, 1)}, indent=1))
    is_equal = result["largest difference"] == 0 and not result["left out of other rounds"]
    is_clean = not (
        result["audit logs that are broken"]
        or result["processes left"]
        or result["sockets and temporary files left"]
        or federation.leaks
    )
    is_whole = result["rounds"] == [federation.rounds] * 2 and len(federation.kills) >= args.kills
    return 0 if is_equal and is_clean and is_whole and not result["started again"] else 1


if __name__ == "__main__":
    sys.exit(main())
