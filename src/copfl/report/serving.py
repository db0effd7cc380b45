"""Pages that are served while a run continues, to the browsers of this machine that know their address.

`copfl watch` and the page of a coordinator serve with it.
"""

import hmac
import secrets
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any, Protocol
from urllib.parse import parse_qs

from copfl.errors import CopflError
from copfl.report import document

HOST = "127.0.0.1"
BUSY = 0.1  # a page is rendered so seldom that it takes this part of a core at most
MOST_CONNECTIONS = 64  # at a time; further ones are closed
PATIENCE = 5.0  # seconds that a connection may be silent


class Page(Protocol):
    """What is served."""

    def fingerprint(self) -> str:
        """A text that changes when the page does; quick."""

    def html(self, fingerprint: str = "") -> str:
        """The page; with a fingerprint, it asks for updates."""


class PageServer(ThreadingHTTPServer):
    """Serves one page under an address with a random token: other users of this machine cannot read it.

    Args:
        page: What is served.
        port: To listen on; 0: any free one.
    """

    daemon_threads, request_queue_size = True, 128

    def __init__(self, page: Page, port: int) -> None:
        self.page, self.token = page, secrets.token_urlsafe(32)
        self._rendering, self._connections = threading.Lock(), threading.Semaphore(MOST_CONNECTIONS)
        self._latest, self._latest_fingerprint, self._next_look = b"", "", 0.0
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def latest(self, have: str = "") -> bytes | None:
        """The page; None if `have` is its fingerprint. However many ask, it is rendered once."""
        with self._rendering:
            started = time.monotonic()
            if started >= self._next_look:
                fingerprint = self.page.fingerprint()
                if fingerprint != self._latest_fingerprint:
                    self._latest = self.page.html(fingerprint).encode()
                    self._latest_fingerprint = fingerprint
                now = time.monotonic()
                self._next_look = now + (now - started) * (1 / BUSY - 1)
            return None if have == self._latest_fingerprint else self._latest

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # a browser may leave
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of the one address, and refuses everything else."""

    server: PageServer
    server_version, sys_version, timeout = "copfl", "", PATIENCE

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        # A script of another site can send requests under a host name that resolves to this machine.
        if self.headers.get_all("Host") not in [[host] for host in self._own_names()]:
            return self._refuse(HTTPStatus.FORBIDDEN, "use the address that the command printed")
        token, _, rest = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            return self._refuse(HTTPStatus.FORBIDDEN, "the address that the command printed has a token")
        if rest or not path.endswith("/"):
            return self._refuse(HTTPStatus.NOT_FOUND, "nothing here")
        try:
            content = self.server.latest(parse_qs(query).get("have", [""])[0])
        except CopflError as error:  # a file that is being replaced, or a deleted folder
            return self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if content is None:
            return self._answer(HTTPStatus.NOT_MODIFIED, "", b"")
        policy = f"{document.content_security_policy(live=True)}; frame-ancestors 'none'"
        return self._answer(HTTPStatus.OK, "text/html; charset=utf-8", content, policy)

    def _own_names(self) -> list[str]:
        port = self.server.server_address[1]
        names = (HOST, "localhost")
        return [f"{name}:{port}" for name in names] + (list(names) if port == 80 else [])

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Python's answer to a request that it cannot read, and to other methods."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            return self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")
        return self._refuse(HTTPStatus(code), HTTPStatus(code).phrase)

    def _refuse(self, code: HTTPStatus, text: str) -> None:
        self._answer(code, "text/plain; charset=utf-8", f"{text}\n".encode(errors="replace"))

    def _answer(
        self, code: HTTPStatus, kind: str, content: bytes, policy: str = "default-src 'none'"
    ) -> None:
        self.close_connection = True
        self.send_response(code)
        headers = {
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        headers |= {"Content-Type": kind, "Content-Length": str(len(content))} if kind else {}
        headers |= {"Allow": "GET"} if code == HTTPStatus.METHOD_NOT_ALLOWED else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""
