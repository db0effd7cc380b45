"""`copfl federate`: create, try and operate a federation of real machines."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from copfl.cli import options
from copfl.errors import UsageError

app = typer.Typer(
    help="Federations of real machines, with Flower.", rich_markup_mode=None, no_args_is_help=True
)
command = options.command(app, "federate")


@command
def init(
    folder: Path,
    *,
    algorithm: str | None = None,
    model: str | None = None,
    adapter: str | None = None,
    data: str = "digits",
    clients: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8800,
    secure: bool | None = None,
    secure_aggregation: bool = False,
    wire: str | None = None,
    rounds: int | None = None,
    settings: list[str] | None = None,
) -> None:
    """Write a Flower app for an algorithm, a model and data."""
    from copfl.flower import app as flower_app

    names = {"algorithm": algorithm, "model": model, "adapter": adapter}
    given = {**names, "clients": clients, "wire": wire, "rounds": rounds}
    config = _config(settings, **given) | ({"secure-aggregation": True} if secure_aggregation else {})
    flower_app.init(folder, data=data, host=host, port=port, secure=secure, config=config)
    print(f"{folder} is ready. Run it on this machine: copfl federate up {folder}")
    print(f"For several machines see {folder / 'README.md'}")


@command
def up(
    folder: Path,
    *,
    nodes: int | None = None,
    data: str | None = None,
    scheme: str = "dirichlet",
    secure: bool | None = None,
    wire: str | None = None,
    rounds: int | None = None,
    settings: list[str] | None = None,
    metrics: str | None = None,
    log_format: str | None = None,
    log_level: str | None = None,
) -> None:
    """Run the app on this machine, with real processes that end with this command."""
    _set_environment(metrics, log_format, log_level)
    config = _config(settings, wire=wire, rounds=rounds)
    _show(folder, _local().up(folder, nodes=nodes, data=data, scheme=scheme, secure=secure, config=config))


@command
def resume(
    folder: Path,
    *,
    run: str | None = None,
    nodes: int | None = None,
    data: str | None = None,
    scheme: str = "dirichlet",
    rounds: int | None = None,
    rollback: bool = False,
    metrics: str | None = None,
    log_format: str | None = None,
    log_level: str | None = None,
) -> None:
    """Continue a local run that was interrupted; the data options must be those of `up`."""
    _set_environment(metrics, log_format, log_level)
    local = _local()
    run = run or local.last_run(folder)
    if done := local.finished(folder, run, rounds):
        print(f"the run {run} is finished: it has {done} rounds; --rounds N continues it to N rounds in all")
        return
    config = _config(None, rounds=rounds) | ({"rollback": True} if rollback else {})
    _show(folder, local.resume(folder, run, nodes=nodes, data=data, scheme=scheme, config=config))


@command
def join(
    folder: Path,
    *,
    data: str,
    run: str | None = None,
    updates: int = 3,
    state: str | None = None,
) -> None:
    """Personalise the trained model for a new client, and print its metric before and after."""
    from copfl.core.metrics import MetricInfo

    result = _local().join(folder, data, state=state, run=run, updates=updates)
    name = result["metric"]
    before, after = result[f"{name}_before"], result[f"{name}_after"]
    print(f"{MetricInfo(name).title} {before:.4f} before, {after:.4f} after {updates} local updates")


@command
def server(
    folder: Path,
    *,
    metrics: str | None = None,
    log_format: str | None = None,
    log_level: str | None = None,
) -> None:
    """Run the server of the app, until the command is ended; it registers the keys in keys/*.pub."""
    _require_flower()
    _set_environment(metrics, log_format, log_level)
    from copfl.flower.deployed import serve

    serve(folder)


@command
def run(
    folder: Path,
    *,
    run: str | None = None,
    resume: bool = False,
    rounds: int | None = None,
    settings: list[str] | None = None,
) -> None:
    """Start a run on the federation whose server runs in the folder, and follow it to its end."""
    _require_flower()
    from copfl.errors import stoppable
    from copfl.flower.deployed import start_run
    from copfl.flower.status import as_text

    with stoppable(f"the run continues on the server; see `copfl federate status {folder}`"):
        print(as_text(start_run(folder, _config(settings, run=run, rounds=rounds), resume=resume)))


@command
def status(
    folder: Path,
    *,
    run: str | None = None,
    check: bool = False,
    as_json: bool = False,
) -> None:
    """Print nodes, rounds, who is late and the last error; the audit log is verified."""
    import json

    from copfl.flower import status as state

    found = state.status(folder, run)
    print(json.dumps(found, indent=1) if as_json else state.as_text(found))
    if check and found["problems"]:
        raise typer.Exit(1)


@command
def upgrade(folder: Path) -> None:
    """Rewrite the settings of an app of an older version under today's names."""
    from copfl.flower.app import upgrade as upgraded

    old = upgraded(folder)
    print(f"{folder}: settings rewritten; the old ones are in {old}" if old else f"{folder} is up to date")


@command
def backup(
    folder: Path,
    file: Path,
) -> None:
    """Write a server's or a node's files into one archive, which contains its private keys."""
    from copfl.flower.backup import write_backup

    print(write_backup(folder, file))


@command
def restore(
    file: Path,
    folder: Path,
) -> None:
    """Restore a server's or a node's files into a new folder."""
    from copfl.flower.backup import restore_backup

    print(restore_backup(file, folder))


@command
def node(
    *,
    superlink: str,
    data: str | None = None,
    state_dir: Path | None = None,
    client: int | None = None,
    root_certificates: Path | None = None,
    key: Path | None = None,
    settings: list[str] | None = None,
    allow_app_code: bool = False,
    log_format: str | None = None,
    log_level: str | None = None,
) -> None:
    """Connect this machine to a federation as a node, until the command is ended."""
    _require_flower()
    _set_environment(None, log_format, log_level)
    from copfl.flower.supernode import Address, serve

    state = None if state_dir is None else str(state_dir.expanduser().absolute())
    config = _config(settings, data=data, client=client) | ({"state-dir": state} if state else {})
    serve(Address(superlink, root_certificates, key), config, allow_app_code=allow_app_code)


def _require_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UsageError('Flower is not installed: pip install "copfl[flower]"')


def _set_environment(metrics: str | None, log_format: str | None, log_level: str | None) -> None:
    """Passes the options to every process of the federation, before Flower reads them."""
    from copfl.flower.events import environment

    os.environ.update(environment(metrics, log_format, log_level))


def _local() -> Any:
    """The module of local federations."""
    _require_flower()
    return importlib.import_module("copfl.flower.local")


def _config(texts: list[str] | None, **given: Any) -> dict[str, Any]:
    """The keys of the run config that the command line sets."""
    from copfl.experiment.config import setting

    config = {key: value for key, value in given.items() if value is not None}
    for text in texts or []:
        if "=" not in text:
            raise UsageError(f'--set "{text}" must have the form KEY=VALUE, such as --set rounds=5')
        _, key, value = setting(f"config.{text}")
        config[key] = value
    return config


def _show(folder: Path, rounds: Iterator[dict[str, Any]]) -> None:
    """Prints a line per round when it ends."""
    from copfl.errors import stoppable
    from copfl.flower.state import as_text

    print("Starting a SuperLink and the nodes; the first round takes half a minute.", file=sys.stderr)
    with stoppable(f"`copfl federate resume {folder}` continues from the last round"):
        for record in rounds:
            print(as_text(record), flush=True)
