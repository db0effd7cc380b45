"""Transfers from a server on this machine: whole, broken off, resumed, refused."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from copfl.data.sets.datasets import DATASETS
from copfl.data.sets.download import ADVICE, PUBLISHED, RemoteFile, advice, fetch, get, is_pinned
from copfl.errors import DataError, UsageError

CONTENT = bytes(range(256)) * 40
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT at /set.tar; the attributes set its behaviour."""

    ranges = True  # whether it knows about Range
    breaks_after: int | None = None  # sends this many bytes of what it promised
    declares_length = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []  # the Range of every request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/set.tar"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        if self.path != "/set.tar":
            self.send_error(404)
            return
        start = int(re.findall(r"\d+", asked)[0]) if asked and self.server.ranges else 0
        if start >= len(CONTENT):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = CONTENT[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        if self.server.declares_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.breaks_after])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_whole_transfer(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    target = tmp_path / "new" / "set.tar"
    assert fetch(server.url, target, MD5, lambda done, total: seen.append((done, total))) == target
    assert target.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [path.name for path in target.parent.iterdir()] == ["set.tar"]


def test_what_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar").write_bytes(CONTENT)
    fetch(server.url, tmp_path / "set.tar", MD5)
    assert server.asked == []


def test_what_is_there_but_wrong_is_left_alone_and_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar").write_bytes(b"else")
    with pytest.raises(DataError, match=r"set\.tar exists, but has md5"):
        fetch(server.url, tmp_path / "set.tar", MD5)
    assert (tmp_path / "set.tar").read_bytes() == b"else"


def test_a_broken_transfer_is_resumed(server: Server, tmp_path: Path) -> None:
    target, part = tmp_path / "set.tar", tmp_path / "set.tar.part"
    server.breaks_after = 3000
    with pytest.raises(DataError, match=r"ended after 3,000 of 10,240 bytes.*same command again"):
        fetch(server.url, target, MD5)
    assert part.read_bytes() == CONTENT[:3000]
    assert not target.exists()

    server.breaks_after = None
    seen: list[tuple[int, int | None]] = []
    fetch(server.url, target, MD5, lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=3000-"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert not part.exists()


def test_a_server_without_range_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.part").write_bytes(CONTENT[:3000])
    server.ranges = False
    fetch(server.url, tmp_path / "set.tar", MD5)
    assert (tmp_path / "set.tar").read_bytes() == CONTENT


def test_a_server_that_does_not_say_how_long(server: Server, tmp_path: Path) -> None:
    server.declares_length = False
    seen: list[tuple[int, int | None]] = []
    fetch(server.url, tmp_path / "set.tar", MD5, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(CONTENT), None)


def test_a_part_that_is_already_whole(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.part").write_bytes(CONTENT)
    fetch(server.url, tmp_path / "set.tar", MD5)
    assert (tmp_path / "set.tar").read_bytes() == CONTENT


@pytest.mark.parametrize("part", [b"", b"other" * 10, b"longer than the file" * 1000])
def test_wrong_checksum_removes_the_part(server: Server, tmp_path: Path, part: bytes) -> None:
    if part:
        (tmp_path / "set.tar.part").write_bytes(part)
    with pytest.raises(DataError, match=f"instead of {'0' * 32}; it has been removed"):
        fetch(server.url, tmp_path / "set.tar", "0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_404_is_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing answers 404 Not Found"):
        fetch(server.url.replace("set.tar", "nothing"), tmp_path / "set.tar", MD5)
    assert list(tmp_path.iterdir()) == []


def test_connection_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(DataError, match=r"cannot be reached: .*refused"):
            fetch(f"http://127.0.0.1:{taken.getsockname()[1]}/set.tar", tmp_path / "set.tar", MD5)


def test_only_http(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="https://"):
        fetch("file:///etc/hostname", tmp_path / "set.tar", MD5)


def test_a_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be written"):
        fetch(server.url, tmp_path / "file" / "set.tar", MD5)


def test_get_knows_names_and_takes_another_address(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        PUBLISHED, "cifar10", (RemoteFile("https://example.invalid/cifar.tar.gz", MD5, "cifar.tar.gz"),)
    )
    assert get("cifar10", tmp_path, url=server.url) == tmp_path / "cifar.tar.gz"


def test_get_says_how_where_there_is_no_address(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Mini-ImageNet has no open address.*<wnid>"):
        get("mini_imagenet", tmp_path)
    with pytest.raises(DataError, match="scikit-learn"):
        get("digits", tmp_path)
    with pytest.raises(UsageError, match='did you mean "cifar10"'):
        get("cifar1O", tmp_path)


def test_several_files_are_fetched_into_a_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    files = (RemoteFile(server.url, sha256, "svhn/a.mat"), RemoteFile(server.url, "", "svhn/b.mat"))
    monkeypatch.setitem(PUBLISHED, "svhn", files)
    assert get("svhn", tmp_path) == tmp_path / "svhn"
    assert {path.name for path in (tmp_path / "svhn").iterdir()} == {"a.mat", "b.mat"}
    assert not is_pinned("svhn")
    with pytest.raises(UsageError, match="svhn has 2 files, so --url cannot name them"):
        get("svhn", tmp_path, url=server.url)
    (tmp_path / "svhn" / "a.mat").write_bytes(b"other")
    with pytest.raises(DataError, match=f"has sha256 [0-9a-f]{{64}} instead of {sha256}; delete it first"):
        get("svhn", tmp_path)


def test_every_address_is_https_or_pinned_and_every_digest_well_formed() -> None:
    assert [name for name in PUBLISHED if not is_pinned(name)] == ["uci_har"]
    for name, files in PUBLISHED.items():
        for file in files:
            assert file.url.startswith("https://" if not file.digest else ("https://", "http://"))
            assert re.fullmatch("[0-9a-f]{32}|[0-9a-f]{64}|", file.digest)
        assert f"copfl data get {name}" in advice(name)
    assert PUBLISHED.keys() | ADVICE.keys() == DATASETS.keys()
