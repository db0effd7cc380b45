"""`copfl federate`: create, try and operate a federation of real machines."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from copfl.cli import options
from copfl.errors import UsageError, stoppable
from copfl.experiment.config import setting

app = typer.Typer(
    help="Federations of real machines, with Flower.", rich_markup_mode=None, no_args_is_help=True
)
command = options.command(app, "federate")


@command
def init(given: options.Given) -> None:
    """Write a Flower app for an algorithm, a model and data."""
    from copfl.flower import app as flower_app

    config = _config(given, "algorithm model adapter clients wire rounds settings")
    config |= {"secure-aggregation": True} if given.secure_aggregation else {}
    where = given.only("data host port secure")
    flower_app.init(given.folder, config=config, **where)
    print(f"{given.folder} is ready. Run it on this machine: copfl federate up {given.folder}")
    print(f"For several machines see {given.folder / 'README.md'}")


@command
def up(given: options.Given) -> None:
    """Run the app on this machine, with real processes that end with this command."""
    _set_environment(given)
    config = _config(given, "wire rounds settings")
    _show(given.folder, _local().up(given.folder, config=config, **given.only("nodes data scheme secure")))


@command
def resume(given: options.Given) -> None:
    """Continue a local run that was interrupted; the data options must be those of `up`."""
    _set_environment(given)
    local = _local()
    run = given.run or local.last_run(given.folder)
    if done := local.finished(given.folder, run, given.rounds):
        print(f"the run {run} is finished: it has {done} rounds; --rounds N continues it to N rounds in all")
        return
    config = given.only("rounds") | ({"rollback": True} if given.rollback else {})
    _show(given.folder, local.resume(given.folder, run, config=config, **given.only("nodes data scheme")))


@command
def join(given: options.Given) -> None:
    """Personalise the trained model for a new client, and print its metric before and after."""
    from copfl.core.metrics import MetricInfo

    result = _local().join(given.folder, **given.only("data state run updates"))
    name = result["metric"]
    before, after = result[f"{name}_before"], result[f"{name}_after"]
    print(f"{MetricInfo(name).title} {before:.4f} before, {after:.4f} after {given.updates} local updates")


@command
def server(given: options.Given) -> None:
    """Run the server of the app, until the command is ended; it registers the keys in keys/*.pub."""
    _require_flower()
    _set_environment(given)
    from copfl.flower.deployed import serve

    serve(given.folder)


@command
def run(given: options.Given) -> None:
    """Start a run on the federation whose server runs in the folder, and follow it to its end."""
    _require_flower()
    from copfl.flower.deployed import start_run
    from copfl.flower.status import as_text

    with stoppable(f"the run continues on the server; see `copfl federate status {given.folder}`"):
        config = _config(given, "run rounds settings")
        print(as_text(start_run(given.folder, config, resume=given.resume)))


@command
def status(given: options.Given) -> None:
    """Print nodes, rounds, who is late and the last error; the audit log is verified."""
    from copfl.flower import status as state

    found = state.status(given.folder, given.run)
    print(json.dumps(found, indent=1) if given.as_json else state.as_text(found))
    if given.check and found["problems"]:
        raise typer.Exit(1)


@command
def upgrade(given: options.Given) -> None:
    """Rewrite the settings of an app of an older version under today's names."""
    from copfl.flower.app import upgrade as upgraded

    folder, old = given.folder, upgraded(given.folder)
    print(f"{folder}: settings rewritten; the old ones are in {old}" if old else f"{folder} is up to date")


@command
def backup(given: options.Given) -> None:
    """Write a server's or a node's files into one archive, which contains its private keys."""
    from copfl.flower.backup import write_backup

    print(write_backup(given.folder, given.file))


@command
def restore(given: options.Given) -> None:
    """Restore a server's or a node's files into a new folder."""
    from copfl.flower.backup import restore_backup

    print(restore_backup(given.file, given.folder))


@command
def node(given: options.Given) -> None:
    """Connect this machine to a federation as a node, until the command is ended."""
    _require_flower()
    _set_environment(given)
    from copfl.flower.supernode import Address, serve

    config = _config(given, "data client settings")
    if given.state_dir is not None:
        config["state-dir"] = str(given.state_dir.expanduser().absolute())
    if given.policy is not None:
        config["policy"] = str(given.policy.expanduser().absolute())
    address = Address(given.superlink, given.root_certificates, given.key)
    serve(address, config)


def _require_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UsageError('Flower is not installed: pip install "copfl[flower]"')


def _set_environment(given: options.Given) -> None:
    """Passes the options to every process of the federation, before Flower reads them."""
    from copfl.flower.events import environment

    metrics = getattr(given, "metrics", None)  # nodes have none
    os.environ.update(environment(metrics, given.log_format, given.log_level))


def _local() -> Any:
    """The module of local federations."""
    _require_flower()
    return importlib.import_module("copfl.flower.local")


def _config(given: options.Given, names: str) -> dict[str, Any]:
    """The keys of a run config or a node's that the command line sets: these options, and --set."""
    config = given.only(names)
    for text in config.pop("settings", []):
        if "=" not in text:
            raise UsageError(f'--set "{text}" must have the form KEY=VALUE, such as --set rounds=5')
        _, key, value = setting(f"config.{text}")
        config[key] = value
    return config


def _show(folder: Path, rounds: Iterator[dict[str, Any]]) -> None:
    """Prints a line per round when it ends."""
    from copfl.flower.state import as_text

    print("Starting a SuperLink and the nodes; the first round takes half a minute.", file=sys.stderr)
    with stoppable(f"`copfl federate resume {folder}` continues from the last round"):
        for record in rounds:
            print(as_text(record), flush=True)
