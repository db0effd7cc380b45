"""Where the things of an app's folder and of a node's folder are. Without torch.

Every command that is given a folder asks here: `read_app` is an error where the folder holds no app.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any

from copfl import foreign
from copfl.errors import RunError, UsageError, raised_as
from copfl.federation.protocol.chained_log import AUDIT
from copfl.federation.protocol.node_config import WORKER

DATABASE = "superlink.db"  # in the app's folder


AGREEMENTS = "agreements"  # in the app's folder: a folder for each run that agreed on the data contract


CONTACT, LAST_ERROR = "contact", "last-error.json"  # in the folder of a node's worker
WAITS = "waits"  # there too: why its node is not connected, while it tries to be
LEFT = "left"  # there too: the owner has ended the participation
INVITATION = "invitation.json"  # in the folder of a site that joined: what its owner consented to


FLOWER_HOME = ".flwr"  # in the app's folder: where the `flwr` command finds the SuperLink


LOCAL_HOME = ".flwr/local"  # the same, for a federation on one machine


def read_app(folder: Path) -> dict[str, Any]:
    """The host, port and security of the app in the folder, and its run config."""
    none = f"{folder} holds no app of copfl ({{}}); create one with `copfl federate init {folder}`"
    with raised_as(RunError, none, OSError, *foreign.DAMAGE):
        tool = foreign.toml_of(foreign.read_bytes(folder / "pyproject.toml"))["tool"]
        config = {key: value for key, value in tool["flwr"]["app"]["config"].items() if key != "proposal"}
        about = tool["copfl"]
        if not isinstance(about["host"], str) or type(about["port"]) is not int:
            raise ValueError("its server has no host and port")
        return {**about, "config": config}


def is_node(folder: Path) -> bool:
    """Whether the folder is the state-dir of a node."""
    return (folder / WORKER).is_dir() or any(folder.glob("*/client.json"))


def check_site(folder: Path) -> None:
    """UsageError if there is no such folder, with the folders of sites beside it."""
    if not folder.is_dir():
        there = ", ".join(map(str, sorted(file.parent for file in folder.parent.glob(f"*/{INVITATION}"))))
        what = f"name that of a site: {there}" if there else "join first: copfl site join FILE --data FILE"
        raise UsageError(f"there is no folder {folder}; {what}")


def check_app_or_site(folder: Path) -> None:
    """UsageError if the folder is neither an app's nor the state-dir of a node."""
    if not is_node(folder) and not (folder / "pyproject.toml").is_file():
        what = f"{folder} is no folder" if folder.is_dir() else f"there is no folder {folder}; name one"
        raise UsageError(f"{what} of `copfl site join` or `copfl federate init`")


def is_locked(path: Path) -> bool:
    """Whether a process has the lock; it is removed at the end, or left by a kill."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


def run_names(path: Path) -> list[str]:
    """The names of the runs; the last one was written to last."""
    written = {}
    for run in path.glob("*"):
        times = [file.stat().st_mtime for name in (AUDIT, "rounds.jsonl") if (file := run / name).exists()]
        if times or (run / "config.json").exists():
            written[run.name] = max(times, default=run.stat().st_mtime)
    return sorted(written, key=lambda name: written[name])


def superlink_address(folder: Path, app: dict[str, Any]) -> tuple[str, int]:
    """Where the SuperLink is, seen from this machine: the one of `up` while it runs, or else the server's.

    Args:
        folder: The folder of the app.
        app: What `read_app` gives of it.
    """
    home = LOCAL_HOME if is_locked(folder / LOCAL_HOME / "lock") else FLOWER_HOME
    with contextlib.suppress(OSError, *foreign.DAMAGE):
        flower = foreign.toml_of(foreign.read_bytes(folder / home / "config.toml"))
        host, _, port = flower["superlink"]["copfl"]["address"].rpartition(":")
        return host, int(port)
    return str(app["host"]), int(app["port"])


def last_run(folder: Path) -> str:
    """The run in the folder with the newest checkpoint."""
    runs = folder / "runs"
    checkpoints = sorted(runs.glob("*/server.copfl"), key=lambda path: path.stat().st_mtime)
    if not checkpoints:
        raise RunError(f"no run in {runs} has a finished round; start one with `copfl federate up {folder}`")
    return checkpoints[-1].parent.name
