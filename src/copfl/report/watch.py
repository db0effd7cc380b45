"""The report of a running run, served to this machine alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from copfl.errors import CopflError
from copfl.report import page, run_data

HOST = "127.0.0.1"


class Watch:
    """The page and its updates, rendered again when the run folders have new data."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._lock = threading.Lock()
        self._latest: tuple[str, bytes] | None = None

    def html(self) -> bytes:
        return page.render(run_data.read_all(self.paths), live=True).encode()

    def update(self, have: str) -> bytes | None:
        """The update for a page with the data of the fingerprint `have`; None if nothing changed."""
        with self._lock:
            fingerprint = page.fingerprint_of(self.paths)
            if fingerprint == have:
                return None
            if self._latest is None or self._latest[0] != fingerprint:
                content = {"fingerprint": fingerprint, **page.update(run_data.read_all(self.paths))}
                self._latest = fingerprint, page.as_json(content).encode()
            return self._latest[1]


def server(watch: Watch, port: int) -> ThreadingHTTPServer:
    """A server with two addresses, the page and its updates; it serves no file by name."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "copfl", ""

        def do_GET(self) -> None:
            # A script of another site can send requests under a host name that resolves to this machine.
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                return self._answer(403, "text/plain", b"use the address 127.0.0.1\n")
            address = urlsplit(self.path)
            try:
                if address.path == "/":
                    return self._answer(200, "text/html; charset=utf-8", watch.html())
                if address.path == "/data.json":
                    content = watch.update(parse_qs(address.query).get("have", [""])[0])
                    if content is None:
                        return self._answer(304, "", b"")
                    return self._answer(200, "application/json", content)
            except CopflError as error:  # a file that is being replaced, or a deleted folder
                return self._answer(503, "text/plain; charset=utf-8", f"{error}\n".encode())
            return self._answer(404, "text/plain", b"nothing here\n")

        def _answer(self, code: int, kind: str, content: bytes) -> None:
            self.send_response(code)
            if kind:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    return ThreadingHTTPServer((HOST, port), Handler)
