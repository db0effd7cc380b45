"""The report of a run that goes on, served to this machine alone."""

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
    """The page and its news, made again when the run folders tell more."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None

    def html(self) -> bytes:
        return page.render(run_data.read_all(self.paths), live=True).encode()

    def news(self, have: str) -> bytes | None:
        """What is new for a page that has the state `have`; None if nothing is."""
        with self._lock:
            stamp = page.stamp_of(self.paths)
            if stamp == have:
                return None
            if self._made is None or self._made[0] != stamp:
                content = {"stamp": stamp, **page.news(run_data.read_all(self.paths))}
                self._made = stamp, page.as_json(content).encode()
            return self._made[1]


def server(watch: Watch, port: int) -> ThreadingHTTPServer:
    """A server for the page; it knows two addresses, and no file by name."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "copfl", ""

        def do_GET(self) -> None:
            # Another site's script can make a browser ask, under a name that leads here; it shall not read the answer.
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                return self._answer(403, "text/plain", b"ask for 127.0.0.1\n")
            address = urlsplit(self.path)
            try:
                if address.path == "/":
                    return self._answer(200, "text/html; charset=utf-8", watch.html())
                if address.path == "/data.json":
                    content = watch.news(parse_qs(address.query).get("have", [""])[0])
                    return self._answer(
                        *((304, "", b"") if content is None else (200, "application/json", content))
                    )
            except CopflError as error:  # a file that is being replaced, or a folder that went away
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
            """Nothing: the terminal is the reader's."""

    return ThreadingHTTPServer((HOST, port), Handler)
