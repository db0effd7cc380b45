"""Processes that end with their parent, however it ends; and the processes of one federation, wherever they are."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TAG = "COPFL_PROCESSES"  # the environment variable that marks all descendants of a federation
PR_SET_PDEATHSIG = 1  # of Linux' prctl

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when its parent ends, on Linux; possible between fork and exec."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


def tagged(tag: str) -> list[int]:
    """The ids of the other processes whose environment has this tag."""
    pids, entry_of_tag = set[int](), f"{TAG}={tag}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if entry_of_tag in entry.read_bytes().split(b"\0"):
                pids.add(int(entry.parent.name))
    return sorted(pids - {os.getpid()})


def start_watcher(tag: str) -> subprocess.Popen[bytes]:
    """A process that kills all processes with this tag once its stdin is closed, as this one ends."""
    command = [sys.executable, "-P", "-m", "copfl.federation.machines.processes", tag]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _watch(tag: str) -> None:
    sys.stdin.read()
    time.sleep(1)  # most end with their parent, and remove their socket
    while pids := tagged(tag):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def end(alive: Callable[[], list[int]]) -> None:
    """Waits for the end of the processes; those that remain are terminated, then killed."""
    for seconds, number in ((3, signal.SIGTERM), (8, signal.SIGKILL), (8, signal.SIGKILL)):
        deadline = time.monotonic() + seconds
        while alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


if __name__ == "__main__":
    _watch(sys.argv[1])
