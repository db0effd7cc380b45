"""A node that stays connected, with Flower's connection replaced: messages, and what a kill leaves."""

from __future__ import annotations

import dataclasses
import email.utils
import io
import json
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

import httpx
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable import inflatable_object as objects
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity

from copfl.errors import UsageError
from copfl.federation.machines import flower_api, supernode
from copfl.federation.machines.flower_transport import as_record, content_of
from copfl.federation.machines.supernode import ConnectedNode, Connection
from copfl.federation.node import respond
from copfl.federation.operations.status import status
from copfl.federation.protocol import keys
from copfl.federation.protocol.chained_log import AUDIT, verified
from copfl.federation.protocol.messages import HELLO, TRAIN, Content
from copfl.federation.protocol.messages import Message as Asked
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from copfl.files import locked
from tests.federation.network import CONFIG, DirectTransport, digits, unsigned, write_nodes

NODE = 17


class Killed(Exception):
    pass


class Network:
    """Flower's connection: messages that wait, and the objects of replies that were sent."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.store: dict[str, bytes] = {}
        self.sent: list[Any] = []
        self.trees: list[Any] = []
        self.pushed: dict[str, bytes] = {}
        self.is_broken = self.is_known = False
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 5, 1

    def add(self, request: str, content: Content, ttl: float = 60) -> Any:
        message = Message(as_record(content), NODE, request, ttl=ttl)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.store |= {i: o.deflate() for i, o in objects.get_all_nested_objects(message).items()}
        self.waiting.append((message, objects.get_object_tree(message)))
        return message

    def send(self, reply: Any, tree: Any, seconds: float) -> tuple[set[str], str]:
        if self.is_broken:
            raise Killed
        self.sent.append(reply)
        self.trees.append(tree)
        if self.is_known:
            return set(), "another"  # as Flower answers to a reply that the server has seen
        return {t.object_id for t in objects.iterate_object_tree(tree)} - self.pushed.keys(), "session"

    def push(self, run: int, session: str, name: str, content: bytes) -> None:
        assert session == ("" if self.is_known else "session")
        if name in self.pushed:
            raise ObjectPushError(name, run, session)
        self.pushed[name] = content

    def connection(self) -> Connection:
        return Connection(
            node_id=NODE,
            receive=lambda: self.waiting.pop(0) if self.waiting else None,
            send=self.send,
            get_run=lambda run: None,
            get_fab=lambda fab, run: None,
            pull_object=lambda run, name: self.store[name],
            push_object=self.push,
            confirm=lambda run, name: None,
        )


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.setattr(ConnectedNode, "_run_config", lambda self, run: CONFIG)
    return Network()


def node_of(network: Network, tmp_path: Path) -> ConnectedNode:
    config = unsigned(write_nodes(digits(), tmp_path / "nodes")[0] | {"worker": False})
    return ConnectedNode(network.connection(), config, tmp_path)


def asked(tmp_path: Path) -> Content:
    settings = settings_of(CONFIG)
    folder = ServerFolder(str(tmp_path / "runs"), "test", resume=True)
    return new_server(settings, DirectTransport(settings, {}), folder).down(0)


def test_messages_are_answered(network: Network, tmp_path: Path) -> None:
    node = node_of(network, tmp_path)
    assert not node._receive()
    network.add(HELLO, (json.dumps({"run": "test"}), b""))
    network.add(TRAIN, asked(tmp_path))
    network.add("query.other", (json.dumps({"run": "test"}), b""))
    while node._receive():
        assert not node.message.exists()
    greeting, upload, other = (content_of(reply) for reply in network.sent)
    assert json.loads(greeting[0]) == {"client": 0} == json.loads(other[0])
    assert '"kind":"upload"' in upload[0]
    assert network.sent[1].object_id in network.pushed
    unknown = Asked("wave", ("", b""))
    assert "does not answer 'wave'" in respond.respond(unknown, CONFIG, node.options, 0)[0]
    foreign = Asked(TRAIN, None)
    assert "does not carry a copfl packet" in respond.respond(foreign, CONFIG, node.options, 0)[0]
    lines = verified(Path(node.options["state-dir"]) / AUDIT).lines
    assert lines[-1]["reason"] == "the message does not carry a copfl packet"


@pytest.mark.parametrize(("code", "is_refused"), [(401, True), (503, False)])
def test_a_key_that_the_server_takes_out_ends_the_connection_alone(
    code: int, is_refused: bool, network: Network, tmp_path: Path
) -> None:
    """The process lives on, and asks to be admitted again; another error of the server is none of the key."""
    node = node_of(network, tmp_path)
    response = httpx.Response(code, request=httpx.Request("POST", "https://fl/v1/fleet/pull-messages"))

    def receive() -> None:
        node.left.touch()  # so that a node that goes on ends
        response.raise_for_status()

    node.connection = node.connection._replace(receive=receive)
    assert node.serve() is is_refused
    (said,) = {supernode.why_refused(response, tmp_path / "key", True)}
    assert "the coordinator has taken it out, or has another server; telephone it" in said


def test_the_status_of_a_node_says_why_it_is_not_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = httpx.Request("POST", "https://fl/v1/fleet/activate-node")
    refused = httpx.Response(412, request=request, json={"detail": "Failed to activate SuperNode."})
    errors = [httpx.ConnectError("refused"), httpx.HTTPStatusError("412", request=request, response=refused)]

    class Client:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        from_server_address = classmethod(lambda cls, *_, **__: cls())
        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

        def ActivateNode(self, _: object) -> SimpleNamespace:
            if errors:
                raise errors.pop(0)
            return SimpleNamespace(node_id=NODE)

        def DeactivateNode(self, _: object) -> None:
            pass

    def pause(_: float) -> None:
        said.append(status(tmp_path)["not_connected"])

    said: list[str] = []
    monkeypatch.setattr(supernode, "FleetHttpClient", Client)
    monkeypatch.setattr(supernode, "time", SimpleNamespace(sleep=pause, time=time.time))
    (tmp_path / ".worker").mkdir()
    key, address = keys.new_key(), supernode.Address("fl:8800", key=tmp_path / "site.key")
    with locked(tmp_path / ".worker" / "lock"):
        supernode._admit(address, b"", (key, key.public_key()), tmp_path / ".worker" / "node-id")
        assert status(tmp_path)["not_connected"] == ""
    assert said[0] == "fl:8800 is not there yet: refused"
    assert said[1].startswith(
        f"waiting until the coordinator has admitted {tmp_path / 'site.key'}.pub; telephone it"
    )


def test_a_refused_heartbeat_is_tried_again_and_interrupts_nobody() -> None:
    module = flower_api.fleet_http_connection
    with supernode._outlived_refusals(), pytest.raises(flower_api.HeartbeatFailure):
        module.os.kill(module.os.getpid(), 2)
    assert module.os.__name__ == "os"


def test_a_refused_request_is_an_error_and_interrupts_nobody() -> None:
    module = flower_api.fleet_http_connection
    before = module.make_simple_http_retry_invoker
    response = httpx.Response(401, request=httpx.Request("POST", "https://fl:8800"))
    with supernode._outlived_refusals(), pytest.raises(httpx.HTTPStatusError, match="401"):
        module.make_simple_http_retry_invoker().invoke(response.raise_for_status)
    assert module.make_simple_http_retry_invoker is before


def test_the_message_of_a_killed_node_is_answered_when_it_returns(network: Network, tmp_path: Path) -> None:
    message = network.add(TRAIN, asked(tmp_path))
    network.is_broken = True
    with pytest.raises(Killed):
        node_of(network, tmp_path)._receive()
    network.is_broken = False
    again = node_of(network, tmp_path)
    assert again.message.stat().st_mode & 0o077 == 0
    again._finish_earlier()
    assert network.sent[0].metadata.reply_to_message_id == message.metadata.message_id
    assert '"kind":"upload"' in content_of(network.sent[0])[0]
    assert not again.message.exists()


def test_a_reply_that_was_announced_is_uploaded_when_the_node_returns(
    network: Network, tmp_path: Path
) -> None:
    """Killed after the first of its parts was uploaded: the server would wait three minutes for the others."""
    network.add(TRAIN, asked(tmp_path))
    node = node_of(network, tmp_path)

    def killed(*part: Any) -> None:
        if network.pushed:
            raise Killed
        network.push(*part)

    node.connection = node.connection._replace(push_object=killed)
    with pytest.raises(Killed):
        node._receive()
    (reply,) = network.sent
    again = node_of(network, tmp_path)
    network.is_known = True
    again._finish_earlier()
    assert [m.object_id for m in network.sent] == [reply.object_id] * 2  # the same, not another one
    assert network.pushed.keys() == {t.object_id for t in objects.iterate_object_tree(network.trees[0])}
    assert not again.message.exists()
    assert not again.reply.exists()


def test_a_node_outlives_the_errors_of_a_server_that_is_killed(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException] = [
        ObjectPullError("1", "it is missing"),
        ObjectPushError("1", 5, "session"),
        RunNotRunningException(),
        Killed(),
    ]
    paused: list[float] = []

    def receive() -> None:
        raise errors.pop(0)

    monkeypatch.setattr("time.sleep", paused.append)
    node = node_of(network, tmp_path)
    node.connection = node.connection._replace(receive=receive)
    with pytest.raises(Killed):
        node.serve()
    assert len(paused) == 3
    assert all(supernode.SHORTEST_PAUSE <= seconds <= supernode.LONGEST_PAUSE for seconds in paused)


def not_running(message: object) -> None:
    raise RunNotRunningException  # not an Exception


@pytest.mark.parametrize("how", ["late", "another node", "damaged", "ended"])
def test_an_earlier_message_that_nobody_waits_for_is_dropped(
    how: str, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, node = network.add(TRAIN, asked(tmp_path), ttl=0.01), node_of(network, tmp_path)
    node.message.write_bytes(
        b"\xff" * 9 if how == "damaged" else message_to_proto(message).SerializeToString()
    )
    if how == "ended":
        monkeypatch.setattr(node, "_handle", not_running)
        monkeypatch.setattr("time.time", lambda: message.metadata.created_at)
    if how == "another node":
        node.connection = node.connection._replace(node_id=18)
    time.sleep(0.02)
    node._finish_earlier()
    assert network.sent == []
    assert not node.message.exists()


@dataclasses.dataclass
class Bundle:
    """A run of Flower's, and its app."""

    content: bytes = b""
    fab_hash: str = "hash"
    override_config: dict[str, Any] = dataclasses.field(default_factory=dict)


def bundle(**files: str) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        for name, text in files.items():
            written.writestr(name.replace("__", "."), text)
    return archive.getvalue()


def test_an_app_gives_a_node_its_run_config_and_no_code(tmp_path: Path) -> None:
    content = bundle(
        pyproject__toml='[project]\nname="a"\nversion="1.0.0"\n[tool.flwr.app]\npublisher="p"\n'
        '[tool.flwr.app.components]\nserverapp="evil:app"\n'
        'clientapp="evil:app"\n[tool.flwr.app.config.run]\nrounds=3\n',
        evil__py=f"open({str(tmp_path / 'evil')!r}, 'w')",
    )
    app = Bundle(content)
    connection = Network().connection()._replace(get_run=lambda _: app, get_fab=lambda *_: app)
    assert ConnectedNode(connection, {}, tmp_path)._run_config(1) == {"run.rounds": 3}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        bundle(a__py=""),
        bundle(pyproject__toml="x = ["),
        bundle(pyproject__toml=" " * 2**21),
    ],
    ids=["empty", "no archive", "no project", "no TOML", "large"],
)
def test_an_app_that_is_none_is_refused_and_the_node_continues(content: bytes, tmp_path: Path) -> None:
    network, app = Network(), Bundle(content)
    connection = network.connection()._replace(get_run=lambda _: app, get_fab=lambda *_: app)
    config = write_nodes(digits(), tmp_path / "nodes")[0] | {"worker": False}
    network.add(TRAIN, ("", b""))
    assert ConnectedNode(connection, config, tmp_path)._receive()
    assert "the server's app cannot be read" in content_of(network.sent[0])[0]


def test_keys_and_certificates_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(UsageError, match="is not a private key"):
        keys.read_key(tmp_path / "text")
    with pytest.raises(UsageError, match="No such file"):
        supernode._read(tmp_path / "nothing")
    own = keys.own_key(tmp_path / "key")
    assert keys.own_key(tmp_path / "key").public == own.public == keys.read_public(tmp_path / "key.pub")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key", "key.pub", "text"]
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("status", "offset", "named"),
    [(401, 10, True), (401, -600, True), (401, 1, False), (401, -100, False), (404, 10, False)],
)
def test_a_clock_that_is_off_is_named(status: int, offset: float, named: bool) -> None:
    """Flower refuses a request that is signed more than five seconds ahead, with the text of a wrong key."""
    at = email.utils.formatdate(time.time() - offset, usegmt=True)
    ahead = supernode.clock_ahead(httpx.Response(status, headers={"date": at}))
    assert (abs(ahead - offset) < 2) if named else (ahead == 0)
    assert supernode.clock_ahead(httpx.Response(401, headers={"date": "x"})) == 0
    assert supernode.clock_ahead(httpx.Response(401)) == 0
