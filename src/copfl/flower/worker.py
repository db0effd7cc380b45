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
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from copfl.errors import CopflError, RunError, UsageError, WireError, raised_as
from copfl.flower import audit_log
from copfl.flower.acceptance import accepted, as_member
from copfl.flower.policy.file import policy_of
from copfl.flower.policy.refusal import PolicyError, Refusal
from copfl.flower.proposal import KEY, from_text
from copfl.flower.registry import WORKER, greeting, state_dir
from copfl.flower.transport import HELLO, JOIN, TRAIN, Content, content_of, refusal

SOCKET = "socket"  # in the worker's folder
TOO_LARGE = "too-large"  # a file beside the socket: the last worker ended above its memory
MEMORY_INTERVAL = 0.1  # seconds between two looks at the worker's memory
IDLE_TIMEOUT = 3600.0  # seconds without a request after which the worker ends
MEMORY_LIMIT = 4.0  # GiB: a worker that has more after an answer ends
ATTEMPTS = 3  # a worker may be killed
_started: list[subprocess.Popen[bytes]] = []  # the last worker that this process started


class Request(NamedTuple):
    """A message of the server, and what the node needs to answer it."""

    run_config: Mapping[str, Any]
    node_config: Mapping[str, Any]
    kind: str = TRAIN  # or JOIN
    content: Content = ("", b"")


class Answer(NamedTuple):
    """What the node sends, and what its audit log says of it."""

    content: Content
    epsilon: float | None = None  # of a noised upload


# -- the caller ----------------------------------------------------------------------------------------------


def answer(request: Request, node: int) -> Answer:
    """The answer to a request: the worker's, or computed here if the node is configured without one."""
    if request.node_config.get("worker", True):
        return call(request, node)
    from copfl.flower.resident import Resident

    resident = Resident()
    return Answer(resident.answer(request), resident.epsilon)


def respond(message: Any, request: Request, node: int) -> Content:
    """The answer to a message of Flower, which the audit log has before it leaves; an error is a refusal."""
    try:
        answered = _answered(message, request, node)
    except CopflError as error:
        answered = Answer(refusal(error, _places(request.node_config)))
    return logged(message, request, answered)


def _answered(message: Any, request: Request, node: int) -> Answer:
    """The answer to a message, if the node has accepted its proposal."""
    node_config, kind = request.node_config, _kind(message)
    policy = policy_of(node_config, state_dir(node_config))
    proposal = accepted(policy, node_config, request.run_config).proposal
    content = content_of(message)
    if kind == HELLO:
        return Answer(greeting(as_member(node_config, proposal), content, proposal))
    if kind not in (TRAIN, JOIN):
        raise UsageError(f"a node of copfl does not answer {kind[:40]!r}")
    return answer(request._replace(kind=kind, content=content), node)


def logged(message: Any, request: Request, answered: Answer) -> Content:
    """The answer to a message, once the audit log has it; a refusal if that cannot be written.

    Args:
        message: that of Flower.
        request: has the run config and the node's configuration.
        answered: what the node would send.
    """
    question, stated = ("", b""), None
    with contextlib.suppress(WireError):
        question = content_of(message)
    with contextlib.suppress(UsageError):  # also one that was not accepted, if its coordinator signed it
        stated = from_text(request.run_config.get(KEY)).proposal
    try:
        entry = audit_log.entry_of(_kind(message), question, answered.content, stated, answered.epsilon)
        audit_log.append(state_dir(request.node_config), entry)
    except CopflError as error:
        return refusal(error, _places(request.node_config))
    return answered.content


def _kind(message: Any) -> str:
    return str(message.metadata.message_type).partition(".")[0]


def _places(node_config: Mapping[str, Any]) -> list[str]:
    """The paths of this machine that no refusal may have."""
    return [str(value) for value in node_config.values()]


def call(request: Request, node: int) -> Answer:
    """The worker's answer. `node` is the process with which the worker ends."""
    folder = private_folder(state_dir(request.node_config) / WORKER)
    bounds = policy_of(request.node_config, folder.parent).bounds
    fields = request._asdict() | {"content": None, "seconds": bounds.seconds, "memory": bounds.memory}
    head, body = request.content
    for _ in range(ATTEMPTS):
        started = time.monotonic()
        try:
            with _connection(folder, node) as worker:
                for part in (json.dumps(fields).encode(), head.encode(), body):
                    worker.send_bytes(part)
                content = worker.recv_bytes().decode(), worker.recv_bytes()
                return Answer(content, json.loads(worker.recv_bytes()))
        except (OSError, EOFError):  # it ended before it answered
            if time.monotonic() - started >= bounds.seconds:
                raise PolicyError((Refusal("bounds.seconds", "it took too long"),), "request") from None
            if (folder / TOO_LARGE).exists():
                (folder / TOO_LARGE).unlink()
                raise PolicyError((Refusal("bounds.memory", "it took too much memory"),), "request") from None
            time.sleep(0.05)
    raise RunError(f"its worker process ended {ATTEMPTS} times before it answered; see the node's log")


def private_folder(path: Path) -> Path:
    """The folder, which only this user can open; RunError if it is another's."""
    with raised_as(RunError, f"cannot create {path}: {{}}; choose another state-dir", OSError):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RunError(f"{path} is not a folder of this user; remove it, or choose another state-dir")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _connection(folder: Path, node: int) -> Connection:
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
            command = [sys.executable, "-m", "copfl.flower.worker", str(folder), number, str(node)]
            process = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
            for ended in _started:
                ended.poll()  # else it stays in the list of processes
            _started[:] = [process, *(other for other in _started if other.returncode is None)]
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
        from copfl.flower.resident import resident_memory

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
        from copfl.flower.resident import Resident, resident_memory

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
    from copfl.flower.events import configure_logging

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
