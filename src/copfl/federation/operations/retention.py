"""What a server or a node may forget: old runs, apps and logs, but nothing of a running one. Without torch.

A node's memory of its data stays: the sums in which they were, the epsilon that they have spent, and of each
run which rounds had noise. Otherwise a run of the same name could be asked for again.
"""

import shutil
import time
from pathlib import Path
from typing import NamedTuple

from copfl.errors import at_least
from copfl.federation.protocol.app_folder import FLOWER_HOME, is_locked, is_node, read_app

DAYS, KEEP = 90.0, 5  # defaults
DAY = 24 * 3600.0
# In a node's folder of a run.
REMEMBERED = ("noised.json", "secure.json", "halves.json", "client.json", "asked.json")


class Removed(NamedTuple):
    path: str  # in the folder
    bytes: int


def clean(folder: Path, *, days: float = DAYS, keep: int = KEEP, is_rehearsal: bool = False) -> list[Removed]:
    """Removes what was written last before so many days, and is not of the last runs.

    Args:
        folder: Of the app, or a node's state-dir.
        days: Since the last change.
        keep: Of the last runs, so many stay whatever their age; at least 1.
        is_rehearsal: Whether nothing is removed.
    """
    at_least(1, keep=keep)
    at_least(0, days=days)
    oldest = time.time() - days * DAY
    if is_node(folder):
        runs = {path.parent for name in ("client.json", "round-*.copfl") for path in folder.glob(f"*/{name}")}
        further_paths: list[Path] = []
    else:
        read_app(folder)  # an error if it is no app
        runs = {path for path in (folder / "runs").glob("*") if path.is_dir()}
        is_running = any(is_locked(run / ".lock") for run in runs)
        apps = [] if is_running else (folder / FLOWER_HOME).glob("apps/*")  # old ones are used again
        further_paths = [*folder.glob("logs/*.log"), *apps]
    ended = sorted((run for run in runs if not is_locked(run / ".lock")), key=_written)
    old = [path for path in ended[: -keep or None] if _written(path) < oldest]
    removed = []
    for path in [*old, *(file for file in further_paths if _written(file) < oldest)]:
        files_in_path = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        removable = [file for file in files_in_path if not (is_node(folder) and file.name in REMEMBERED)]
        if removable:
            removed.append(
                Removed(str(path.relative_to(folder)), sum(file.stat().st_size for file in removable))
            )
        if is_rehearsal:
            continue
        if is_node(folder):
            for file in removable:
                file.unlink(missing_ok=True)
            for file in sorted(path.rglob("*"), reverse=True):  # of the bundle; a folder after its content
                if file.is_dir() and not any(file.iterdir()):
                    file.rmdir()
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return removed


def _written(path: Path) -> float:
    """When a file, or the last file in a folder, was written."""
    return max((file.stat().st_mtime for file in (path, *path.rglob("*")) if file.exists()), default=0.0)
