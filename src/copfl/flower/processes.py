"""Processes that end with us: each in its own group, and whatever they start found by a mark in its environment."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from copfl.errors import RunError

MARK = "COPFL_TRIAL"


class Processes:
    """A context in which programs of this Python's environment run; when it ends, all of them do."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs, self.mark = logs, secrets.token_hex(8)
        programs = str(Path(sys.executable).parent)
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower starts its own programs by name
        self.environment = {**os.environ, "PATH": path, MARK: self.mark, **environment}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self.running)):
            self.end(name, wait=0)
        # What put itself into a group of its own ends when its parent does; what does not is ended, and then killed.
        for seconds, number in ((3, signal.SIGTERM), (8, signal.SIGKILL), (8, signal.SIGKILL)):
            until = time.monotonic() + seconds
            while self.left() and time.monotonic() < until:
                for process in self.running.values():
                    process.poll()
                time.sleep(0.1)
            for pid in self.left():
                _signal(pid, number)
        for process in self.running.values():
            process.wait(10)

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a program, its output in logs/NAME.log."""
        with open(self.logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
        self.running[name] = process
        return process

    def call(self, name: str, command: Sequence[str], seconds: float = 120) -> str:
        """The output of a program that ends by itself and well."""
        done = subprocess.run(
            command,
            capture_output=True,
            env=self.environment,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        text = (done.stdout + done.stderr).decode(errors="replace")
        if done.returncode:
            raise RunError(f"{name} failed: {text.strip()[-2000:]}")
        return text

    def end(self, name: str, kill: bool = False, wait: float = 10) -> None:
        """Ends a program and its group."""
        process = self.running[name]
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        if wait:
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(wait)

    def left(self) -> list[int]:
        """The processes that carry our mark: what we started, and what that started."""
        found, wanted = [], f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                pid = int(entry.parent.name)
                if pid != os.getpid() and wanted in entry.read_bytes().split(b"\0"):
                    found.append(pid)
            except OSError:  # gone, or not ours
                continue
        return found

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of a program's log."""
        path = self.logs / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = 90) -> bool:
    """Whether somebody listens there before the time is up and while the process lives."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as one:
            one.settimeout(1)
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.3)
    return False
