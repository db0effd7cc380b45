"""Limits on connections to the server, so that an outsider who opens many and says nothing shuts nobody out.

Flower serves with uvicorn, which waits for ever for the first request of a connection, and accepts as many
connections from one address as there are files to open. Here a connection has some seconds to send the headers of
its first request, and an address has a number of connections. This machine, and so a reverse proxy on it, has none.

uvicorn also ends only when every answer has been sent. The log of a run is an answer that lasts as long as the run, so
a server that was told to end would stay, without a port, beside the one that is started next.
"""

import functools
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from copfl.federation.machines.planes import is_this_machine

HEADER_TIMEOUT = 10.0  # seconds until the headers of the first request are there
MOST_OF_AN_ADDRESS = 64  # connections at a time; a node has two or three, and a hospital a few nodes
END_TIMEOUT = 5  # seconds that answers may take when the server ends
connected: Counter[str] = Counter()  # by address


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc]
    """uvicorn's protocol of a connection, with both limits."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        connected[self.address] += 1
        if connected[self.address] > MOST_OF_AN_ADDRESS and not is_this_machine(self.address):
            transport.abort()
            return
        self.first_request = self.loop.call_later(HEADER_TIMEOUT, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        connected[self.address] -= 1
        if not connected[self.address]:
            del connected[self.address]
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():  # no request has begun
            self.transport.abort()


def limit_connections(module: Any) -> None:
    """Makes the `uvicorn.run` of a module serve and end with these limits, and with as many open files as allowed.

    Args:
        module: Flower's module that starts the server.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    module.uvicorn.run = functools.partial(
        module.uvicorn.run, http=LimitedProtocol, timeout_graceful_shutdown=END_TIMEOUT
    )
