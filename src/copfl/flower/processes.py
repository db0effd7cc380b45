"""Processes that end together: each has its own group, and all descendants share a tag."""

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
from typing import Any, Self

from copfl.errors import RunError

TAG = "COPFL_PROCESSES"


class Processes:
    """A context that runs programs of this Python environment in a folder; all of them end when it does."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.logs, self.tag = folder / "logs", secrets.token_hex(8)
        programs = str(Path(sys.executable).parent)
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower starts its programs by name
        self.options: dict[str, Any] = {
            "cwd": folder,
            "env": {**os.environ, "PATH": path, TAG: self.tag, **environment},
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.running:
            self.send_signal(name, signal.SIGTERM)
        # A descendant in a group of its own usually ends with its parent; else it is terminated, then killed.
        for seconds, number in ((3, signal.SIGTERM), (8, signal.SIGKILL), (8, signal.SIGKILL)):
            deadline = time.monotonic() + seconds
            while self.alive() and time.monotonic() < deadline:
                time.sleep(0.1)
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for process in self.running.values():
            process.wait(10)

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a program in its own group, with its output in logs/NAME.log."""
        with open(self.logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, start_new_session=True, **self.options)
        self.running[name] = process
        return process

    def call(self, command: Sequence[str], seconds: float = 120) -> str:
        """The output of a program that ends by itself; RunError if it fails."""
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds, **self.options)
        text: str = done.stdout.decode(errors="replace")
        if done.returncode:
            raise RunError(f"`{' '.join(command)}` failed: {text.strip()[-2000:]}")
        return text

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a program and its group."""
        process = self.running[name]
        if process.poll() is None:
            os.killpg(process.pid, number)

    def alive(self) -> list[int]:
        """The ids of the running processes with this tag: those started here, and their descendants."""
        pids, tag = [], f"{TAG}={self.tag}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if tag in entry.read_bytes().split(b"\0"):
                    pids.append(int(entry.parent.name))
        return [pid for pid in pids if pid != os.getpid()]

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of a program's log."""
        path = self.logs / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def free_port() -> int:
    """A port of this machine that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = 90) -> bool:
    """Whether the port accepts connections before the time is up, while the process runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as client:
            client.settimeout(1)
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.3)
    return False
