"""Limits on the bodies of requests, so that whoever reaches the port does not take the server's memory.

Flower reads a body to its end and parses it before it asks who sent it. Here a body is read first, by header and by
count, in a time that its size allows, and each sender has a share of the memory. What is refused has begun nothing.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

from copfl.federation.machines.connections import origin
from copfl.federation.machines.planes import FLEET, is_this_machine

OBJECTS = f"{FLEET}push-object"  # where Flower sends the content of messages, in parts of 5 MB
MOST_OF_AN_OBJECT = 16 * 2**20  # bytes, as in deploy/nginx.conf
MOST_OF_THIS_MACHINE = 32 * 2**20  # bytes; an app has 10 MB at most
MOST_OF_OTHERS = 2**18  # bytes; when it is parsed, a body takes up to thirty times as much memory
MOST_DIGITS = 20  # of a length that are read: more are larger than any limit
PATIENCE, RATE = 20.0, 20_000  # seconds for any body, and one more for so many bytes of it
MOST_REQUESTS = 64  # of a sender at a time; behind a proxy, its connections are not counted
MOST_OF_A_SENDER, MOST_OF_ALL = 64 * 2**20, 512 * 2**20  # bytes at a time, until their requests are answered


class Refused(Exception):
    """A request that is not answered by Flower.

    Args:
        status: 413 for what is too large for ever; 503 for what may pass later, so a node tries it again.
        reason: For the sender.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Bodies:
    """Middleware of Flower's server: reads the body of each request, and passes on what is within the limits."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.requests: Counter[str] = Counter()  # by sender
        self.held: Counter[str] = Counter()  # bytes, by sender

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        from starlette.responses import PlainTextResponse

        client = str((scope.get("client") or ("",))[0])
        sender = "" if is_this_machine(client) else origin(client)
        size, messages = 0, deque[Any]()
        self.requests[sender] += 1
        try:
            self._require_few(sender)
            async for message in self._body(scope, receive, most_bytes(str(scope["path"]), sender)):
                if message["type"] == "http.disconnect":
                    return
                size += len(message.get("body", b""))
                self.held[sender] += len(message.get("body", b""))
                self._require_room(sender)
                messages.append(message)

            async def replayed() -> Any:
                return messages.popleft() if messages else await receive()

            await self.app(scope, replayed, send)
        except Refused as refused:
            # What is left of the body is not read.
            headers = {"connection": "close"}
            await PlainTextResponse(f"{refused}\n", refused.status, headers)(scope, receive, send)
        finally:
            self._forget(sender, size)

    async def _body(self, scope: Any, receive: Any, most: int) -> AsyncIterator[Any]:
        """The messages of a body, until it is whole or its sender has gone."""
        too_large = Refused(413, f"a body has at most {most:,} bytes here")
        for name, value in scope["headers"]:
            # Of digits, or the server refuses the header; Python reads no number of thousands of them.
            if name == b"content-length" and int(value.lstrip(b"0")[:MOST_DIGITS] or b"0") > most:
                raise too_large
        began, size, is_whole = time.monotonic(), 0, False
        while not is_whole:
            try:
                async with asyncio.timeout(began + PATIENCE + size / RATE - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise Refused(503, f"a body has {PATIENCE:g} s, and one more for {RATE:,} bytes") from None
            size += len(message.get("body", b""))
            if size > most:
                raise too_large
            is_whole = not message.get("more_body", False)
            yield message

    def _require_few(self, sender: str) -> None:
        if sender and self.requests[sender] > MOST_REQUESTS:
            raise Refused(503, f"an address has {MOST_REQUESTS} requests at a time")

    def _require_room(self, sender: str) -> None:
        """Refused where bodies that are here already leave no room; those of this machine always have some."""
        if not sender:
            return
        if self.held[sender] > MOST_OF_A_SENDER:
            raise Refused(503, f"bodies of an address have {MOST_OF_A_SENDER:,} bytes at a time")
        if self.held.total() - self.held[""] > MOST_OF_ALL:
            raise Refused(503, "the server has no room for more bodies at the moment")

    def _forget(self, sender: str, size: int) -> None:
        """Takes a request out of both counts, and a sender without one."""
        for counts, number in ((self.requests, 1), (self.held, size)):
            counts[sender] -= number
            if not counts[sender]:
                del counts[sender]


def most_bytes(path: str, sender: str) -> int:
    """The bytes that a body may have.

    Args:
        path: Of its request.
        sender: Who sent it; empty: this machine.
    """
    if not sender:
        return MOST_OF_THIS_MACHINE
    return MOST_OF_AN_OBJECT if path == OBJECTS else MOST_OF_OTHERS
