"""The node's door: a message in, an answer out, which the audit log has before it leaves."""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from copfl.errors import CopflError, RunError, UsageError, WireError
from copfl.experiment.process import ENVIRONMENT
from copfl.federation.node import audit_log
from copfl.federation.node.acceptance import accepted, as_member
from copfl.federation.node.request import Answer, Request, private_folder
from copfl.federation.policy.file import policy_of
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol.greeting import greeting
from copfl.federation.protocol.messages import HELLO, JOIN, TRAIN, Content, content_of, refusal
from copfl.federation.protocol.node_config import WORKER, state_dir
from copfl.federation.protocol.proposal import KEY, from_text

SOCKET = "socket"  # in the worker's folder


TOO_LARGE = "too-large"  # a file beside the socket: the last worker ended above its memory


ATTEMPTS = 3  # a worker may be killed


_started: list[subprocess.Popen[bytes]] = []  # the last worker that this process started


def answer(request: Request, node: int) -> Answer:
    """The answer to a request: the worker's, or computed here if the node is configured without one."""
    if request.node_config.get("worker", True):
        return call(request, node)
    from copfl.federation.node.resident import Resident

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
            command = [sys.executable, "-m", "copfl.federation.node.worker", str(folder), number, str(node)]
            process = subprocess.Popen(
                command,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                env=ENVIRONMENT | os.environ,  # a ClientApp that Flower starts has none of these
            )
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
