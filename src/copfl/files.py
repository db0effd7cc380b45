"""Atomic writes, and a lock that ends with the process that took it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from copfl.errors import RunError


class Busy(RunError):
    """Another process has the lock."""


def write_bytes(path: Path, content: bytes, durable: bool = True, private: bool = False) -> None:
    """Replaces the file at the path atomically: a reader sees the old content or the new one.

    `durable`: the content is on disk before it is visible. `private`: only the owner may read it.
    """
    write_with(path, lambda part: part.write_bytes(content), durable, private)


def write_with(
    path: Path, write: Callable[[Path], object], durable: bool = True, private: bool = False
) -> None:
    """`write_bytes` for a function that writes the content to the path it is given."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        if private:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
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
            "then run again, or `copfl resume` if rounds are done"
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
    for pattern in (".*.part", ".*.tmp"):
        for part in folder.glob(pattern):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Takes the lock file at the path, in an existing folder, and removes it at the end; Busy if it is taken.

    The operating system releases the lock when the process ends, however it ends.
    """
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            current = os.path.samestat(os.fstat(handle), os.stat(path))  # its last owner may have removed it
        except (BlockingIOError, FileNotFoundError):
            current = False
        if not current:
            raise Busy(f"another process is working in {path.parent}; wait for it, or name another folder")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)
