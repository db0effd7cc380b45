"""Outsiders who open connections and say nothing shut nobody out."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

import uvicorn

from copfl.federation.machines import connections, planes
from copfl.federation.server.certificates import make_certificates


@contextlib.contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, seconds: float = 0.3, most: int = 3, keys: Path | None = None
) -> Iterator[int]:
    """The port of a server whose limits count for this machine, too; with keys it is encrypted."""
    monkeypatch.setattr(connections, "HEADER_TIMEOUT", seconds)
    monkeypatch.setattr(connections, "MOST_OF_AN_ADDRESS", most)
    monkeypatch.setattr(connections, "is_this_machine", lambda address: False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    given = SimpleNamespace(uvicorn=SimpleNamespace(run=uvicorn.Config))
    connections.limit_connections(given)
    encrypted = (
        {} if keys is None else {"ssl_keyfile": keys / "server.key", "ssl_certfile": keys / "server.pem"}
    )
    config = given.uvicorn.run(app, "127.0.0.1", 0, lifespan="off", log_config=None, **encrypted)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


def answer(connection: socket.socket) -> bytes:
    connection.settimeout(5)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    received = b""
    while not received.endswith(b"ok"):
        more = connection.recv(1000)
        assert more, "the connection was closed"
        received += more
    return received


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_silent_connection_is_closed_and_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch) as port:
        with socket.create_connection(("127.0.0.1", port)) as silent:
            assert is_closed(silent)
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost")  # never the end of the headers
            assert is_closed(slow)
        with socket.create_connection(("127.0.0.1", port)) as member:
            assert answer(member).endswith(b"ok")
            time.sleep(0.5)  # longer than the headers may take: it has sent a request
            assert answer(member).endswith(b"ok")


def test_an_address_has_a_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, seconds=30) as port:
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        assert answer(opened[0]).endswith(b"ok")
        with socket.create_connection(("127.0.0.1", port)) as one_more:
            assert is_closed(one_more)
        for connection in opened:
            connection.close()
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port)) as member:
            assert answer(member).endswith(b"ok")


def test_who_never_begins_to_encrypt_has_the_time_of_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had a minute: uvicorn's protocol does not know a connection before the end of the handshake."""
    make_certificates(tmp_path, "127.0.0.1")
    client = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    with serving(monkeypatch, seconds=2, keys=tmp_path) as port:
        for begin in (b"", b"\x16\x03\x01"):
            with socket.create_connection(("127.0.0.1", port)) as silent:
                silent.sendall(begin)
                assert is_closed(silent)
        plain = socket.create_connection(("127.0.0.1", port))
        with client.wrap_socket(plain, server_hostname="127.0.0.1") as member:
            assert answer(member).endswith(b"ok")


def test_addresses_of_one_customer_are_one_sender() -> None:
    """Who has IPv6 has 2**64 addresses, each of which had 64 connections."""
    origins = [
        connections.origin(client) for client in ("2001:db8:1:2::1", "2001:db8:1:2:ffff::", "2001:db8:1:3::1")
    ]
    assert origins == ["2001:db8:1:2::/64", "2001:db8:1:2::/64", "2001:db8:1:3::/64"]
    assert connections.origin("::ffff:192.0.2.7") == connections.origin("192.0.2.7") == "192.0.2.7"
    assert connections.origin("192.0.2.7") != connections.origin("192.0.2.8")
    assert connections.origin("") == ""


def test_an_endless_header_and_an_endless_trailer_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, seconds=30) as port:
        for begin in (
            b"GET / HTTP/1.1\r\nx: ",
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: ",
        ):
            with (
                socket.create_connection(("127.0.0.1", port)) as stranger,
                contextlib.suppress(ConnectionError),
            ):
                stranger.settimeout(5)
                stranger.sendall(begin)
                for _ in range(500):  # 31 MB
                    stranger.sendall(b"x" * 2**16)
                pytest.fail("the server took all of it")


@pytest.mark.parametrize(("number", "are_answered"), [(3, True), (1000, False)])
def test_many_requests_that_do_not_wait_for_answers_are_refused(
    number: int, are_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was a record of 2 kB for 18 bytes, as many as arrived. A node may be quicker than the end of an answer."""
    with (
        serving(monkeypatch, seconds=30) as port,
        socket.create_connection(("127.0.0.1", port)) as sender,
    ):
        sender.settimeout(5)
        sender.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * number)
        received = b""
        with contextlib.suppress(ConnectionError):
            while received.count(b"ok") < number and (more := sender.recv(2**16)):
                received += more
        assert (received.count(b" 200 OK") == number) == are_answered


def test_the_headers_of_a_later_request_have_a_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch) as port, socket.create_connection(("127.0.0.1", port)) as stranger:
        assert answer(stranger).endswith(b"ok")
        stranger.sendall(b"GET / HTTP/1.1\r\nHost")
        assert is_closed(stranger)


def test_this_machine_has_no_limit() -> None:
    assert planes.is_this_machine("127.0.0.1")
    assert not planes.is_this_machine("192.0.2.1")


ENDLESS = """
import sys
from types import SimpleNamespace

import anyio
import uvicorn

from copfl.federation.machines import connections


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"line", "more_body": True})
        await anyio.sleep(0.05)


connections.END_TIMEOUT = 1
module = SimpleNamespace(uvicorn=SimpleNamespace(run=uvicorn.run))
connections.limit_connections(module)
module.uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), lifespan="off", ws="none")
"""


def test_a_server_ends_although_somebody_follows_a_log() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            until, follower = time.monotonic() + 60, None
            while follower is None and time.monotonic() < until:
                with contextlib.suppress(ConnectionError):
                    follower = socket.create_connection(("127.0.0.1", port))
            assert follower is not None
            with follower:
                follower.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                assert follower.recv(10)
                server.send_signal(signal.SIGTERM)
                server.wait(20)
        finally:
            server.kill()
