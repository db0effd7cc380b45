"""Answers to invitations over TLS: the server's path, the server that is another one, and what is no server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import logging
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

import uvicorn

from copfl.cli.site import join
from copfl.errors import RunError, UsageError
from copfl.federation.machines import admission
from copfl.federation.machines.planes import is_served
from copfl.federation.operations import joining
from copfl.federation.server import certificates
from copfl.federation.server.certificates import make_certificates
from copfl.federation.server.invitations import WAITS
from tests.commands import called
from tests.federation.invited import coordinated, joined


@contextlib.contextmanager
def serving(app: Any, keys: Path) -> Iterator[str]:
    """The address of a server with TLS, in a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    tls = {"ssl_keyfile": str(keys / "server.key"), "ssl_certfile": str(keys / "server.pem")}
    # To configure logging closes the handlers of others, and one of absl's closes what pytest captures.
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, **tls))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


async def flower(scope: Any, receive: Any, send: Any) -> None:
    """The server behind: it knows no path."""
    from starlette.responses import PlainTextResponse

    await PlainTextResponse("Not Found", 404)(scope, receive, send)


def test_an_answer_arrives_and_what_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, log = list[str](), logging.getLogger("of this test")
    monkeypatch.setattr(log, "handle", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(admission, "logger", log)
    log.setLevel(logging.INFO)
    app = coordinated(tmp_path, "north")
    site = joined(app, "north", tmp_path)
    _, document = joining.answer(site)
    authority = (app / "keys" / "ca.pem").read_text()
    with serving(admission.Admission(flower, app), app / "keys") as address:
        assert admission.send(address, authority, document) == WAITS
        what_to_do = f"telephone north, and enter its words: copfl federate admit {app} north"
        assert said == [f"copfl: north waits for admission: {what_to_do}"]
        for wrong in (b"", b"{}", document.replace(b'"joins"', b'"leaves"'), b"0" * 10**6):
            with pytest.raises((UsageError, RunError), match=r"the server refuses: it is no answer"):
                admission.send(address, authority, wrong)
    assert is_served(admission.PATH, "192.0.2.1")  # nodes reach it, behind the proxy too


def test_who_does_not_finish_its_answer_occupies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "TIMEOUT", 0.2)
    app, sent = coordinated(tmp_path, "north"), list[Any]()

    async def receive() -> Any:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": admission.PATH, "headers": []}
    asyncio.run(asyncio.wait_for(admission.Admission(flower, app)(scope, receive, send), 5))
    assert not sent


def test_another_server_is_told_nothing(tmp_path: Path) -> None:
    """Its certificate is of another authority: the connection ends before the answer is sent."""
    app = coordinated(tmp_path, "north")
    _, document = joining.answer(joined(app, "north", tmp_path))
    make_certificates(tmp_path / "other", "fl.example.org")
    heard: list[Any] = []

    async def other(scope: Any, receive: Any, send: Any) -> None:
        heard.append(scope)

    with (
        serving(other, tmp_path / "other") as address,
        pytest.raises(RunError, match="another server than that of the invitation answers"),
    ):
        admission.send(address, (app / "keys" / "ca.pem").read_text(), document)
    assert [scope for scope in heard if scope["type"] == "http"] == []


def test_an_authority_that_is_renewed_is_known_by_its_old_certificate_and_by_its_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = coordinated(tmp_path, "north")
    site, authority = joined(app, "north", tmp_path), app / "keys" / "ca.pem"
    _, document = joining.answer(site)
    old, new = authority.read_text(), tmp_path / "new.pem"
    done = called(capsys, "federate", "rotate", app, "--renew-authority")
    assert done.code == 0, done.err
    assert "send it to all sites" in done.out
    new.write_text(authority.read_text())
    with serving(admission.Admission(flower, app), app / "keys") as address:
        for known in (old, new.read_text()):
            assert admission.send(address, known, document) == WAITS
        monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 0)  # it ended an hour ago
        assert called(capsys, "federate", "rotate", app, "--renew-authority").code == 0
        with pytest.raises(RunError, match="has expired by this machine's clock, and nothing was sent"):
            admission.send(address, authority.read_text(), document)
        shutil.copy(authority, site.authority)
        invitation = dataclasses.replace(site.invitation, address=address)
        with pytest.raises(RunError, match="has expired"):
            join._send(site._replace(invitation=invitation), document)
        shutil.copy(new, site.authority)  # as its owner does
        assert join._send(site._replace(invitation=invitation), document) == WAITS


def test_no_server_and_no_server_of_copfl_are_said_so(tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north")
    _, document = joining.answer(joined(app, "north", tmp_path))
    authority = (app / "keys" / "ca.pem").read_text()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(admission.NotThere, match=r"does not answer .*ask the coordinator .*nothing is lost"):
        admission.send(address, authority, document)
    with (
        serving(flower, app / "keys") as address,
        pytest.raises(RunError, match=r"is not a server of copfl \(HTTP 404\)"),
    ):
        admission.send(address, authority, document)


@pytest.mark.job
@pytest.mark.parametrize("kind", ["without end", "compressed", "nested"])
def test_an_answer_of_a_hostile_server_is_bounded(kind: str, tmp_path: Path) -> None:
    app = coordinated(tmp_path, "north")
    _, document = joining.answer(joined(app, "north", tmp_path))
    bodies = {"without end": b" " * 2**16, "compressed": gzip.compress(b" " * 2**27), "nested": b"[" * 50_000}

    async def hostile(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = [(b"content-encoding", b"gzip")] if kind == "compressed" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(2000 if kind == "without end" else 1):
            await send({"type": "http.response.body", "body": bodies[kind], "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        serving(hostile, app / "keys") as address,
        pytest.raises(RunError, match="is not a server of copfl"),
    ):
        admission.send(address, (app / "keys" / "ca.pem").read_text(), document)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB
