"""Flower's SuperLink, which starts no code but copfl's own and the code of its own folder.

Whoever reaches the SuperLink's control interface can submit an app, and Flower executes its ServerApp. Here
an app is refused when it is submitted, unless its ServerApp is copfl's, its other files are the same
in the server's folder, and the policy of the server's owner allows its run config.
"""

import io
import logging
import os
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from copfl.errors import CopflError, UsageError
from copfl.federation.machines.planes import Planes
from copfl.federation.policy.file import server_policy
from copfl.federation.policy.refusal import PolicyError
from copfl.federation.policy.request import refusals
from copfl.federation.protocol.log_lines import logger
from copfl.federation.protocol.messages import printable
from copfl.federation.protocol.proposal import KEY
from copfl.federation.server.membership import server_proposal

COMPONENTS = {
    "serverapp": "copfl.federation.machines.server_app:app",
    "clientapp": "copfl.federation.machines.client_app:app",
}
MANIFEST, PROJECT = ".info/CONTENT", "pyproject.toml"
MOST_BYTES = 2**20  # of these two
# Of Flower, for a node whose key is not registered.
NOT_ADMITTED = "No SuperNode found with the given public key"
START = 300  # seconds that a ServerApp may take to start, as Flower's 30 are not enough on a busy machine


def check_app(content: bytes, folder: Path) -> None:
    """UsageError if an app would execute anything but copfl and files of the folder.

    Args:
        content: A Flower app as a file; another machine's.
        folder: The server's, of its own app.
    """
    from copfl.federation.machines.flower_api import get_fab_config

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files = archive.namelist()
            if len(files) != len(set(files)):
                raise UsageError("a file is in it twice")
            for name in files:
                if name not in (MANIFEST, PROJECT) and not _is_own(folder, name, archive):
                    raise UsageError(f"its file {printable(name, 60)!r} is not that of the server's folder")
                if name in (MANIFEST, PROJECT) and archive.getinfo(name).file_size > MOST_BYTES:
                    raise UsageError(f"its file {name} has more than {MOST_BYTES:,} bytes")
            listed_files = [line.partition(",")[0] for line in archive.read(MANIFEST).decode().splitlines()]
        if other := [name for name in listed_files if name not in files]:  # Flower opens each of them
            raise UsageError(f"it lists {printable(other[0], 60)!r}, which is not in it")
        project, of_folder = get_fab_config(content), tomllib.loads((folder / PROJECT).read_text())
        names = [
            (
                app["project"]["name"],
                app["project"]["version"],
                app["tool"]["flwr"]["app"]["publisher"],
            )
            for app in (project, of_folder)
        ]
        components = project["tool"]["flwr"]["app"]["components"]
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError("it is no app of Flower") from error
    if names[0] != names[1]:  # Flower makes the path of a folder of them
        raise UsageError("its name, version or publisher is not that of the server's app")
    if components != COMPONENTS:
        raise UsageError(f"its components must be {COMPONENTS['serverapp']} and {COMPONENTS['clientapp']}")


def _is_own(folder: Path, name: str, archive: zipfile.ZipFile) -> bool:
    """Whether a file of the archive is the same in the folder."""
    path = folder / name
    is_inside = path.resolve().is_relative_to(folder.resolve()) and ".." not in path.parts
    if not is_inside or not path.is_file() or archive.getinfo(name).file_size != path.stat().st_size:
        return False
    return archive.read(name) == path.read_bytes()


def check_run(request: Any, folder: Path) -> None:
    """CopflError if a request for a run is refused.

    Args:
        request: Flower's, for a run.
        folder: The server's, of its own app.
    """
    from copfl.federation.machines.flower_api import (
        flatten_dict,
        fuse_dicts,
        get_fab_config,
        user_config_from_proto,
    )

    if request.app_spec or not request.fab.content:
        raise UsageError("this server executes the app of its own folder alone")
    check_app(request.fab.content, folder)
    config = flatten_dict(get_fab_config(request.fab.content)["tool"]["flwr"]["app"].get("config"))
    run_config = fuse_dicts(config, user_config_from_proto(request.override_config))
    policy = server_policy()
    if refused := refusals(policy, {key: v for key, v in run_config.items() if key != KEY}):
        raise PolicyError(refused)
    server_proposal(policy, run_config)  # an error if it is not a coordinator's


def give_time_to_start(corestate: Any) -> None:
    """Lets a ServerApp take START seconds until it runs.

    Flower takes one for lost after 30 seconds, and starts it again beside the first, so that on a busy machine
    each makes the next one slower and none ever runs. One that runs is lost after 60 seconds of silence, as before.

    Args:
        corestate: Flower's module of its database, whose two constants are for this alone.
    """
    silence = corestate.HEARTBEAT_PATIENCE * corestate.HEARTBEAT_DEFAULT_INTERVAL
    corestate.HEARTBEAT_DEFAULT_INTERVAL, corestate.HEARTBEAT_PATIENCE = START, silence / START


def is_shown(record: logging.LogRecord) -> bool:
    """Whether the coordinator reads a line of Flower's log.

    A node asks every five seconds until its key is admitted, and each time Flower logs an error with the key.
    """
    return NOT_ADMITTED not in str(record.msg)


def outermost(folder: Path) -> tuple[Any, ...]:
    """The middleware before Flower's.

    Args:
        folder: The server's, of its own app.
    """
    from starlette.middleware import Middleware

    from copfl.federation.machines.admission import Admission
    from copfl.federation.machines.bodies import Bodies

    return Middleware(Planes), Middleware(Bodies), Middleware(Admission, folder=folder)


def main() -> None:
    """`flower-superlink`, with the check before every run, and two planes; the folder is the current one."""
    from copfl.federation.machines.connections import limit_connections
    from copfl.federation.machines.flower_api import (
        ApiErrorCode,
        FlowerError,
        control_handlers,
        extensions,
        flower_superlink,
        sql_corestate,
        superlink_module,
    )

    folder, start_run = Path.cwd(), control_handlers.start_run
    server_policy()  # an error in it is reported before anything is served
    os.umask(0o077)  # the database has the messages of all runs

    def checked(request: Any, *args: Any, **options: Any) -> Any:
        try:
            check_run(request, folder)
        except (CopflError, ValueError, KeyError, TypeError) as error:
            text = printable(f"copfl refuses the app: {error}")
            raise FlowerError(ApiErrorCode.INVALID_RUN_CONFIG, text, text) from error
        return start_run(request, *args, **options)

    control_handlers.start_run = checked
    extensions.get_middleware = lambda: outermost(folder)
    logger.addFilter(is_shown)
    limit_connections(superlink_module)
    give_time_to_start(sql_corestate)
    os.environ["FORWARDED_ALLOW_IPS"] = "127.0.0.1"  # only a proxy on this machine names its clients
    flower_superlink()


if __name__ == "__main__":
    main()
