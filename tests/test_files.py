"""Files are written atomically, and a lock ends with its process."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from copfl import files
from copfl.errors import RunError


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "state"
    files.write_bytes(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(RunError, match=r"cannot write .*state: No space left on device; free some space"):
        files.write_bytes(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"state": b"old"}


def test_a_private_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "clients" / "state"
    files.write_bytes(path, b"secret", private=True)
    assert path.read_bytes() == b"secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    for name in (".state.part", ".state.77.part", ".partition.json.77.tmp", "state", "notes.part"):
        (tmp_path / name).touch()
    files.remove_parts(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.part", "state"]
    files.remove_parts(tmp_path / "missing")


def test_one_process_at_a_time_has_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with files.locked(lock):
        message = f"another process is working in {tmp_path}; wait for it"
        with pytest.raises(files.Busy, match=message), files.locked(lock):
            pass
        assert lock.exists()
    assert not lock.exists()
    with files.locked(lock):
        pass


HOLDER = """
import sys, pathlib, copfl.files
with copfl.files.locked(pathlib.Path(sys.argv[1])):
    print("taken", flush=True)
    sys.stdin.read()
"""


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    command = [sys.executable, "-c", HOLDER, str(lock)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"taken\n"
    with pytest.raises(files.Busy), files.locked(lock):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with files.locked(lock):
        pass


KILLED_WHILE_IT_WRITES = """
import os, pathlib, signal, sys, copfl.files
write = os.pwrite
def half(handle, content, start):
    write(handle, content[: len(content) // 2], start)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwrite = half
with copfl.files.locked(pathlib.Path(sys.argv[1])):
    pass
"""


def test_a_process_that_is_killed_while_it_creates_a_lock_leaves_none(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(lock)])
    assert done.returncode == -signal.SIGKILL
    with files.locked(lock):
        assert len(lock.read_bytes()) == 64


def test_a_lock_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links")

    monkeypatch.setattr(os, "link", refuse)
    lock = tmp_path / ".lock"
    with files.locked(lock), pytest.raises(files.Busy), files.locked(lock):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_another_machine_is_respected_until_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a shared file system where `flock` is known to one machine alone."""
    lock = tmp_path / ".lock"
    for content in (b"another".ljust(64), b""):  # empty: its owner has just created it
        lock.write_bytes(content)
        with pytest.raises(files.Busy), files.locked(lock):
            pass
        assert lock.read_bytes() == content
        past = time.time() - files.SILENCE - 1
        os.utime(lock, (past, past))
        with files.locked(lock):
            assert len(lock.read_bytes()) == 64
    # Two machines take it over at once: the one that wrote last has it.
    lock.touch()
    os.utime(lock, (past, past))
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.write_bytes(b"another".ljust(64)))
    with pytest.raises(files.Busy), files.locked(lock):
        pass


def test_the_owner_of_a_lock_renews_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BEAT", 0.01)
    lock = tmp_path / ".lock"
    with files.locked(lock):
        os.utime(lock, (0, 0))
        deadline = time.monotonic() + 10
        while lock.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.stat().st_mtime > 0


def test_who_waits_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    lock, released = tmp_path / ".lock", threading.Event()

    def hold() -> None:
        with files.locked(lock):
            taken.set()
            released.wait(10)

    taken = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(10)
    threading.Timer(0.1, released.set).start()
    with files.locked(lock, wait=10):
        pass
    holder.join()


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    for name in (f".report.html.{os.getpid()}.part", "report.html"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    for private in (False, True):
        files.write_bytes(tmp_path / "report.html", b"new", private=private)
        assert (tmp_path / "victim").read_text() == "precious"
        assert (tmp_path / "report.html").read_bytes() == b"new"


def test_a_lock_that_is_a_link_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    os.utime(tmp_path / "victim", (0, 0))
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"), files.locked(tmp_path / "lock"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"
