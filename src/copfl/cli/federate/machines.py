"""`copfl federate`: a federation of several machines, its server, its nodes, and their upkeep."""

import json
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli.federate.options import (
    AppFolder,
    AppOrStateFolder,
    LogFormat,
    LogLevel,
    Metrics,
    Rounds,
    RunName,
    Settings,
    app_config,
    read_proposal,
    require_flower,
    set_environment,
)
from copfl.cli.options import argument, option
from copfl.errors import stoppable


def server(
    *,
    folder: AppFolder,
    listen: Annotated[
        str | None,
        option("Federation", "HOST:PORT behind a reverse proxy; default: the app's port, for all machines."),
    ] = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run the server of the app, until the command is ended; it registers the keys in keys/*.pub."""
    require_flower()
    set_environment(metrics, log_format, log_level)
    from copfl.federation.machines.deployed import serve

    serve(folder, listen)


def run(
    *,
    folder: AppFolder,
    run: Annotated[
        str | None, option("Output", "The run's name; default: a new one, or with --resume the last one.")
    ] = None,
    resume: Annotated[
        bool, option("Federation", "Continue a run from its last checkpoint.", "--resume")
    ] = False,
    rounds: Rounds = None,
    settings: Settings = None,
    proposal: Annotated[
        Path | None,
        option("Federation", "A proposal of `copfl federate propose`; default: one is signed here."),
    ] = None,
) -> None:
    """Start a run on the federation whose server runs in the folder, and follow it to its end."""
    require_flower()
    from copfl.federation.machines.deployed import start_run
    from copfl.federation.operations.status import as_text

    config = app_config(settings, **{"session.run": run, "run.rounds": rounds})
    signed = read_proposal(proposal, config)
    with stoppable(f"the run continues on the server; see `copfl federate status {folder}`"):
        print(as_text(start_run(folder, config, resume=resume, proposal=signed)))


def status(
    *,
    folder: AppOrStateFolder,
    run: RunName = None,
    check: Annotated[bool, option("Output", "Exit code 1 if there is a problem.", "--check")] = False,
    as_json: Annotated[bool, option("Output", "Print JSON.", "--json")] = False,
) -> None:
    """Print nodes, rounds, who is late and the last error; the audit log is verified."""
    from copfl.federation.operations import status as state

    found = state.status(folder, run)
    print(json.dumps(found, indent=1) if as_json else state.as_text(found))
    if check and found["problems"]:
        raise typer.Exit(1)


def policy(
    *,
    file: Annotated[Path, argument("The policy; written if there is none, else checked.")],
    of_app: Annotated[
        Path | None,
        option("Federation", "Explain what this policy refuses of the app in this folder.", "--app"),
    ] = None,
) -> None:
    """Write, check or explain the policy of a machine: what a run may ask of it."""
    from copfl.federation.node.explanation import explained
    from copfl.federation.policy.file import read_policy, write_strict
    from copfl.federation.protocol.app_folder import read_app

    if not file.exists() and of_app is None:
        write_strict(file)
        print(f"{file} is a strict policy: read it, and change the lines that you need")
        return
    allowed = read_policy(file)
    if of_app is None:
        entries = {"code": allowed.code, "bases": allowed.bases, "files": allowed.files}
        print(f"{file} is valid; entered: {', '.join(f'{len(e)} of {name}' for name, e in entries.items())}")
        return
    lines = explained(allowed, read_app(of_app)["config"], file.parent)
    print("\n".join(lines))
    if lines[0].startswith("refused"):
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
    """Remove old runs, with their apps and logs, from a server or a node;
    a node's old personal models too.
    """
    from copfl.federation.operations.retention import clean as remove

    removed = remove(folder, days=days, keep=keep, is_rehearsal=rehearse)
    for entry in removed:
        print(f"{'would remove' if rehearse else 'removed'} {entry.path}, {entry.bytes:,} bytes")
    if not removed:
        print("nothing is older, and not of the last runs")


def backup(*, folder: AppOrStateFolder, file: Annotated[Path, argument("The archive to write.")]) -> None:
    """Write a server's or a node's files into one archive, which contains its private keys."""
    from copfl.federation.operations.backup import write_backup

    print(write_backup(folder, file))


def restore(
    *,
    file: Annotated[Path, argument("An archive of `copfl federate backup`.")],
    folder: Annotated[Path, argument("A new folder.")],
) -> None:
    """Restore a server's or a node's files into a new folder."""
    from copfl.federation.operations.backup import restore_backup

    print(restore_backup(file, folder))


def node(
    *,
    superlink: Annotated[str, option("Federation", "Address of the server, HOST:PORT.")],
    data: Annotated[
        str | None, option("Data", "The node's data: a file, a folder or module:function.", "--data -d")
    ] = None,
    state_dir: Annotated[
        Path | None, option("Output", "Folder of the node's state, its personal model.")
    ] = None,
    client: Annotated[
        int | None, option("Federation", "The client's number; default: the server's choice.")
    ] = None,
    root_certificates: Annotated[
        Path | None, option("Federation", "The authority's ca.pem; default: without TLS.")
    ] = None,
    key: Annotated[Path | None, option("Federation", "The node's private key.")] = None,
    coordinator: Annotated[
        str | None,
        option(
            "Federation",
            "Whose proposals this node accepts: coordinator.pub, or its fingerprint; default: the policy's.",
        ),
    ] = None,
    policy: Annotated[
        Path | None, option("Federation", "What this node allows; default: policy.toml in its state-dir.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option("Training", "Another key of the node, such as threads=4; repeatable.", "--set -s"),
    ] = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Connect this machine to a federation as a node, until the command is ended."""
    require_flower()
    set_environment(None, log_format, log_level)  # a node has no metrics
    from copfl.federation.machines.supernode import Address, serve

    config = app_config(settings, data=data, client=client)
    if state_dir is not None:
        config["state-dir"] = str(state_dir.expanduser().absolute())
    if policy is not None:
        config["policy"] = str(policy.expanduser().absolute())
    if coordinator is not None:
        from copfl.federation.protocol.keys import fingerprint, read_public

        file = Path(coordinator).expanduser()
        config["coordinator"] = fingerprint(read_public(file)) if file.exists() else coordinator
    address = Address(superlink, root_certificates, key)
    serve(address, config)
