"""Small files of a federation: read with one error, written whole, readable by this user alone. Without torch.

A node's and a server's small JSON files are read with `stored`. What only one process may read and write again, such
as what was given away, is done within `alone`.
"""

import json
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from copfl import foreign
from copfl.errors import RunError, raised_as
from copfl.files import locked, write_bytes

T = TypeVar("T")
WAIT = 60.0  # seconds for another process that has a file


def stored(
    path: Path,
    parse: Callable[[Any], T],
    empty: object = None,
    damaged: str = "{name} cannot be used: {}; restore the node's state-dir",
) -> T:
    """What a file of JSON has; RunError if it is damaged.

    Args:
        path: The file.
        parse: Makes the value of its content.
        empty: Its content where there is no file; None: that is an error.
        damaged: The text of the error.
    """
    with raised_as(RunError, damaged.replace("{name}", path.name), OSError, *foreign.DAMAGE):
        is_missing = empty is not None and not path.exists()
        return parse(empty if is_missing else foreign.read_json(path))


def write_json(path: Path, content: Any) -> None:
    """Replaces a file of JSON: a reader sees the old content or the new one.

    Args:
        path: The file, which this user alone can read afterwards.
        content: What JSON can say.
    """
    write_bytes(path, json.dumps(content).encode(), private=True)


def alone(path: Path) -> AbstractContextManager[None]:
    """The right to read a file and write it: without it two processes would both give what is given once."""
    return locked(path.with_suffix(".lock"), WAIT)


def private_folder(path: Path) -> Path:
    """The folder, which only this user can open; RunError if it is another's."""
    with raised_as(RunError, f"cannot create {path}: {{}}; choose another state-dir", OSError):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = path.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        raise RunError(f"{path} is not a folder of this user; remove it, or choose another state-dir")
    if stat.S_IMODE(state.st_mode) & 0o077:
        path.chmod(0o700)
    return path
