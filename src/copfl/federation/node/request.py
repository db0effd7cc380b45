"""A message of the server with what the node needs to answer it."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from copfl.errors import RunError, raised_as
from copfl.federation.protocol.messages import TRAIN, Content


class Request(NamedTuple):
    """A message of the server, and what the node needs to answer it."""

    run_config: Mapping[str, Any]
    node_config: Mapping[str, Any]
    kind: str = TRAIN  # or JOIN
    content: Content = ("", b"")


class Answer(NamedTuple):
    """What the node sends, and what its audit log says of it."""

    content: Content
    epsilon: float | None = None  # of a noised upload


def private_folder(path: Path) -> Path:
    """The folder, which only this user can open; RunError if it is another's."""
    with raised_as(RunError, f"cannot create {path}: {{}}; choose another state-dir", OSError):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RunError(f"{path} is not a folder of this user; remove it, or choose another state-dir")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path
