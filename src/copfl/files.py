"""Files that are written atomically: a reader sees the old one or the new one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from copfl.errors import RunError


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Puts the content at the path in one move; if `durable`, on disk before it is visible."""
    put(path, lambda part: part.write_bytes(content), durable)


def put(path: Path, write: Callable[[Path], object], durable: bool = True) -> None:
    """Lets `write` write a file beside the path, and moves it there when it is whole."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        if durable:
            _sync(part)
        os.replace(part, path)
        if durable:
            _sync(path.parent)  # the rename itself must survive a power cut
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; free some space or name another folder, then run again, "
            "or `copfl resume` if rounds are done"
        ) from error


def _sync(path: Path) -> None:
    """Makes a file, or a folder's list of files, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_parts(folder: Path) -> None:
    """Removes what a process that was killed while it wrote has left behind."""
    for pattern in (".*.part", ".*.tmp"):
        for part in folder.glob(pattern):
            part.unlink(missing_ok=True)
