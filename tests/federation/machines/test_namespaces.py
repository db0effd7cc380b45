"""The commands of docs/tutorials/federation.md on four machines: network namespaces, each with its own folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import copfl
from copfl.federation.protocol.chained_log import verified
from tests import code_blocks
from tests.slow import slow

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

SITES = ("north", "south", "west")
HOSTS = Path("/etc/netns")  # `ip netns exec` mounts the files of a namespace over those of the machine
SERVER = "10.77.0.1"


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


class Machine:
    """A network namespace that reaches the others over one bridge, and a folder of its own."""

    def __init__(self, namespace: str, folder: Path) -> None:
        self.namespace, self.folder = namespace, folder
        folder.mkdir()

    def run(self, commands: str) -> str:
        """The output of a block of the page; programs in the background go on."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "bash", "-e", "-c", commands],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        logs = "".join(log.read_text(errors="replace")[-2000:] for log in self.folder.glob("*.log"))
        assert done.returncode == 0, f"{commands}{done.stdout[-3000:]}{done.stderr[-3000:]}{logs}"
        return done.stdout

    def end(self) -> None:
        """Ends the programs of this machine."""
        for pid in ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """The server and the sites, by name."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    with contextlib.ExitStack() as stack:
        switch = f"copfl-{os.getpid()}-switch"
        ip("netns", "add", switch)
        stack.callback(ip, "netns", "del", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        made = {}
        for n, name in enumerate(("server", *SITES), 1):
            namespace = f"copfl-{os.getpid()}-{name}"
            (HOSTS / namespace).mkdir(parents=True)
            stack.callback(shutil.rmtree, HOSTS / namespace)
            (HOSTS / namespace / "hosts").write_text(f"127.0.0.1 localhost\n{SERVER} fl.example.org\n")
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
            veth = ["type", "veth", "peer", "name", name, "netns", switch]
            ip("link", "add", "eth0", "netns", namespace, *veth)
            ip("-n", switch, "link", "set", name, "master", "bridge", "up")
            ip("-n", namespace, "address", "add", f"10.77.0.{n}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
            made[name] = Machine(namespace, tmp_path / name)
            stack.callback(made[name].end)
        yield made


@slow
def test_the_tutorial_on_four_machines(machines: dict[str, Machine], tmp_path: Path) -> None:
    """TLS, keys, signed proposals, secure aggregation and strict policies; then the server is gone."""
    text = (code_blocks.ROOT / "docs" / "tutorials" / "federation.md").read_text("utf-8")
    one_machine, several = text.split("## The same on four machines")
    session = code_blocks.Session(tmp_path)
    for block in code_blocks.blocks(one_machine):
        if block.language == "python" or block.mark.startswith("file: "):
            session.execute(block)
    prepare, admit, start, train = (block.code for block in code_blocks.blocks(several))
    use = next(block.code for block in code_blocks.blocks(one_machine) if "copfl predict" in block.code)

    server = machines["server"]
    shutil.copy(tmp_path / "contract.toml", server.folder)
    for site in SITES:
        for file in (f"{site}.csv", "contract.toml"):
            shutil.copy(tmp_path / file, machines[site].folder)
        machines[site].run(prepare.replace("north", site))
        shutil.copy(machines[site].folder / f"{site}.pub", server.folder)
    server.run(admit)
    for site in SITES:
        for name in ("ca.pem", "coordinator.pub"):
            shutil.copy(server.folder / "clinic" / "keys" / name, machines[site].folder)
        machines[site].run(start.replace("north", site))
    server.run(train)

    for site in SITES:
        assert not machines[site].run("ss --no-header --listening --tcp --udp")  # nothing connects to a node
    for machine in machines.values():
        machine.end()
    shutil.rmtree(server.folder)
    for site in SITES:
        machine = machines[site]
        log = verified(machine.folder / "state" / "audit.jsonl")
        assert not log.problem
        left = {kind for line in log.lines for kind in line["left"]}
        assert {"masked statistics", "masked update"} <= left
        assert not left & {"statistics", "categories", "update", "metrics"}
        (machine.folder / "state").rename(machine.folder / "moved")
        report = machine.run(use.replace("clinic/nodes/0/state", "moved").replace("north", site))
        assert "the model of round 5 of 5" in report
        assert len((machine.folder / "answers.csv").read_text().splitlines()) == 201
        columns = {
            column.name: column for column in copfl.load(machine.folder / "moved").description.input.columns
        }
        assert columns["ward"].categories == ("bone", "heart", "lung", "skin")
