"""A node that stays connected: it receives messages over Flower's connection and passes them to its worker.

Flower's own SuperNode starts a Python process for every message, and asks for messages every three seconds.
This one answers in its own process, and asks often while rounds are short. It executes no code of the app.
Started again after a kill, it is the same node at once, and answers the message that
it had. Without torch.
"""

import contextlib
import datetime
import email.utils
import io
import json
import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import httpx
from flwr.app import Message

from copfl.errors import CopflError, RunError, UsageError, raised_as
from copfl.federation.machines.flower_api import (
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_TOLERANCE,
    ActivateNodeRequest,
    DeactivateNodeRequest,
    FleetHttpClient,
    HeartbeatFailure,
    MessageProto,
    NodeAuthHttpInterceptor,
    ObjectPullError,
    ObjectPushError,
    RegisterNodeFleetRequest,
    RunNotRunningException,
    RuntimeVersionHttpInterceptor,
    fleet_http_connection,
    get_all_nested_objects,
    get_fused_config_from_fab,
    get_object_tree,
    http_request_response,
    message_from_proto,
    message_to_proto,
    no_object_id_recompute,
    public_key_to_bytes,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from copfl.federation.machines.flower_transport import as_message, as_record
from copfl.federation.node.acceptance import coordinators
from copfl.federation.node.node import NodeAnswer
from copfl.federation.node.respond import logged, respond
from copfl.federation.policy.file import policy_of
from copfl.federation.protocol.app_folder import CONTACT, LAST_ERROR, LEFT, WAITS
from copfl.federation.protocol.files import private_folder
from copfl.federation.protocol.keys import fingerprint, own_key, read_key
from copfl.federation.protocol.log_lines import configure_logging
from copfl.federation.protocol.messages import Content, Field, parsed, printable, refusal
from copfl.federation.protocol.node_config import WORKER, NodeConfig
from copfl.files import Busy, locked, write_bytes

NODE_ID, MESSAGE, REPLY = "node-id", "message", "reply"  # files in the folder of the worker
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 3.0  # seconds between two requests for a message
PROJECT, MAX_PROJECT = "pyproject.toml", 2**20  # of an app: its settings, and their most bytes
logger = logging.getLogger("flwr")
TRANSFER_TIMEOUT = 30.0  # seconds that the server may take between the parts of a message
UNAUTHORIZED = httpx.codes.UNAUTHORIZED  # of a key that the server does not have, and of a clock that is off
PAUSE_FRACTION = 0.1  # of the time that the node has waited: a message is late by no more


class Address(NamedTuple):
    """Where the server is, and how both sides prove who they are."""

    superlink: str  # HOST:PORT
    root_certificates: Path | None = None  # None: without TLS
    key: Path | None = None  # the node's private key; None: one of its own, for a server without node keys


class Connection(NamedTuple):
    """Flower's functions of a connected node, in Flower's order."""

    node_id: int
    receive: Callable[[], tuple[Any, Any] | None]
    send: Callable[[Any, Any, float], tuple[set[str], str]]
    get_run: Callable[[int], Any]
    get_fab: Callable[[str, int], Any]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


def serve(address: Address, options: Mapping[str, Any]) -> NoReturn:
    """Answers the server's messages until the process is ended.

    Args:
        address: Where the server is.
        options: What the node's owner set.
    """
    configure_logging()
    if address.key is not None:
        options = {**options, "key": str(address.key.expanduser().absolute())}
    config = NodeConfig.parse(options)  # its errors, and the policy's, come before anything is sent
    policy = policy_of(config.policy, config.state_dir)
    if not (coordinators(policy, config) or policy.proposals.unsigned or policy.proposals.by_hand):
        logger.warning(
            "copfl: this node knows no coordinator, so it refuses every run; start it with --coordinator"
        )
    folder = private_folder(config.state_dir / WORKER)
    certificates = None if address.root_certificates is None else _read(address.root_certificates)
    with contextlib.ExitStack() as stack:
        with raised_as(
            RunError, f"the node of {config.state_dir} runs already; it needs no second one", Busy
        ):
            stack.enter_context(locked(folder / "lock"))
        key = own_key(config.key) if address.key is None else read_key(address.key)
        logger.info("copfl: this node's key is %s", fingerprint(key.public))
        keys = key.key, key.key.public_key()
        was_admitted, is_refused = False, True
        while is_refused:
            _admit(address, certificates, keys, folder / NODE_ID, was_admitted)
            _end_if_left(folder)
            was_admitted, is_refused = True, False
            with (
                _outlived_refusals(),
                http_request_response(
                    address.superlink, certificates is None, certificates, keys
                ) as functions,
            ):
                connection = Connection(*functions)
                write_bytes(folder / NODE_ID, str(connection.node_id).encode())
                logger.info("copfl: connected to %s as node %d", address.superlink, connection.node_id)
                is_refused = ConnectedNode(connection, options, folder).serve()
            _end_if_left(folder)
    raise CopflError(f"the connection to {address.superlink} ended; start the node again")


@contextlib.contextmanager
def _outlived_refusals() -> Iterator[None]:
    """Where Flower is refused it interrupts its process; here a heartbeat is tried again, and a request is an error.

    The clock may be set, or the key admitted again. Meanwhile the node sees by its own requests that it is refused.
    """
    flower_os, make_invoker = (
        fleet_http_connection.os,
        fleet_http_connection.make_simple_http_retry_invoker,
    )

    def try_again(_process: int, _signal: int) -> NoReturn:
        raise HeartbeatFailure

    def with_errors() -> Any:
        invoker = make_invoker()
        gives_up = invoker.should_giveup
        invoker.should_giveup = lambda error: _is_refusal(error) or gives_up(error)
        return invoker

    fleet_http_connection.os = SimpleNamespace(getpid=os.getpid, kill=try_again)
    fleet_http_connection.make_simple_http_retry_invoker = with_errors
    try:
        yield
    finally:
        fleet_http_connection.os = flower_os
        fleet_http_connection.make_simple_http_retry_invoker = make_invoker


def _is_refusal(error: Exception) -> bool:
    """Whether the server does not have the key, or finds that the clock is off."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code == UNAUTHORIZED


def _end_if_left(folder: Path) -> None:
    """Ends the process without an error if the owner has ended the participation."""
    if (folder / LEFT).exists():
        logger.info("copfl: this site has left the federation; the node ends")
        raise SystemExit(0)


def _admit(
    address: Address, certificates: bytes | None, keys: Any, node_id: Path, was_admitted: bool = False
) -> None:
    """Prepares the server for this node: Flower lists a node that was killed as connected for a minute.

    It returns when the server has the node's key.
    """
    interceptors: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(*keys),
    ]
    public = public_key_to_bytes(keys[1])
    with FleetHttpClient.from_server_address(
        address.superlink, certificates is None, certificates, interceptors=interceptors
    ) as client:

        def leave(node: int) -> None:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))

        def activate() -> None:
            request = ActivateNodeRequest(public_key=public, heartbeat_interval=TRANSFER_TIMEOUT)
            leave(client.ActivateNode(request).node_id)

        def request(send: Callable[[], object], is_awaited: bool = False) -> None:
            """Sends until the server answers; an answer that is awaited must not be an error."""
            told = ""

            def tell(text: str) -> None:
                nonlocal told
                if text != told:
                    logger.warning(text)
                    why = text.removeprefix("copfl: ").encode()
                    write_bytes(node_id.with_name(WAITS), why, durable=False, private=True)
                told = text

            while not (node_id.parent / LEFT).exists():
                try:
                    send()
                    node_id.with_name(WAITS).unlink(missing_ok=True)
                    return
                except httpx.TransportError as error:
                    if "certificate" in str(error).lower():
                        return  # the connection will report it
                    tell(f"copfl: {address.superlink} is not there yet: {printable(error)}")
                    time.sleep(2)
                except httpx.HTTPStatusError as error:
                    if not is_awaited:  # it is registered, not connected, or unknown to this server
                        return
                    tell(why_refused(error.response, address.key, was_admitted))
                    time.sleep(5)

        is_registered = address.key is not None and certificates is not None  # by the server's owner
        if not is_registered:
            request(lambda: client.RegisterNode(RegisterNodeFleetRequest(public_key=public)))
        earlier = node_id.read_text() if node_id.exists() else ""
        if earlier.isdecimal():
            request(lambda: leave(int(earlier)))
        if is_registered:
            request(activate, is_awaited=True)  # Flower's connection ends the process without the key


def why_refused(response: httpx.Response, key: Path | None, was_admitted: bool = False) -> str:
    """Why the server does not let a node in, and who does what.

    Args:
        response: The server's.
        key: The file of the node's key.
        was_admitted: Whether this process was connected before.
    """
    if ahead := clock_ahead(response):
        sides = "ahead of" if ahead > 0 else "behind"
        clock = f"copfl: this machine's clock is {abs(ahead):.0f} s {sides} the server's"
        return f"{clock}, which refuses it; set the clock, and the node connects within seconds"
    why = printable(parsed(response.text).get("detail", response.text)).rstrip(".")
    if was_admitted:
        return (
            "copfl: the server refuses the key that it had: the coordinator has taken it out, or has another server; "
            f"telephone it. The node waits, and keeps its model ({why})"
        )
    return f"copfl: waiting until the coordinator has admitted {key}.pub; telephone it if that takes long ({why})"


def clock_ahead(response: httpx.Response) -> float:
    """The seconds that this machine's clock is ahead of the server's; 0 if Flower tolerates them."""
    try:
        server = email.utils.parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return 0.0
    ahead = time.time() - server
    is_tolerated = -TIMESTAMP_TOLERANCE < ahead < SYSTEM_TIME_TOLERANCE
    return 0.0 if is_tolerated or response.status_code != UNAUTHORIZED else ahead


class ConnectedNode:
    """Takes messages of the server to the node's door, and answers back."""

    def __init__(self, connection: Connection, options: Mapping[str, Any], folder: Path) -> None:
        self.connection, self.options = connection, options
        self.message, self.reply = folder / MESSAGE, folder / REPLY  # until the reply is sent
        self.contact, self.last_error = folder / CONTACT, folder / LAST_ERROR
        self.left = folder / LEFT  # its owner has ended the participation
        self.refused = (
            ""  # why the last request that was refused was; the server asks again every half minute
        )
        self.run, self.run_config = 0, dict[str, Any]()  # of the last message

    def serve(self) -> bool:
        """Answers messages, one at a time, until the owner leaves the federation, or the server refuses the key.

        True if it does.
        """
        self._finish_earlier()
        last = time.monotonic()  # when there was a message
        while not self.left.exists():
            try:
                is_message = self._receive()
                self.contact.touch()
            except RunNotRunningException:  # its answer is not wanted any more
                is_message = False
            except (ObjectPullError, ObjectPushError, httpx.HTTPStatusError) as error:
                if _is_refusal(error):
                    return True
                # The server was killed.
                logger.warning("copfl: a message is dropped: %s", printable(error))
                is_message = False
            now = time.monotonic()
            last = now if is_message else last
            if not is_message:
                time.sleep(min(max(PAUSE_FRACTION * (now - last), SHORTEST_PAUSE), LONGEST_PAUSE))

        return False

    def _receive(self) -> bool:
        """Answers the next message; False if there is none."""
        received = self.connection.receive()
        if received is None:
            return False
        envelope, tree = received
        run = envelope.metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree,
            partial(self.connection.pull_object, run),
            partial(self.connection.confirm, run),
            return_type=Message,
            initial_backoff=SHORTEST_PAUSE,
            max_time=TRANSFER_TIMEOUT,
        )
        message.metadata.__dict__["_message_id"] = envelope.metadata.message_id  # as Flower's own does
        write_bytes(self.message, message_to_proto(message).SerializeToString(), durable=False, private=True)
        self._handle(message)
        return True

    def _finish_earlier(self) -> None:
        """Sends what a process that was killed did not. Flower would deliver its message to nobody else."""
        try:
            if self.reply.exists():
                self._push(_message(self.reply.read_bytes()), is_repeated=True)
            elif self.message.exists():
                message = _message(self.message.read_bytes())
                metadata = message.metadata
                if (
                    metadata.dst_node_id == self.connection.node_id
                    and time.time() < metadata.created_at + metadata.ttl
                ):
                    self._handle(message)
        except (Exception, RunNotRunningException) as error:  # of another version, damaged, or not wanted
            logger.warning("copfl: an earlier message is dropped: %s", printable(error))
        self._forget()

    def _forget(self) -> None:
        self.message.unlink(missing_ok=True)
        self.reply.unlink(missing_ok=True)

    def _handle(self, message: Any) -> None:
        """Sends the answer to a message."""
        run, started = message.metadata.run_id, time.monotonic()
        received = as_message(message)
        try:
            if run != self.run:
                self.run_config, self.run = self._run_config(run), run
            answer = respond(received, self.run_config, self.options, os.getpid())
        except UsageError as error:  # of the app
            answer = logged(NodeAnswer(refusal(error)), received, {}, self.options)
        reply = Message(as_record(answer), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        # Stored before it is sent: a process that is started after a kill sends it again, see `_finish_earlier`.
        write_bytes(self.reply, message_to_proto(reply).SerializeToString(), durable=False, private=True)
        self._push(reply, time.monotonic() - started)
        self._forget()
        self._report(message.metadata.message_type, answer, time.monotonic() - started)

    def _report(self, kind: str, answer: Content, seconds: float) -> None:
        """A log line for an answer; a refusal is the node's last error."""
        if Field.REFUSED in (fields := parsed(answer[0])):
            at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            error = {"at": at, "reason": printable(fields[Field.REFUSED])}
            write_bytes(self.last_error, json.dumps(error).encode(), durable=False, private=True)
            if error["reason"] != self.refused:
                logger.warning("copfl: refused: %s", error["reason"])
            self.refused = error["reason"]
            return
        event = {"event": "answered", "request": printable(kind, 40), "seconds": round(seconds, 3)}
        text = f"copfl: answered {event['request']} in {seconds:.1f} s, {len(answer[1]):,} bytes"
        logger.info(text, extra={"fields": event | {"bytes": len(answer[1])}})

    def _run_config(self, run: int) -> dict[str, Any]:
        """The run config of an app, whose code is neither installed nor executed."""
        flower_run = self.connection.get_run(run)
        content = self.connection.get_fab(flower_run.fab_hash, run).content
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if archive.getinfo(PROJECT).file_size > MAX_PROJECT:
                    raise ValueError("its settings are too large")
            return dict(get_fused_config_from_fab(content, flower_run))
        except Exception as error:  # another machine made the file
            raise UsageError(f"the server's app cannot be read ({type(error).__name__})") from error

    def _push(self, reply: Any, seconds: float = 0.0, *, is_repeated: bool = False) -> None:
        """Announces the reply, and uploads its parts: the server waits minutes for a part that is missing."""
        with no_object_id_recompute():
            missing, session = self.connection.send(reply, get_object_tree(reply), seconds)
            objects = get_all_nested_objects(reply)
            uploaded: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if is_repeated and not missing:  # announced before: Flower finds the session by the part
                session, missing = "", set(objects)
                uploaded = contextlib.suppress(ObjectPushError)  # Flower refuses a part that it has

            def push(object_id: str, content: bytes) -> None:
                with uploaded:
                    self.connection.push_object(reply.metadata.run_id, session, object_id, content)

            push_objects(objects, push, object_ids_to_push=missing)


def _message(content: bytes) -> Any:
    """The message of Flower that was stored."""
    return message_from_proto(MessageProto.FromString(content))


def _read(path: Path) -> bytes:
    with raised_as(UsageError, f"{path}: {{}}; name a file that this user can read", OSError):
        return path.expanduser().read_bytes()
