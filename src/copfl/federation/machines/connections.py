"""Limits on connections to the server, so that an outsider who opens many and says nothing shuts nobody out.

Flower serves with uvicorn, which waits for ever for the headers of a request, keeps as many of them as arrive, makes
a record of each request that is sent before the one before it is answered, and accepts as many connections from one
address as there are files to open. Here the headers of a request have some seconds and some bytes, few requests of a
connection wait for their turn, and an address has a number of connections. This machine, and so a reverse proxy on
it, has as many connections as it likes. Whoever never begins to encrypt had a minute, and has the seconds of headers;
an address is counted from the end of the handshake on.

uvicorn also ends only when every answer has been sent. The log of a run is an answer that lasts as long as the run, so
a server that was told to end would stay, without a port, beside the one that is started next.
"""

import asyncio
import functools
import ipaddress
import resource
from collections import Counter
from typing import Any, cast

from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from copfl.federation.machines.planes import is_this_machine

HEADER_TIMEOUT = (
    10.0  # seconds from the first byte of a request, or from the connection, until its headers are there
)
MOST_BESIDE_BODY = (
    2**16
)  # bytes of a request that are not of its body: headers, the sizes of chunks, trailers
MOST_WAITING = (
    4  # requests of a connection; a node sends one when it has read an answer, which may not have ended yet
)
MOST_OF_AN_ADDRESS = 64  # connections at a time; a node has two or three, and a hospital a few nodes
END_TIMEOUT = 5  # seconds that answers may take when the server ends
connected: Counter[str] = Counter()  # by origin


def origin(client: str) -> str:
    """Who counts as one sender: an IPv4 address, or the 2**64 addresses that one customer has with IPv6.

    Args:
        client: An address as the server sees it.
    """
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return client
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


class LimitedProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """uvicorn's protocol of a connection, with these limits."""

    headers_due: asyncio.TimerHandle | None = None
    beside_body = 0  # bytes of the request so far

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        self.origin = origin(address)
        connected[self.origin] += 1
        if connected[self.origin] > MOST_OF_AN_ADDRESS and not is_this_machine(address):
            transport.abort()
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        connected[self.origin] -= 1
        if not connected[self.origin]:
            del connected[self.origin]
        self._have_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.beside_body += len(data)
        super().data_received(data)
        if self.beside_body > MOST_BESIDE_BODY:
            self.transport.abort()

    def on_message_begin(self) -> None:
        if len(self.pipeline) > MOST_WAITING:
            raise ValueError("too many requests that wait for their turn")  # to the parser, which refuses it
        super().on_message_begin()
        self.beside_body = 0
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._have_headers()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.beside_body -= len(body)
        super().on_body(body)

    def _expect_headers(self) -> None:
        if self.headers_due is None:
            self.headers_due = self.loop.call_later(HEADER_TIMEOUT, self.transport.abort)

    def _have_headers(self) -> None:
        if self.headers_due is not None:
            self.headers_due.cancel()
            self.headers_due = None


def limited_loop() -> asyncio.AbstractEventLoop:
    """The loop that uvicorn would take, in whose servers a connection has the time of headers to be encrypted."""
    loop: Any = auto_loop_factory()()
    create_server = loop.create_server

    async def limited(*args: Any, ssl: Any = None, **options: Any) -> Any:
        seconds = None if ssl is None else HEADER_TIMEOUT
        return await create_server(*args, ssl=ssl, ssl_handshake_timeout=seconds, **options)

    loop.create_server = limited
    return cast(asyncio.AbstractEventLoop, loop)


def limit_connections(module: Any) -> None:
    """Makes the `uvicorn.run` of a module serve and end with these limits, and with as many open files as allowed.

    Args:
        module: Flower's module that starts the server.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Flower has no web sockets, whose protocol would take over a connection with its limits.
    module.uvicorn.run = functools.partial(
        module.uvicorn.run,
        http=LimitedProtocol,
        ws="none",
        loop=f"{__name__}:{limited_loop.__name__}",
        timeout_graceful_shutdown=END_TIMEOUT,
    )
