"""Small files of a federation: written whole, readable by this user alone. Without torch."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from copfl.errors import RunError, raised_as
from copfl.files import write_bytes


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, json.dumps(content).encode(), private=True)


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
