"""docs/tutorials/federation.md and join.md on five machines: network namespaces, each with its own user and folder.

Every command is typed into a terminal as its page has it, and the questions are answered as people would: words that
one screen shows are typed at the other.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from copfl.federation.protocol.chained_log import verified
from tests import code_blocks
from tests.slow import slow

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

SITES = ("cleveland", "hungary", "longbeach", "switzerland")
HOSTS = Path("/etc/netns")  # `ip netns exec` mounts the files of a namespace over those of the machine
SERVER = "10.77.0.1"
FIRST_USER = 20_000  # numbers of users that this machine does not know
PATIENCE = 900.0  # seconds that a program may take to say something


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def opened() -> str:
    """Commands by which Python is open to all users of a namespace, also where it lies in the home of one.

    The mounts are those of one command: `ip netns exec` gives it a table of its own.
    """
    base = Path(sys.base_prefix).resolve()
    closed = next(
        (folder for folder in reversed(base.parents) if not folder.stat().st_mode & stat.S_IXOTH), None
    )
    if closed is None:
        return ""
    return (
        f"mount --bind {base} /mnt; mount -t tmpfs -o mode=755 none {closed}; "
        f"mkdir -p {base}; mount --bind /mnt {base}"
    )


class Machine:
    """A network namespace that reaches the others over one bridge, with a user and a folder of its own."""

    def __init__(self, namespace: str, folder: Path, user: int) -> None:
        self.namespace, self.folder, self.user = namespace, folder, user
        folder.mkdir(mode=0o700)
        os.chown(folder, user, user)
        self.terminals: list[Terminal] = []

    @property
    def attention(self) -> Attention:
        """What its person did."""
        typed = [line for terminal in self.terminals for line in terminal.command.splitlines()]
        return Attention(
            sum(line.startswith("copfl ") for line in typed),
            sum(terminal.answers for terminal in self.terminals),
            sum(terminal.attended for terminal in self.terminals),
        )

    def receive(self, file: Path) -> None:
        """A file that somebody sent."""
        shutil.copy(file, self.folder)
        os.chown(self.folder / file.name, self.user, self.user)

    def type(self, command: str) -> Terminal:
        """A terminal in which a person types the command."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        user = f"setpriv --reuid={self.user} --regid={self.user} --clear-groups bash -e -c {shlex.quote(command)}"
        words = ["ip", "netns", "exec", self.namespace, "bash", "-e", "-c", f"{opened()}\nexec {user}"]
        self.terminals.append(Terminal(command, words, self.folder, own))
        return self.terminals[-1]

    def run(self, command: str) -> str:
        """What a command says that ends by itself."""
        return self.type(command).ended()

    def end(self) -> None:
        """Ends the programs of this machine."""
        for pid in ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for terminal in self.terminals:
            terminal.process.wait(60)


class Attention(NamedTuple):
    """What a person does, who answers at once."""

    commands: int
    answers: int
    seconds: float  # from a command to its last question, its words to read out, or its end

    def since(self, before: Attention) -> Attention:
        return Attention(
            self.commands - before.commands, self.answers - before.answers, self.seconds - before.seconds
        )


class Terminal:
    """A program and the person in front of it."""

    def __init__(self, command: str, words: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.command, self.answers, self.attended = command, 0, 0.0
        self.began, self.chunks = time.monotonic(), list[tuple[int, float]]()
        self.handle, inner = pty.openpty()
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            start_new_session=True,
            stdin=inner,
            stdout=inner,
            stderr=inner,
        )
        os.close(inner)
        self.shown = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        """Reads to the end: a program whose terminal is full would wait."""
        with contextlib.suppress(OSError):  # the program has ended
            while content := os.read(self.handle, 65536):
                text = content.decode(errors="replace").replace("\r", "")
                self.chunks.append((len(self.shown) + len(text), time.monotonic() - self.began))
                self.shown += text
        os.close(self.handle)

    def sees(self, pattern: str) -> str:
        """Waits until the pattern is on the screen; its first group."""
        until = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.shown)):
            is_there = self.reader.is_alive() and time.monotonic() < until
            assert is_there, f"no {pattern!r} in {self.shown[-3000:]}"
            time.sleep(0.2)
        shown_at = next(at for length, at in self.chunks if length >= found.end())
        self.attended = max(self.attended, shown_at)
        return found[1] if found.re.groups else found[0]

    def answer(self, pattern: str, text: str) -> None:
        self.sees(pattern)
        self.answers += 1
        os.write(self.handle, f"{text}\n".encode())

    def ended(self) -> str:
        assert self.process.wait(PATIENCE) == 0, self.shown[-3000:]
        self.reader.join(30)
        self.attended = time.monotonic() - self.began
        return self.shown


def assert_took(table: str, rows: dict[str, list[Attention]]) -> None:
    """The page's table has these numbers of commands and answers; its seconds are those of one run."""
    for who, people in rows.items():
        fastest, slowest = (round(order(person.seconds for person in people)) for order in (min, max))
        seconds = f"{fastest} to {slowest}" if len(people) > 1 else f"{slowest}"
        print(f"| {who} | {people[0].commands} | {people[0].answers} | {seconds} |")
        (counted,) = {person[:2] for person in people}
        row = re.search(rf"^\| {who} \| (\d+) \| (\d+) \| \d", table, re.MULTILINE)
        assert row is not None, who
        assert (int(row[1]), int(row[2])) == counted, who


def assert_said(transcript: str, shown: str) -> None:
    """Every line of a page's transcript was on the screen, with these or other numbers, keys and folders."""

    def plain(text: str) -> str:
        return re.sub(r"\b[0-9a-f]{4}(-[0-9a-f]{4})+|\S*/(?=\w+\.csv)|[+-]?\d[\d.]*", "", text)

    missing = [line for line in transcript.splitlines() if plain(line) not in plain(shown)]
    assert not missing, shown


@pytest.fixture
def machines() -> Iterator[dict[str, Machine]]:
    """The server and the sites, by name."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("setpriv") is None:
        pytest.skip("network namespaces need root, iproute2 and setpriv")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="copfl-")))
        folder.chmod(0o755)  # each machine's user opens its own folder in it
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
            made[name] = Machine(namespace, folder / name, FIRST_USER + n)
            stack.callback(made[name].end)
        yield made


@slow
@pytest.mark.timeout(3600)
def test_four_hospitals_and_a_coordinator(machines: dict[str, Machine], tmp_path: Path) -> None:
    """TLS, keys, signed proposals, secure sums and strict policies; then the server is gone."""
    page = (code_blocks.ROOT / "docs" / "tutorials" / "federation.md").read_text("utf-8")
    several = page.partition("## Four hospitals, each on its own machine")[2]
    session = code_blocks.Session(tmp_path)
    for block in code_blocks.blocks(several):
        if block.is_executed:
            session.execute(block)
    create, serve, join, admit, train, approve, use = (
        b.code for b in code_blocks.blocks(several) if b.skipped
    )
    own_page = (code_blocks.ROOT / "docs" / "tutorials" / "join.md").read_text("utf-8")
    check, *same = (b.code for b in code_blocks.blocks(own_page) if b.skipped)
    assert check == "copfl site check cleveland.invite --data cleveland.csv\n"  # tests/cli/site runs it
    assert same == [join, approve, use]  # the site's page is the same

    consent, conclusion = (b.code for b in code_blocks.blocks(own_page) if b.language == "text")
    server = machines["server"]
    server.receive(tmp_path / "heart.toml")
    said = server.run(create)
    serving = server.type(serve)
    serving.sees("Uvicorn running")
    nodes, members = {}, list[str]()
    for site in SITES:
        machine = machines[site]
        machine.receive(tmp_path / f"{site}.csv")
        machine.receive(server.folder / "clinic" / "invitations" / f"{site}.invite")
        nodes[site] = node = machine.type(join.replace("cleveland", site))
        words = re.search(rf"{site}: send .*?read out: ([a-z ]+)", said, re.DOTALL)
        assert words is not None
        node.answer("words of your invitation that it reads out:", words[1])  # on the telephone
        node.answer(r"Take part\?", "y")
        if site == "cleveland":
            assert_said(consent, node.shown)
    for line in admit.splitlines():
        site = line.split()[-1]
        heard = nodes[site].sees(r"in the same call:  ([a-z ]+)\n")  # the answer has arrived
        admission = server.type(line)
        admission.answer("reads out by telephone:", heard)
        said = admission.ended()
    assert "All sites are there. Train: copfl federate run clinic" in said
    coordinator = server.attention
    training = server.type(train)
    for site in SITES:
        nodes[site].sees("a proposal waits for you: copfl site approve")
        approval = machines[site].type(approve.replace("cleveland", site))
        members.append(approval.sees(r"all members  ([0-9a-f-]+)"))
        approval.answer("read out the same fingerprint", "y")
        approval.ended()
    assert len(set(members)) == 1
    said = training.ended()
    coordinator = coordinator._replace(commands=server.attention.commands)
    assert "the contract is agreed" in said
    assert serving.process.poll() is None

    for site in SITES:  # nothing connects to a node
        assert not subprocess.run(
            ["ip", "netns", "exec", machines[site].namespace, "ss", "--no-header", "-l", "-t", "-u"],
            capture_output=True,
        ).stdout
    for machine in machines.values():
        machine.end()
    joined = {site: machines[site].attention for site in SITES}
    shutil.rmtree(server.folder)
    for site in SITES:
        machine = machines[site]
        log = verified(machine.folder / site / "audit.jsonl")
        assert not log.problem
        left = {kind for line in log.lines for kind in line["left"]}
        assert {"masked statistics", "masked update"} <= left
        assert not left & {"statistics", "categories", "update", "metrics"}
        report = machine.run(use.replace("cleveland", site))
        assert "the model of round 3 of 3" in report
        if site == "cleveland":
            assert_said(conclusion, report)
        rows = (tmp_path / f"{site}.csv").read_text().count("\n")
        assert (machine.folder / "answers.csv").read_text().count("\n") == rows
        assert (
            len(machine.terminals) == 3
        )  # one block to join, one to approve, one for its report and predictions
    at_the_end = [machines[site].attention.since(joined[site]) for site in SITES]
    assert_took(
        several,
        {
            "each hospital, to join and to compare the members": list(joined.values()),
            "each hospital, report and predictions": at_the_end,
            "the coordinator": [coordinator],
        },
    )
