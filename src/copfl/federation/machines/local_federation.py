"""The processes of a federation on this machine: a SuperLink, a SuperNode per client, and runs.

All of them end with the context, however it ends: `processes` sees to it.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from copfl.errors import RunError, raised_as
from copfl.federation.machines.deployed import (
    as_text,
    flower_environment,
    new_name,
    superlink_options,
    write_connection,
)
from copfl.federation.machines.processes import TAG, end, end_with_parent, start_watcher, tagged
from copfl.federation.operations.watched import answers
from copfl.federation.policy.file import FILE, VARIABLE, write_policy
from copfl.federation.policy.record import Policy, ProposalRules
from copfl.federation.protocol.app_folder import LOCAL_HOME, read_app
from copfl.federation.protocol.keys import fingerprint, make_key, read_key
from copfl.federation.protocol.proposal import KEY
from copfl.federation.server.certificates import make_certificates
from copfl.federation.server.membership import (
    COORDINATOR,
    make_coordinator,
    make_member_keys,
    propose,
    read_roster,
)
from copfl.files import Busy, locked
from copfl.settings.flat import flattened, nested

HOST = "127.0.0.1"
# In the app's folder, which may be somebody else's: a file json.py there must not take the place of Python's.
PYTHON = (sys.executable, "-P", "-m")
LOG_ATTEMPTS = 5  # to open the log of a run again
LAST_TAG = "tag"  # in LOCAL_HOME: the tag of the last federation in this folder


class LocalFederation:
    """The processes of a federation on this machine; all of them end with the context."""

    def __init__(
        self, folder: Path, *, secure: bool = False, supernode: bool = False, policy: Policy | None = None
    ) -> None:
        self.folder, self.secure = folder.resolve(), secure
        # An app for several machines has no private keys here: its trial has members of its own.
        is_trial = (self.folder / "keys" / COORDINATOR).exists()
        self.home = self.folder if is_trial else self.folder / LOCAL_HOME
        if not (self.home / "keys" / COORDINATOR).exists():
            make_coordinator(self.home, self.home / "keys")
        self.coordinator = read_key(self.home / "keys" / COORDINATOR)
        # The server and the nodes have one owner here, and one policy.
        allowed = Policy(rollback=True, proposals=ProposalRules(members="any")) if policy is None else policy
        agreed = dataclasses.replace(allowed.proposals, coordinators=(fingerprint(self.coordinator.public),))
        self.policy = write_policy(
            self.folder / LOCAL_HOME / FILE, dataclasses.replace(allowed, proposals=agreed)
        )
        self.supernode = supernode  # Flower's own nodes instead of copfl's
        self.keys, self.logs, self.tag = self.folder / "keys", self.folder / "logs", secrets.token_hex(8)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.log_begins: dict[str, int] = {}  # where in its log the last start of a program is
        self.port = _free_port()
        self._stack = contextlib.ExitStack()
        environment = {
            **flower_environment(self.folder / LOCAL_HOME),
            # A new client's custom data may be a module of the current folder.
            "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH")))),
            TAG: self.tag,
            VARIABLE: str(self.policy),
        }
        self.options: dict[str, Any] = {
            "cwd": self.folder,
            "env": environment,
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
        }
        self.logs.mkdir(parents=True, exist_ok=True)
        if secure and not (self.keys / "ca.pem").exists():
            make_certificates(self.keys, HOST)

    def __enter__(self) -> Self:
        """Locks the folder, and ends the processes that a killed federation left in it."""
        home = self.folder / LOCAL_HOME
        home.mkdir(parents=True, exist_ok=True)
        busy = f"a federation is running in {self.folder}; wait for it, or end it first"
        with raised_as(Busy, busy, Busy):
            self._stack.enter_context(locked(home / "lock"))
        with contextlib.suppress(OSError):
            end(partial(tagged, (home / LAST_TAG).read_text()))
        (home / LAST_TAG).write_text(self.tag)
        self._stack.enter_context(start_watcher(self.tag))  # its end closes the watcher's stdin
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            for name in self.running:
                self.send_signal(name, signal.SIGTERM)
            end(self.alive)
            for process in self.running.values():
                process.wait(10)

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a program in its own group, with its output in logs/NAME.log.

        Args:
            name: Of the program here, and of its log.
            command: The program and its arguments.
        """
        with open(self.logs / f"{name}.log", "ab") as log:
            self.log_begins[name] = log.tell()
            process = subprocess.Popen(
                command,
                stdout=log,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
                **self.options,
            )
        self.running[name] = process
        return process

    def call(self, command: Sequence[str], seconds: float = 120) -> str:
        """The output of a program that ends by itself; RunError if it fails.

        Args:
            command: The program and its arguments.
            seconds: How long it may take.
        """
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds, **self.options)
        text: str = done.stdout.decode(errors="replace")
        if done.returncode:
            raise RunError(f"`{' '.join(command)}` failed: {text.strip()[-2000:]}")
        return text

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a program and its group.

        Args:
            name: Of the program here.
            number: The signal.
        """
        process = self.running[name]
        if process.poll() is None:
            os.killpg(process.pid, number)

    def alive(self) -> list[int]:
        """The ids of the running processes with this tag: those started here, and their descendants."""
        return tagged(self.tag)

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of a program's log.

        Args:
            name: Of the program here.
            lines: At most so many.
        """
        path = self.logs / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def reason(self) -> str:
        """Why the run ended: copfl's last error in its log, or the end of the log; and where the logs are."""
        with open(self.logs / "run.log", "rb") as log:
            log.seek(self.log_begins["run"])
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line.partition("copfl: ")[2] for line in lines if "ERROR" in line and "copfl: " in line]
        return f"{errors[-1] if errors else self.tail('run')}; the logs are in {self.logs}"

    def start_superlink(self) -> None:
        """Starts the SuperLink; started again, it continues with the same database."""
        write_connection(self.folder, HOST, self.port, self.secure, LOCAL_HOME)
        options = superlink_options(HOST, self.port, f"{LOCAL_HOME}/{self.port}.db", secure=self.secure)
        process = self.start("superlink", [*PYTHON, "copfl.federation.machines.superlink", *options])
        deadline = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < deadline:
            if answers(HOST, self.port):
                return
            time.sleep(0.3)
        raise RunError(f"the SuperLink did not start: {self.tail('superlink')}")

    def add_node(self, name: str, node_config: Mapping[str, Any]) -> None:
        """Registers a node, with a new key if it has none, and starts it.

        Args:
            name: Of the node here, and of the file of its key.
            node_config: What its owner sets.
        """
        if self.secure:
            self.call(["flwr", "supernode", "register", f"{self._key(name)}.pub", "copfl"])
        self.start_node(name, node_config)

    def _key(self, name: str) -> Path:
        """The file of a node's key, which is made if there is none."""
        path = self.home / "keys" / name
        if not path.exists():
            make_key(path)
        return path

    def start_node(self, name: str, node_config: Mapping[str, Any]) -> None:
        """Starts a node; a second start is the node's return.

        Args:
            name: Of the node here, and of the file of its key.
            node_config: What its owner sets.
        """
        key = self._key(name)
        node_config = {"policy": str(self.policy), "key": str(key), **node_config}
        if self.supernode:
            program = f"flower-supernode --superlink {HOST}:{self.port} --host {HOST} --port {_free_port()}"
            keys = ["--root-certificates", "keys/ca.pem", "--auth-supernode-private-key", str(key)]
            options = [*program.split(), *(keys if self.secure else ["--insecure"])]
            self.start(name, [*options, "--node-config", as_text(node_config)])
            return
        command = [*PYTHON, "copfl", "site", "node", "--superlink", f"{HOST}:{self.port}"]
        keys = ["--root-certificates", "keys/ca.pem", "--key", str(key)] if self.secure else []
        settings = [f"--set={key}={json.dumps(value)}" for key, value in node_config.items()]
        self.start(name, [*command, *keys, *settings])

    def start_run(self, config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Submits the app to the SuperLink; the process writes the run's log and ends with the run."""
        settings = {**flattened(nested(read_app(self.folder)["config"])), **config}
        make_member_keys(self.home, int(settings["run.clients"]))
        named = {**config, "session.run": settings.get("session.run") or new_name()}
        signed = propose(self.folder, named, self.coordinator, read_roster(self.home))
        run_config = as_text({**named, KEY: signed.text})
        return self.start("run", ["flwr", "run", ".", "copfl", "--stream", "-c", run_config])

    def runs(self) -> list[dict[str, Any]]:
        """The runs as Flower lists them."""
        text = self.call(["flwr", "list", "copfl", "--format", "json"])
        return list(json.loads(text[text.index("{") :])["runs"])

    def reopen_log(self, pause: float = 1.0) -> subprocess.Popen[bytes] | None:
        """The log of the run if it continues: `flwr run` ends when its connection to the SuperLink breaks."""
        for _ in range(LOG_ATTEMPTS):
            time.sleep(pause)
            with contextlib.suppress(RunError, ValueError, subprocess.TimeoutExpired):  # still no connection
                active = [run["run-id"] for run in self.runs() if not run["status"].startswith("finished")]
                if not active:
                    return None
                return self.start("run", ["flwr", "log", active[0], "copfl", "--stream"])
        return None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
