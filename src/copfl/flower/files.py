"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from copfl.errors import RunError


def write(path: Path, content: bytes) -> None:
    """Puts the content at the path in one move, on disk before it is seen, readable by its owner alone."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the move itself must survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; free some space or name another folder"
        ) from error
