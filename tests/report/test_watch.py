from __future__ import annotations

import http.client
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from copfl.report import watch
from tests.commands import called, command, environment
from tests.report.test_page import data_of

Answer = tuple[int, str, bytes]


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A run that has come to its second round."""
    shutil.copytree(runs["copfl"], tmp_path / "run")
    for name in ("rounds.jsonl", "timing.jsonl"):
        lines = (runs["copfl"] / name).read_bytes().splitlines(keepends=True)
        (tmp_path / "run" / name).write_bytes(b"".join(lines[:2]))
    return tmp_path / "run"


@pytest.fixture
def port(run: Path) -> Iterator[int]:
    server = watch.server([run], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield int(server.server_address[1])
    server.shutdown()
    thread.join()
    server.server_close()


def asked(port: int, path: str, host: str | None = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    result = answer.status, answer.headers.get("Content-Type", ""), answer.read()
    connection.close()
    return result


def test_the_page_and_its_news(port: int, run: Path, runs: dict[str, Path]) -> None:
    code, kind, html = asked(port, "/")
    assert (code, kind) == (200, "text/html; charset=utf-8")
    assert b"2 of 5 rounds" in html
    assert b"connect-src 'self'" in html
    first = data_of(html.decode())
    assert not first["ended"]
    assert len(first["figures"]["accuracy"]["lines"][0]["y"]) == 2
    assert asked(port, f"/?have={first['fingerprint']}") == (304, "", b"")  # nothing new
    for name in ("rounds.jsonl", "timing.jsonl"):
        shutil.copy(runs["copfl"] / name, run / name)
    update = asked(port, f"/?have={first['fingerprint']}")[2].decode()
    second = data_of(update)
    assert len(second["figures"]["accuracy"]["lines"][0]["y"]) == 5
    assert second["ended"]
    assert '<p id="part-subtitle">5 rounds, 4 clients' in update
    assert '<th scope="row">5</th>' in update


def test_no_file_is_served_by_name(port: int) -> None:
    for path in ("/rounds.jsonl", "/run.toml", "/../run.toml", "/%2e%2e/run.toml", "/models/", "/index.html"):
        assert asked(port, path)[0] == 404, path


def test_another_sites_name_that_leads_here_is_refused(port: int) -> None:
    assert asked(port, "/", host=f"evil.example:{port}")[0] == 403
    assert asked(port, "/", host=f"localhost:{port}")[0] == 200


def test_a_folder_that_went_away_is_said(port: int, run: Path) -> None:
    shutil.rmtree(run)
    code, _, content = asked(port, "/")
    assert code == 503
    assert b"there is no folder" in content


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
            assert asked(int(address.rstrip("/").rpartition(":")[2]), "/?have=")[0] == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()  # `with` waits for its end, however the test goes


def test_what_is_wrong_is_said_before_it_listens(
    run: Path, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = called(capsys, "watch", tmp_path)
    assert answer.code == 2
    assert "is not a run folder" in answer.err
    answer = called(capsys, "watch", run, "--port", port)
    assert answer.code == 2
    assert f"cannot listen on port {port}" in answer.err
