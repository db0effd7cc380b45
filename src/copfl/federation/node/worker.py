"""A resident process per node: torch, the samples and the model are loaded once, not for every message.

The caller imports no torch. It sends a request through a Unix socket in `state-dir/.worker`, a folder that
only this user can open, and starts the worker if none listens. The worker ends with its node, after an idle
hour, or above its limit of memory; the next request starts another. What a kill leaves is what a kill of the
process per message left: the client's records are files that appear by rename.
"""

import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from copfl.federation.node.request import Request
from copfl.federation.node.respond import SOCKET, TOO_LARGE

MEMORY_INTERVAL = 0.1  # seconds between two looks at the worker's memory
IDLE_TIMEOUT = 3600.0  # seconds without a request after which the worker ends
MEMORY_LIMIT = 4.0  # GiB: a worker that has more after an answer ends


# -- the caller ----------------------------------------------------------------------------------------------


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
        memory = MEMORY_LIMIT
        while True:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                self.end()
            with (
                Connection(connection.detach()) as caller,
                contextlib.suppress(OSError, EOFError),  # the caller may have been killed
            ):
                given, head, body = json.loads(caller.recv_bytes()), caller.recv_bytes(), caller.recv_bytes()
                # The kernel ends the process at this time, whatever it computes.
                signal.setitimer(signal.ITIMER_REAL, given.pop("seconds"))
                self.most_memory = given.pop("memory") * 2**30
                memory = float(given["node_config"].get("memory", MEMORY_LIMIT))
                request = Request(**given | {"content": (head.decode(), body)})
                answer_head, answer_body = resident.answer(request)
                self.end_above_memory()  # also of a request that was shorter than the interval
                signal.setitimer(signal.ITIMER_REAL, 0)
                self.most_memory = math.inf
                caller.send_bytes(answer_head.encode())
                caller.send_bytes(answer_body)
                caller.send_bytes(json.dumps(resident.epsilon).encode())
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
