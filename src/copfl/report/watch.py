"""The report of a running run, served to this machine alone."""

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from copfl.errors import CopflError
from copfl.report import document, page, run_data

HOST = "127.0.0.1"


def html(paths: Sequence[Path], have: str = "") -> bytes | None:
    """The page; None if its data still have the fingerprint `have`."""
    fingerprint = page.fingerprint_of(paths)
    if fingerprint == have:
        return None
    return document.render(page.document_of(run_data.read_all(paths)), fingerprint).encode()


def server(paths: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server with one address, that of the page; it serves no file by name."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "copfl", ""

        def do_GET(self) -> None:
            # A script of another site can send requests under a host name that resolves to this machine.
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                return self._answer(403, "text/plain", b"use the address 127.0.0.1\n")
            address = urlsplit(self.path)
            if address.path != "/":
                return self._answer(404, "text/plain", b"nothing here\n")
            try:
                content = html(paths, parse_qs(address.query).get("have", [""])[0])
            except CopflError as error:  # a file that is being replaced, or a deleted folder
                return self._answer(503, "text/plain; charset=utf-8", f"{error}\n".encode())
            if content is None:
                return self._answer(304, "", b"")
            return self._answer(200, "text/html; charset=utf-8", content)

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
