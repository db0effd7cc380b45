from __future__ import annotations

import http.client
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from copfl.cli import report
from copfl.errors import RunError
from copfl.report import serving
from copfl.report.page import RunsPage
from copfl.report.serving import PageServer
from tests.commands import called, command, environment
from tests.report.test_page import data_of


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A run that has come to its second round."""
    shutil.copytree(runs["copfl"], tmp_path / "run")
    for name in ("rounds.jsonl", "timing.jsonl"):
        lines = (runs["copfl"] / name).read_bytes().splitlines(keepends=True)
        (tmp_path / "run" / name).write_bytes(b"".join(lines[:2]))
    return tmp_path / "run"


class Words:
    """A page of a few words, which counts how often it is rendered."""

    def __init__(self) -> None:
        self.text, self.rendered, self.seconds = "one", 0, 0.0

    def fingerprint(self) -> str:
        return self.text

    def html(self, fingerprint: str = "") -> str:
        self.rendered += 1
        time.sleep(self.seconds)
        if self.text == "gone":
            raise RunError("there is no folder")
        return self.text


Serve = Callable[..., PageServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, and ends them after the test."""
    started = []

    def start(page: serving.Page) -> PageServer:
        server = PageServer(page, 0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    content: bytes


def answered(server: PageServer, path: str | None = None, method: str = "GET", **headers: str) -> Answer:
    """The answer to a request; by default of the page's own address."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.server_address[1]), timeout=20)
    connection.request(method, f"/{server.token}/" if path is None else path, headers=headers)
    answer = connection.getresponse()
    result = Answer(answer.status, answer.headers, answer.read())
    connection.close()
    return result


def asked(server: PageServer, query: str = "") -> tuple[int, str, bytes]:
    answer = answered(server, f"/{server.token}/{query}")
    return answer.status, answer.headers.get("Content-Type", ""), answer.content


def test_the_page_and_its_news(serve: Serve, run: Path, runs: dict[str, Path]) -> None:
    server = serve(RunsPage([run]))
    code, kind, html = asked(server)
    assert (code, kind) == (200, "text/html; charset=utf-8")
    assert b"2 of 5 rounds" in html
    assert b"connect-src 'self'" in html
    first = data_of(html.decode())
    assert not first["ended"]
    assert len(first["figures"]["accuracy"]["lines"][0]["y"]) == 2
    assert asked(server, f"?have={first['fingerprint']}") == (304, "", b"")  # nothing new
    for name in ("rounds.jsonl", "timing.jsonl"):
        shutil.copy(runs["copfl"] / name, run / name)
    server._next_look = 0.0  # it would wait, so as not to take a whole core
    update = asked(server, f"?have={first['fingerprint']}")[2].decode()
    second = data_of(update)
    assert len(second["figures"]["accuracy"]["lines"][0]["y"]) == 5
    assert second["ended"]
    assert '<p id="part-subtitle">5 rounds, 4 sites' in update
    assert '<th scope="row">5</th>' in update


def test_the_address_has_a_token_that_nobody_guesses(serve: Serve) -> None:
    server = serve(Words())
    assert answered(server).status == 200
    assert len(server.token) >= 43  # 256 bits
    assert serve(Words()).token != server.token
    for path in ("/", "", "//", f"/{server.token[:-1]}/", f"/{server.token}x/", "/%00/", "/?have=one"):
        answer = answered(server, path)
        assert (answer.status, answer.content) == (
            403,
            b"the address that the command printed has a token\n",
        ), path


def test_no_file_is_served_by_name(serve: Serve, run: Path) -> None:
    server = serve(RunsPage([run]))
    for path in (
        "rounds.jsonl",
        "run.toml",
        "../run.toml",
        "%2e%2e/run.toml",
        "..%2frun.toml",
        "//etc/passwd",
        ".",
    ):
        assert answered(server, f"/{server.token}/{path}").status in (403, 404), path
    assert answered(server, f"/{server.token}").status == 404


def test_another_sites_name_that_leads_here_is_refused(serve: Serve) -> None:
    server = serve(Words())
    port = server.server_address[1]
    for host in (
        f"evil.example:{port}",
        "evil.example",
        "127.0.0.1",
        "127.0.0.1:1",
        f"127.0.0.1.evil.example:{port}",
        "",
    ):
        assert answered(server, Host=host).status == 403, host
    assert answered(server, Host=f"localhost:{port}").status == 200
    path = f"/{server.token}/"
    for lines in (
        f"GET {path} HTTP/1.0",
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nHost: evil.example",
    ):
        assert b" 403 " in raw(server, f"{lines}\r\n\r\n".encode())[:40]  # no host, and two


def raw(server: PageServer, request: bytes) -> bytes:
    """The answer to these bytes."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) as connection:
        connection.sendall(request)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "PROPFIND"])
def test_no_other_method_is_answered(serve: Serve, method: str) -> None:
    answer = answered(serve(Words()), method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")


def test_the_browser_is_told_to_keep_the_page_to_itself(serve: Serve) -> None:
    server = serve(Words())
    for answer in (answered(server), answered(server, "/"), answered(server, method="POST")):
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
    policy = answered(server).headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "Python" not in str(answered(server).headers)


def test_a_request_that_is_too_long_or_none_is_refused(serve: Serve) -> None:
    server = serve(Words())
    assert b" 414 " in raw(server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")[:40]
    assert b" 431 " in raw(server, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n")[:40]
    assert raw(server, b"\x16\x03\x01 nonsense\r\n\r\n") == b"Bad Request\n"
    assert b" 403 " in raw(server, "GET /\xe9\U0001f600/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())[:40]
    assert answered(server).status == 200


def test_idle_connections_are_few_and_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving._Handler, "timeout", 0.5)
    server, threads = serve(Words()), threading.active_count()
    idle = [
        socket.create_connection(("127.0.0.1", server.server_address[1]))
        for _ in range(2 * serving.MOST_CONNECTIONS)
    ]
    try:
        time.sleep(0.2)
        assert threading.active_count() <= threads + serving.MOST_CONNECTIONS
        deadline = time.monotonic() + 20
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.05)
        assert answered(server).status == 200
    finally:
        for connection in idle:
            connection.close()


def test_many_readers_cost_one_rendering_and_a_slow_page_is_rendered_seldom(serve: Serve) -> None:
    page = Words()
    page.seconds = 0.1
    server = serve(page)
    readers = [threading.Thread(target=answered, args=[server]) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert page.rendered == 1
    page.text = "two"
    assert asked(server)[2] == b"one"  # the next look is after nine times as long
    server._next_look = 0.0
    assert asked(server)[2] == b"two"
    assert asked(server, "?have=two")[0] == 304


def test_a_folder_that_went_away_is_said(serve: Serve) -> None:
    page = Words()
    server = serve(page)
    page.text = "gone"
    assert asked(server) == (503, "text/plain; charset=utf-8", b"there is no folder\n")


@pytest.mark.job
def test_the_command_says_where_it_listens_and_ends_with_ctrl_c(run: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("watch", run, "--port", "0"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        try:
            address = process.stdout.readline().split()[0]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=20) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()  # `with` waits for its end, however the test goes


def test_the_browsers_command_line_has_no_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All users of a machine can read it."""
    opened = []

    def open_(address: str) -> None:
        link = Path(address.removeprefix("file://"))
        opened.append((address, link.read_text(), link.parent.stat().st_mode & 0o777))

    monkeypatch.setattr(webbrowser, "open", open_)
    monkeypatch.setattr(PageServer, "serve_forever", lambda server: None)
    report.serve(Words(), 0, browse=True)
    ((address, content, mode),) = opened
    token = capsys.readouterr().out.split("/")[3]
    assert token not in address
    assert f"/{token}/" in content
    assert mode == 0o700


def test_what_is_wrong_is_said_before_it_listens(
    run: Path, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = serve(Words()).server_address[1]
    answer = called(capsys, "watch", tmp_path)
    assert answer.code == 2
    assert "is not a run folder" in answer.err
    answer = called(capsys, "watch", run, "--port", port)
    assert answer.code == 2
    assert f"cannot listen on port {port}" in answer.err
