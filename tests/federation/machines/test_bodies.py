"""What a stranger sends as the body of a request takes no memory, before Flower reads any of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.federation.machines import bodies, flower_api, superlink
from copfl.federation.machines.bodies import OBJECTS, Bodies

OTHER = "192.0.2.7"  # another machine's address
PART = bytes(2**16)
PULL = "/v1/fleet/pull-messages"


class Sent:
    """A request whose body is sent in parts, and what becomes of it."""

    def __init__(
        self, path: str, client: str, parts: Iterable[bytes], declared: int | str | None = None
    ) -> None:
        headers = [(b"content-type", b"application/protobuf")]
        headers += [] if declared is None else [(b"content-length", str(declared).encode())]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "https",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": (client, 5),
            "server": ("here", 8800),
        }
        self.parts, self.taken = iter(parts), 0
        self.status, self.closes, self.text = 0, False, b""

    async def receive(self) -> Any:
        await asyncio.sleep(0)
        part = next(self.parts, None)
        self.taken += len(part or b"")
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    async def send(self, message: Any) -> None:
        self.text += message.get("body", b"")
        if message["type"] == "http.response.start":
            self.status, self.closes = message["status"], (b"connection", b"close") in message["headers"]


def answered(app: Any, *requests: Sent) -> None:
    async def together() -> None:
        await asyncio.gather(*(app(sent.scope, sent.receive, sent.send) for sent in requests))

    asyncio.run(together())


def endless() -> Iterable[bytes]:
    for _ in range(2_000):  # 131 MB, so that the test ends where nothing bounds it
        yield PART


class Behind:
    """The server behind: it reads the body, and waits while others do."""

    def __init__(self, until: Callable[[], bool] = lambda: True) -> None:
        self.until = until
        self.bodies: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        self.bodies.append(len(await Request(scope, receive).body()))
        for _ in range(200):
            if self.until():
                break
            await asyncio.sleep(0)
        await PlainTextResponse("ok")(scope, receive, send)


@pytest.mark.job
def test_flowers_server_reads_no_body_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program as it is served: what `main` puts before Flower's own middleware."""
    from flwr.superlink.main import create_app

    monkeypatch.setattr(flower_api.extensions, "get_middleware", lambda: superlink.outermost(tmp_path))
    app = create_app()
    announced = Sent(OBJECTS, OTHER, endless(), declared=1_500_000_000)
    in_chunks = Sent(OBJECTS, OTHER, endless())
    unknown_path = Sent("/v1/fleet/nothing", OTHER, endless())
    of_this_machine = Sent("/v1/control/start-run", "127.0.0.1", endless())
    requests = [announced, in_chunks, unknown_path, of_this_machine]
    answered(app, *requests)
    assert [sent.status for sent in requests] == [413] * 4
    assert all(sent.closes for sent in requests)
    assert announced.taken == 0
    assert in_chunks.taken <= bodies.MOST_OF_AN_OBJECT + len(PART)
    assert unknown_path.taken <= bodies.MOST_OF_OTHERS + len(PART)
    assert of_this_machine.taken <= bodies.MOST_OF_THIS_MACHINE + len(PART)


@pytest.mark.parametrize(("length", "status"), [("0" * 5000 + "1", 200), ("9" * 5000, 413)])
def test_a_length_of_thousands_of_digits_is_no_error_of_the_server(length: str, status: int) -> None:
    """Python reads no such number, and each was a traceback in the server's log."""
    sent = Sent(OBJECTS, OTHER, [b"x"], declared=length)
    answered(Bodies(Behind()), sent)
    assert sent.status == status


def test_a_body_within_the_limits_arrives_whole() -> None:
    behind = Behind()
    sent = Sent(OBJECTS, OTHER, [PART] * 100, declared=100 * len(PART))
    answered(Bodies(behind), sent)
    assert (sent.status, behind.bodies) == (200, [100 * len(PART)])


def test_only_objects_may_be_large() -> None:
    """A body of 2 MB took 60 MB of memory when Flower parsed it, and a second of the only loop."""
    behind = Behind()
    asked, pushed = (Sent(path, OTHER, [PART] * 8) for path in (PULL, OBJECTS))
    answered(Bodies(behind), asked, pushed)
    assert (asked.status, pushed.status, behind.bodies) == (413, 200, [8 * len(PART)])


def test_a_slow_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PATIENCE", 0.05)
    behind = Behind()
    sent = Sent(OBJECTS, OTHER, [])

    async def byte_by_byte() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    sent.receive = byte_by_byte  # type: ignore[method-assign]
    answered(Bodies(behind), sent)
    assert (sent.status, sent.closes, behind.bodies) == (503, True, [])  # 503: a node sends it again


@pytest.mark.parametrize(("one", "other", "are_one"), [
    (OTHER, OTHER, True), (OTHER, "192.0.2.8", False), ("::ffff:192.0.2.7", OTHER, True),
    ("2001:db8:1:2::1", "2001:db8:1:2:3:4:5:6", True), ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
])  # fmt: skip
def test_a_sender_has_a_share_of_the_memory(
    one: str, other: str, are_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MOST_OF_A_SENDER", 6 * len(PART))
    app = Bodies(Behind(until=lambda: False))
    first, second = (Sent(OBJECTS, client, [PART] * 4) for client in (one, other))
    answered(app, first, second)
    assert sorted([first.status, second.status]) == ([200, 503] if are_one else [200, 200])
    assert not app.held  # nothing is counted of requests that have ended
    assert not app.requests


def test_all_senders_together_have_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_OF_ALL", 6 * len(PART))
    app = Bodies(Behind(until=lambda: False))
    others = [Sent(OBJECTS, f"192.0.2.{number}", [PART] * 4) for number in range(3)]
    this_machine = Sent(OBJECTS, "127.0.0.1", [PART] * 40)
    answered(app, *others, this_machine)
    assert 503 in [sent.status for sent in others]
    assert this_machine.status == 200


def test_a_sender_has_a_number_of_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_REQUESTS", 2)
    behind = Behind(until=lambda: False)
    mine = [Sent(PULL, OTHER, [b"x"]) for _ in range(5)]
    theirs = Sent(PULL, "192.0.2.8", [b"x"])
    answered(Bodies(behind), *mine, theirs)
    assert [sent.status for sent in (*mine, theirs)] == [200, 200, 503, 503, 503, 200]


def test_a_sender_that_leaves_is_forgotten() -> None:
    behind, sent = Behind(), Sent(OBJECTS, OTHER, [])
    left = iter([{"type": "http.request", "body": PART, "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(left)

    sent.receive = receive  # type: ignore[method-assign]
    app = Bodies(behind)
    answered(app, sent)
    assert not app.held
    assert behind.bodies == []


def test_the_proxy_has_the_same_limit() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "nginx.conf").read_text()
    fleet, control = (int(number) * 2**20 for number in re.findall(r"client_max_body_size (\d+)m;", text))
    assert (fleet, control) == (bodies.MOST_OF_AN_OBJECT, bodies.MOST_OF_THIS_MACHINE)
