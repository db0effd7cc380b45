"""Real processes, killed: minutes each, so they run where COPFL_SLOW=1 asks for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from copfl.core import tree
from copfl.errors import RunError
from copfl.federation import init, join
from copfl.federation.machines.local import follow
from copfl.federation.machines.local_federation import LocalFederation
from copfl.federation.protocol.keys import make_key
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.settings.flat import nested
from tests.federation.network import CONFIG, client_of, digits, farthest, server_of, simulated, write_nodes
from tests.slow import slow

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
pytestmark = slow


class Federation:
    """The digits on three nodes."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any] | None = None,
        *,
        secure: bool = False,
        supernode: bool = False,
    ) -> None:
        self.app, self.runs = folder / "app", folder / "app" / "runs"
        self.config = {**CONFIG, "network.deadline": 300, **(config or {})}
        self.data = digits()
        init(self.app, nested(self.config), secure=secure)
        self.nodes = write_nodes(self.data, folder / "nodes")
        self.settings = settings_of(self.config)
        self.folder = ServerFolder(str(self.runs), "test", resume=True)
        self.local = LocalFederation(self.app, secure=secure, supernode=supernode)

    def start(self) -> None:
        self.local.start_superlink()
        for client, config in enumerate(self.nodes):
            self.local.add_node(f"node-{client}", config)

    def run(self, **session: Any) -> Iterator[dict[str, Any]]:
        process = self.local.start_run({f"session.{key}": value for key, value in session.items()})
        return follow(self.local, process, self.folder, self.settings.federation.rounds, pause=0.05)

    def in_second_round(self) -> Iterator[dict[str, Any]]:
        """Starts everything; the rounds after the first, when every node trains in the second."""
        self.start()
        rounds = self.run()
        next(rounds)
        self.wait_for_training()
        return rounds

    def kill(self, name: str) -> None:
        """Kills a process and its group."""
        self.local.send_signal(name, signal.SIGKILL)
        self.local.running[name].wait(10)

    def wait_for_training(self, *clients: int) -> None:
        """Waits until these nodes (default: all) have a worker that uses its processor."""
        folders = [f"{self.nodes[client]['state-dir']}/" for client in clients or range(len(self.nodes))]
        workers = [
            pid for folder in folders for pid in self.with_word(f"copfl.federation.node.worker\0{folder}")
        ]
        assert len(workers) == len(folders)
        before = {pid: _ticks(pid) for pid in workers}
        wait_until(lambda: all(_ticks(pid) > t + 10 for pid, t in before.items()))

    def with_word(self, word: str) -> list[int]:
        """The processes of the federation that have the word in their command."""
        found = []
        for pid in self.local.alive():
            try:
                if word in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
            except OSError:
                continue
        return found

    def distance(self) -> float:
        """How far the server and the clients are from where the simulation ends."""
        state = simulated(self.settings, self.data)
        far = farthest(server_of(self.settings, self.runs), state.server)
        rows, last = state.clients.rows(torch.arange(3)), self.settings.federation.rounds - 1
        records = [client_of(self.settings, config, client, last) for client, config in enumerate(self.nodes)]
        return max([far, *(farthest(record, tree.row(rows, n)) for n, record in enumerate(records))])


def _ticks(pid: int) -> int:
    """Hundredths of a second of the process on a processor."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def wait_until(what: Callable[[], object], seconds: float = 180) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def test_certificates_and_keys(tmp_path: Path) -> None:
    """TLS and node keys: the same end. A node without a registered key gets nothing."""
    federation = Federation(tmp_path, secure=True)
    with federation.local as local:
        federation.start()
        make_key(local.keys / "unregistered")
        local.start_node("unregistered", {**federation.nodes[0], "state-dir": str(tmp_path / "unregistered")})
        records = list(federation.run())
    assert [r["clients"] for r in records] == [[0, 1, 2]] * 3
    assert federation.distance() <= 1e-5
    (told,) = [p for p in (tmp_path / "unregistered").rglob("*") if not p.is_dir()]  # no message, no record
    assert "until the coordinator has admitted" in told.read_text()
    assert 'activate-node HTTP/1.1" 412' in local.tail("superlink", 10_000)
    assert not local.alive()


def test_a_new_client_joins_a_finished_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {"run.rounds": 2})
    federation.folder = ServerFolder(str(federation.runs), "test", resume=True)
    with federation.local:
        federation.start()
        list(federation.run())
    new_client = write_nodes(digits(4), tmp_path / "others")[3]["data"]
    result = join(federation.app, new_client, run="test", updates=3)
    assert result["accuracy_after"] > result["accuracy_before"]


LONG: dict[str, Any] = {
    "algorithm.epochs": 100,
    "run.batch": 64,
}  # seconds of training: time to kill something


@pytest.mark.parametrize("supernode", [False, True])
def test_a_node_killed_in_mid_round_comes_back_with_its_state(supernode: bool, tmp_path: Path) -> None:
    """A node of copfl, and one of Flower."""
    federation = Federation(
        tmp_path, {**LONG, "run.rounds": 100, "network.min_replies": 2}, supernode=supernode
    )
    with federation.local as local:
        federation.start()
        rounds = federation.run()
        first = next(rounds)
        state = Path(federation.nodes[1]["state-dir"]) / "test"
        kept = (state / "round-000000.copfl").read_bytes()
        federation.wait_for_training(1)  # of the second round
        federation.kill("node-1")
        second = next(rounds)
        assert (state / "round-000000.copfl").read_bytes() == kept
        local.start_node("node-1", federation.nodes[1])
        third_on = list[dict[str, Any]]()
        while not third_on or third_on[-1]["clients"] != [0, 1, 2]:  # those that end while it starts
            third_on.append(next(rounds))
        last = third_on[-1]["round"] - 1
        record = client_of(federation.settings, federation.nodes[1], 1, last)
    assert first["clients"] == [0, 1, 2]
    assert second["clients"] == [0, 2]
    assert second["left_out"] == [1]
    assert not any(r["notes"] for r in third_on)  # it did not start again
    assert int(record.round) == last


def test_the_server_app_killed_in_mid_round_is_resumed(tmp_path: Path) -> None:
    federation = Federation(tmp_path, LONG)
    with federation.local:
        rounds = federation.in_second_round()
        for pid in federation.with_word("flwr-serverapp"):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunError, match="the run ended after round"):
            list(rounds)
        records = list(federation.run(resume=True))
    assert records[-1]["round"] == 3
    assert [r["round"] for r in federation.folder.rounds()] == [1, 2, 3]
    assert federation.distance() <= 1e-5


def test_the_superlink_killed_in_mid_round_is_started_again(tmp_path: Path) -> None:
    federation = Federation(tmp_path, LONG)
    with federation.local as local:
        federation.in_second_round()
        federation.kill("superlink")
        for pid in federation.with_word("flwr-serverapp"):  # its machine went down: the ServerApp with it
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not federation.with_word("flwr-serverapp"))
        federation.kill("run")
        local.start_superlink()
        records = list(federation.run(resume=True))
    assert records[-1]["round"] == 3
    assert [r["round"] for r in federation.folder.rounds()] == [1, 2, 3]
    assert federation.distance() <= 1e-5


@pytest.mark.parametrize("supernode", [False, True])
def test_killed_workers_are_started_again(supernode: bool, tmp_path: Path) -> None:
    """All three while they train, in the same round: no client is left out, and nothing is left of them."""
    federation = Federation(tmp_path, LONG, supernode=supernode)
    with federation.local as local:
        rounds = federation.in_second_round()
        for pid in federation.with_word("copfl.federation.node.worker"):
            os.kill(pid, signal.SIGKILL)
        records = list(rounds)
    assert [r["clients"] for r in records] == [[0, 1, 2]] * 2
    assert federation.distance() <= 1e-5
    assert not local.alive()
    assert not [path for path in tmp_path.rglob("*") if path.is_socket() or path.name.endswith(".part")]


def test_a_node_killed_and_started_at_once_answers_its_message(tmp_path: Path) -> None:
    federation = Federation(tmp_path, LONG, secure=True)
    with federation.local as local:
        rounds = federation.in_second_round()
        federation.kill("node-1")
        local.start_node("node-1", federation.nodes[1])
        records = list(rounds)
    assert [r["clients"] for r in records] == [[0, 1, 2]] * 2
    assert records[0]["seconds"] < 60  # neither its deadline of 300 nor the 180 that Flower waits for a part
    assert federation.distance() <= 1e-5


def test_runs_one_after_another_on_the_same_nodes(tmp_path: Path) -> None:
    federation = Federation(tmp_path, {"run.rounds": 2})
    with federation.local:
        federation.start()
        first = list(federation.run())
        federation.folder = ServerFolder(str(federation.runs), "second", resume=True)
        second = list(federation.run(run="second"))
    assert [r["clients"] for r in first + second] == [[0, 1, 2]] * 4
    assert [r["mean"]["accuracy"] for r in first] == [r["mean"]["accuracy"] for r in second]


@pytest.mark.parametrize("how", [[], ["--secure-aggregation"]], ids=["plain", "secure"])
def test_kills_at_random_moments(how: list[str]) -> None:
    """Fifty in all: the undisturbed end, or who was left out when; nothing left, nothing personal in messages."""
    script = Path(__file__).parents[3] / "benchmarks" / "flower_kills.py"
    command = [sys.executable, str(script), "--kills", "25", "--rounds", "28", *how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
