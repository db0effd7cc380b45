"""docs/year.md with real processes: a federation whose sites are away, sleep, are upgraded and leave.

The coordinator, its server and three sites are processes of this machine, and every command is one that people type.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

import copfl
from copfl.data.contract.contract import Contract
from copfl.data.contract.file import write_contract
from copfl.federation.protocol.chained_log import verified
from tests.federation.invited import SITES, TABLE, invitation_in, write_rows
from tests.slow import slow

PATIENCE = 1200.0  # seconds that a program may take to say something
DEADLINE = 90  # of a round; on a busy machine the first message waits half a minute for the node's worker
UNAVAILABLE = 70.0  # seconds of silence after which Flower takes a node for gone


class Program:
    """A command that runs, and what it says."""

    def __init__(self, folder: Path, log: Path, *words: object, source: Path | None = None) -> None:
        path = {} if source is None else {"PYTHONPATH": str(source)}
        self.log, self.start = log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "copfl", *map(str, words)],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self.start)
            return log.read().decode(errors="replace")

    def says(self, pattern: str) -> str:
        """Waits until it has said this; the first group of the pattern."""
        until = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.said)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.said[-3000:]}"
            assert self.process.poll() is None, f"it ended without {pattern!r}: {self.said[-3000:]}"
            time.sleep(0.2)
        return found[1] if found.re.groups else found[0]

    def ended(self) -> str:
        assert self.process.wait(PATIENCE) == 0, self.said[-3000:]
        return self.said

    def send(self, number: int) -> None:
        """Sends a signal to the program and to its workers, as closing a laptop does."""
        for pid in (self.process.pid, *children(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, number: int = signal.SIGTERM) -> None:
        self.send(number)
        self.process.wait(60)


def children(parent: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True).stdout.split()
    return [pid for child in map(int, found) for pid in (child, *children(child))]


class Clinic:
    """A coordinator's folder with its server, and sites that have joined and are admitted."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, rounds: int) -> None:
        self.folder, self.stack, self.app = folder, stack, folder / "clinic"
        self.nodes: dict[str, Program] = {}
        write_contract(folder / "contract.toml", Contract.of_table(TABLE))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        invited = [word for site in SITES for word in ("--invite", site)]
        settings = ["--set", f"network.deadline={DEADLINE}", "--secure-aggregation", "--rounds", rounds]
        model = ["--algorithm", "fedavg", "--model", "linear", "--lr", "0.1"]
        where = ["--contract", "contract.toml", "--port", port]
        self.call("federate", "init", "clinic", *where, *invited, *settings, *model)
        self.server = self.program("server", "federate", "server", "clinic")
        for site in SITES:
            (folder / site).mkdir()
            write_rows(folder / site / "rows.csv")
            shutil.copy(self.app / "invitations" / f"{site}.invite", folder / site)
            words = ["--words", invitation_in(self.app, site).words, "--yes"]
            joining = ["join", f"{site}.invite", "--data", "rows.csv", *words]
            self.nodes[site] = node = self.program(site, "site", *joining, folder=folder / site)
            own = node.says(r"in the same call:  ([a-z ]+)\n")
            self.call("federate", "admit", "clinic", site, "--words", own)
        self.call("federate", "propose", "clinic", "members.json")
        for site in SITES:  # their owners compare the members before the first run
            self.call("site", "approve", f"{site}/{site}", "members.json", "--yes")

    def program(
        self, name: str, *words: object, folder: Path | None = None, source: Path | None = None
    ) -> Program:
        started = Program(folder or self.folder, self.folder / f"{name}.log", *words, source=source)
        self.stack.callback(started.end, signal.SIGKILL)
        return started

    def call(self, *words: object) -> str:
        return self.program("commands", *words).ended()

    def train(self, name: str, *words: object) -> Program:
        return self.program("runs", "federate", "run", "clinic", "--run", name, *words)

    def start(self, site: str, source: Path | None = None) -> Program:
        """The node of a site, after a restart of its machine."""
        self.nodes[site] = self.program(site, "site", "start", site, folder=self.folder / site, source=source)
        return self.nodes[site]

    def left(self, site: str) -> set[str]:
        """The kinds of what has left a site."""
        log = verified(self.folder / site / site / "audit.jsonl")
        assert not log.problem
        return {kind for line in log.lines for kind in line["left"]}


@pytest.fixture
def clinic(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Clinic]:
    with contextlib.ExitStack() as stack:
        yield Clinic(tmp_path, stack, request.param)


def another_version(folder: Path) -> Path:
    """The source of copfl, as the version after this one."""
    shutil.copytree(
        Path(copfl.__file__).parent, folder / "copfl", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = folder / "copfl" / "__init__.py"
    file.write_text(file.read_text().replace(f'"{copfl.__version__}"', '"99.0.0"'))
    return folder


@slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("clinic", [2], indirect=True)
def test_sites_that_are_away_sleep_and_are_upgraded(clinic: Clinic) -> None:
    """Nothing is lost, and no other site does anything."""
    assert "2 of 2" in clinic.train("first").ended()

    clinic.nodes["south"].end()  # away, and the others wait for longer than a round may take
    run = clinic.train("second")
    run.says(r"round 1 waits: 2 of the 3 clients it needs; not connected: 1 \(south\)")
    time.sleep(DEADLINE + 5)
    clinic.start("south")
    assert "2 of 2" in run.ended()

    run = clinic.train("third")  # a laptop sleeps in the middle of a round
    run.says(r"client 2 \(west\) connected")
    clinic.nodes["west"].send(signal.SIGSTOP)
    run.says("round [12] begins again with fresh keys: 2 clients answered")
    assert "phase" in run.said
    time.sleep(UNAVAILABLE)
    clinic.nodes["west"].send(signal.SIGCONT)
    assert "2 of 2" in run.ended()

    run = clinic.train("fourth")  # one site is upgraded, in the middle of a run
    run.says("round +1 ")
    clinic.nodes["north"].end()
    clinic.start("north", another_version(clinic.folder / "newer"))
    assert "2 of 2" in run.ended()
    assert (
        '"copfl": "99.0.0"'
        in next((clinic.folder / "north" / "north" / "fourth").glob("model/bundle.json")).read_text()
    )

    for site in SITES:
        assert "masked update" in clinic.left(site)
        assert not clinic.left(site) & {"update", "metrics"}


@slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("clinic", [100], indirect=True)
def test_a_server_that_ends_and_a_site_that_is_revoked_in_the_middle(clinic: Clinic) -> None:
    run = clinic.train("first")
    run.says("round +2 ")
    clinic.server.end(signal.SIGKILL)
    run.process.wait(PATIENCE)
    clinic.server = clinic.program("server", "federate", "server", "clinic")
    clinic.server.says("Uvicorn running")
    run = clinic.train("first", "--resume")
    run.says("round +[3-9] ")

    clinic.call("federate", "revoke", "clinic", "west")
    run.says(r"the key of west is revoked|client 2 \(west\) disconnected")
    clinic.nodes["west"].says("the coordinator has taken it out, or has another server; telephone it")
    assert clinic.nodes["west"].process.poll() is None
    assert run.process.poll() is None  # it waits: a sum over others is another question to the sites
    clinic.call("federate", "invite", "clinic", "west")
