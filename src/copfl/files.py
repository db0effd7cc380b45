"""Atomic writes, and locks that hold on one machine and on the shared file system of a cluster."""

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from copfl.errors import RunError

BEAT = 10.0  # seconds between two signs of life of a lock's owner
SILENCE = 60.0  # seconds without one, after which an owner on another machine counts as dead
SETTLE = 0.5  # seconds in which two machines that take over the same lock notice each other


class Busy(RunError):
    """Another process has the lock."""


def write_bytes(path: Path, content: bytes, durable: bool = True, private: bool = False) -> None:
    """Replaces the file at the path atomically: a reader sees the old content or the new one.

    `durable`: the content is on disk before it is visible. `private`: only the owner may read it.
    """
    write_with(path, lambda part: part.write_bytes(content), durable, private)


def write_json(path: Path, content: object) -> None:
    """Replaces a file of a run folder by what JSON can say, in one line; `copfl.foreign.of_run` reads it.

    Args:
        path: The file.
        content: What it says.
    """
    write_bytes(path, (json.dumps(content) + "\n").encode())


def write_with(
    path: Path, write: Callable[[Path], object], durable: bool = True, private: bool = False
) -> None:
    """`write_bytes` for a function that writes the content to the path it is given."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        part.unlink(missing_ok=True)  # of a process that was killed, or a link that somebody put there
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666))
        write(part)
        if durable:
            _sync(part)
        os.replace(part, path)
        if durable:
            _sync(path.parent)  # the rename itself must survive a power failure
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; free some space or name another folder, "
            "then run again, or resume the run if rounds are done"
        ) from error


def _sync(path: Path) -> None:
    """Flushes a file, or a folder's list of files, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_parts(folder: Path) -> None:
    """Removes the temporary files of a process that was killed while it wrote."""
    for pattern in (".*.part", ".*.tmp") if not folder.is_symlink() else ():
        for part in folder.glob(pattern):
            part.unlink(missing_ok=True)


# Locks


@contextlib.contextmanager
def locked(path: Path, wait: float = 0.0) -> Iterator[None]:
    """Takes the lock file at the path, in an existing folder, and removes it at the end.

    Busy if another process still has it after `wait` seconds. Among the processes of one machine, `flock`
    decides: the operating system releases it when a process ends, however it ends. Some shared file systems
    keep `flock` on each machine alone. So the file is created exclusively, contains the owner's machine, and
    the owner renews its time. The file of another machine is respected until its owner is silent.
    """
    end = time.monotonic() + wait
    while (handle := _taken(path)) is None:
        if time.monotonic() >= end:
            raise Busy(f"another process is working in {path.parent}; wait for it, or name another folder")
        time.sleep(0.05)
    ended = threading.Event()
    beats = threading.Thread(target=_renew, args=(handle, ended), daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()
        path.unlink(missing_ok=True)
        os.close(handle)


def _taken(path: Path) -> int | None:
    """The open lock file, if it is ours now."""
    try:
        return _created(path)
    except FileExistsError:
        pass
    try:
        handle = os.open(
            path, os.O_RDWR | os.O_NOFOLLOW
        )  # the file of another owner, and no link to elsewhere
    except FileNotFoundError:  # its owner has just removed it
        return _taken(path)
    ours = False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        current = os.path.samestat(os.fstat(handle), os.stat(path))  # its last owner may have removed it
        ours = current and _abandoned(handle, path)
    except (BlockingIOError, FileNotFoundError):
        ours = False
    finally:
        if not ours:
            os.close(handle)
    return handle if ours else None


def _created(path: Path) -> int:
    """A new lock file; FileExistsError if there is one.

    It gets its name when it has its `flock` and its content, so a killed process leaves no part of one.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    handle = _owned(draft)
    try:
        os.link(draft, path)
    except FileExistsError:
        os.close(handle)
        raise
    except OSError:  # a file system without hard links
        os.close(handle)
        return _owned(path, os.O_EXCL)
    finally:
        draft.unlink(missing_ok=True)
    return handle


def _owned(path: Path, flags: int = 0) -> int:
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.pwrite(handle, _machine(), 0)
    return handle


def _abandoned(handle: int, path: Path) -> bool:
    """Whether the owner of an existing lock file, whose `flock` is ours, has ended; we are its owner then."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    probe.unlink(missing_ok=True)
    probe.touch(exist_ok=False)  # the clock of the file system, not of this machine
    age = probe.stat().st_mtime - os.fstat(handle).st_mtime
    probe.unlink()
    silent = age > SILENCE
    if not silent and os.pread(handle, 100, 0) != _machine():
        return False
    os.pwrite(handle, _machine(), 0)
    if silent:  # another machine may have come to the same conclusion
        os.fsync(handle)
        time.sleep(SETTLE)
        return path.read_bytes() == _machine()
    return True


def _renew(handle: int, ended: threading.Event) -> None:
    """Renews the time of the lock file until the lock has ended."""
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(handle)


@cache
def _machine() -> bytes:
    """The machine, in 64 bytes: one boot of one kernel, whose containers share `flock` too."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else platform.node()
    return f"{name:64.64}".encode()
