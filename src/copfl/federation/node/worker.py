"""A resident process per node: torch, the samples and the model are loaded once, not for every message.

The caller imports no torch. It sends a request through a Unix socket in `state-dir/.worker`, a folder that
only this user can open, and starts the worker if none listens. The worker ends with its node, after an idle
hour, or above its limit of memory; the next request starts another. What a kill leaves is what a kill of the
process per message left: the client's records are files that appear by rename.
"""

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import NoReturn

from copfl.errors import RunError
from copfl.experiment.process import ENVIRONMENT
from copfl.federation.node.node import Accepted, NodeAnswer
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol.files import private_folder
from copfl.federation.protocol.messages import Content
from copfl.federation.protocol.node_config import WORKER

MEMORY_INTERVAL = 0.1  # seconds between two looks at the worker's memory
IDLE_TIMEOUT = 3600.0  # seconds without a request after which the worker ends


SOCKET = "socket"  # in the worker's folder
TOO_LARGE = "too-large"  # a file beside the socket: the last worker ended above its memory
ATTEMPTS = 3  # a worker may be killed
_started: list[subprocess.Popen[bytes]] = []  # the last worker that this process started

# -- the caller ----------------------------------------------------------------------------------------------


def call(accepted: Accepted, kind: str, content: Content, process: int) -> NodeAnswer:
    """The worker's answer to a message.

    Args:
        accepted: The node, and what it trains on.
        kind: Of the message.
        content: Of the message.
        process: The id of the process with which the worker ends.
    """
    bounds, folder = accepted.node.policy.bounds, private_folder(accepted.node.folder / WORKER)
    for _ in range(ATTEMPTS):
        started = time.monotonic()
        try:
            with _connection(folder, process) as worker:
                for text in (accepted.to_json(), kind.encode(), content[0].encode(), content[1]):
                    worker.send_bytes(text)
                reply = worker.recv_bytes().decode(), worker.recv_bytes()
                return NodeAnswer(reply, json.loads(worker.recv_bytes()))
        except (OSError, EOFError):  # it ended before it answered
            if time.monotonic() - started >= bounds.seconds:
                raise PolicyError((Refusal("bounds.seconds", "it took too long"),), "request") from None
            if (folder / TOO_LARGE).exists():
                (folder / TOO_LARGE).unlink()
                raise PolicyError((Refusal("bounds.memory", "it took too much memory"),), "request") from None
            time.sleep(0.05)
    raise RunError(f"its worker process ended {ATTEMPTS} times before it answered; see the node's log")


def _connection(folder: Path, process: int) -> Connection:
    """A connection to the worker, which is started if it does not listen. Two callers start one worker."""
    with _opened(folder) as (handle, short):
        with contextlib.suppress(ConnectionError, FileNotFoundError):
            return Client(f"{short}/{SOCKET}")
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the handle is closed
        with contextlib.suppress(ConnectionError, FileNotFoundError):
            return Client(f"{short}/{SOCKET}")
        (folder / SOCKET).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            # The worker inherits the socket: requests wait in it while the worker starts.
            listener.bind(f"{short}/{SOCKET}")
            listener.listen()
            number = str(listener.fileno())
            command = [
                sys.executable,
                "-P",  # a file random.py in this folder must not take the place of Python's
                "-m",
                "copfl.federation.node.worker",
                str(folder),
                number,
                str(process),
            ]
            worker = subprocess.Popen(
                command,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                env=ENVIRONMENT | os.environ,  # a ClientApp that Flower starts has none of these
            )
            for ended in _started:
                ended.poll()  # else it stays in the list of processes
            _started[:] = [worker, *(other for other in _started if other.returncode is None)]
            return Client(f"{short}/{SOCKET}")


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[tuple[int, str]]:
    """A handle of the folder, and a path by which a socket in it has a short address: at most 107 bytes."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle, f"/proc/self/fd/{handle}" if sys.platform == "linux" else str(folder)
    finally:
        os.close(handle)


# -- the worker ----------------------------------------------------------------------------------------------


class Worker:
    """The process that answers, one request at a time."""

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self.folder, self.listener = folder, listener
        self.inode = (folder / SOCKET).lstat().st_ino
        self.most_memory = math.inf  # bytes, of the present request

    def end(self) -> NoReturn:
        """Removes the socket, unless another worker has replaced it, and ends this process at once."""
        with contextlib.suppress(OSError):
            if (self.folder / SOCKET).lstat().st_ino == self.inode:
                (self.folder / SOCKET).unlink()
        os._exit(0)  # from any thread, and while torch computes

    def end_with(self, node: int) -> None:
        """Waits for the end of the node's process, and ends this one."""
        try:
            handle = os.pidfd_open(node)
            select.select([handle], [], [])
        except (AttributeError, OSError):  # there is no pidfd here, or no such process
            with contextlib.suppress(OSError):
                while True:
                    os.kill(node, 0)  # an error if it has ended
                    time.sleep(1)
        self.end()

    def end_above_memory(self) -> None:
        """Ends this process if it has more memory than the present request may take."""
        from copfl.federation.node.resident import resident_memory

        if resident_memory() > self.most_memory:
            (self.folder / TOO_LARGE).touch()
            self.end()

    def watch_memory(self) -> NoReturn:
        """Ends this process as soon as a request takes too much memory."""
        while True:
            self.end_above_memory()
            time.sleep(MEMORY_INTERVAL)

    def serve(self) -> NoReturn:
        """Answers until there is a reason to end."""
        from copfl.federation.node.resident import Resident, resident_memory

        resident = Resident()
        self.listener.settimeout(IDLE_TIMEOUT)
        memory = math.inf
        while True:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                self.end()
            with (
                Connection(connection.detach()) as caller,
                contextlib.suppress(OSError, EOFError),  # the caller may have been killed
            ):
                accepted, kind = Accepted.from_json(caller.recv_bytes()), caller.recv_bytes().decode()
                content = caller.recv_bytes().decode(), caller.recv_bytes()
                # The kernel ends the process at this time, whatever it computes.
                signal.setitimer(signal.ITIMER_REAL, accepted.node.policy.bounds.seconds)
                self.most_memory = accepted.node.policy.bounds.memory * 2**30
                memory = accepted.node.config.memory
                (head, body), epsilon = resident.answer(accepted, kind, content)
                self.end_above_memory()  # also of a request that was shorter than the interval
                signal.setitimer(signal.ITIMER_REAL, 0)
                self.most_memory = math.inf
                for text in (head.encode(), body, json.dumps(epsilon).encode()):
                    caller.send_bytes(text)
            if resident_memory() > memory * 2**30:
                self.end()


def main() -> NoReturn:
    from copfl.federation.protocol.log_lines import configure_logging

    configure_logging()
    folder, listener, node = sys.argv[1:]
    worker = Worker(Path(folder), socket.socket(fileno=int(listener)))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: worker.end())
    threading.Thread(target=worker.end_with, args=[int(node)], daemon=True).start()
    threading.Thread(target=worker.watch_memory, daemon=True).start()
    worker.serve()


if __name__ == "__main__":
    main()
