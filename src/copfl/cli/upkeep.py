"""What both roles of a federation do with their folder: its state, old runs, and backups."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli.federate.options import AppOrStateFolder, RunName
from copfl.cli.options import argument, option


def status(
    *,
    folder: AppOrStateFolder,
    run: RunName = None,
    check: Annotated[bool, option("Output", "Exit code 1 if there is a problem.", "--check")] = False,
    waiting: Annotated[
        float | None,
        option("Output", "A round that waits so many seconds for a client is a problem; default: none."),
    ] = None,
    as_json: Annotated[bool, option("Output", "Print JSON.", "--json")] = False,
) -> None:
    """Say whether all is well: connections, rounds, errors and the audit log."""
    from copfl.federation.operations import status as state
    from copfl.tables import plain

    folder_state = state.status(folder, run, math.inf if waiting is None else waiting)
    print(json.dumps(plain(folder_state), indent=1) if as_json else state.as_text(folder_state))
    if check and folder_state["problems"]:
        raise typer.Exit(1)


def clean(
    *,
    folder: AppOrStateFolder,
    days: Annotated[
        float, option("Output", "Remove what was written last before so many days; default: 90.")
    ] = 90.0,
    keep: Annotated[
        int, option("Output", "So many of the last runs stay, whatever their age; default: 5.")
    ] = 5,
    rehearse: Annotated[
        bool, option("Output", "Print what would be removed, and remove nothing.", "--dry-run")
    ] = False,
) -> None:
    """Remove old runs of a server or a node, and a node's old personal models.
    Apps and logs of these runs go with them.
    """
    from copfl.federation.operations.retention import clean as remove

    removed = remove(folder, days=days, keep=keep, is_rehearsal=rehearse)
    for entry in removed:
        print(f"{'would remove' if rehearse else 'removed'} {entry.path}, {entry.bytes:,} bytes")
    if not removed:
        print("nothing is older, and not of the last runs")


def backup(*, folder: AppOrStateFolder, file: Annotated[Path, argument("The archive to write.")]) -> None:
    """Write all files of a server or a node into one archive, private keys too."""
    from copfl.federation.operations.backup import write_backup

    print(write_backup(folder, file))


def restore(
    *,
    file: Annotated[Path, argument("An archive of `copfl federate backup`.")],
    folder: Annotated[Path, argument("A new folder.")],
) -> None:
    """Restore a server or a node into a new folder."""
    from copfl.federation.operations.backup import restore_backup

    print(restore_backup(file, folder))
