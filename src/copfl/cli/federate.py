"""`copfl federate`: create, try and operate a federation of real machines."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from copfl.cli import options
from copfl.cli.options import DATA, FEDERATION, MODEL, OUTPUT, TRAINING, option
from copfl.errors import UsageError

app = typer.Typer(
    help="Federations of real machines, with Flower.", rich_markup_mode=None, no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(help="The app's folder.")]
Settings = Annotated[
    list[str] | None,
    option(TRAINING, "A key of the run config, such as options.rate=0.1; repeatable.", "--set", "-s"),
]
Wire = Annotated[str | None, option(FEDERATION, "Numbers in messages: fp32, fp16 or bf16; default: fp32.")]
Rounds = Annotated[int | None, option(FEDERATION, "Number of rounds; default: the app's, or 20.")]
Secure = Annotated[
    bool | None,
    option(
        FEDERATION, "With or without TLS and node keys; default: without on 127.0.0.1.", "--secure/--insecure"
    ),
]
Nodes = Annotated[int | None, option(FEDERATION, "Number of nodes; default: the app's number of clients.")]
Data = Annotated[
    str | None,
    option(DATA, "A data set to partition among the nodes; default: that of init.", "--data", "-d"),
]
Scheme = Annotated[
    str, option(DATA, "classes, dirichlet, iid or by_group; default: dirichlet.", "--partition")
]
Run = Annotated[str | None, option(OUTPUT, "The run's name; default: the last one.")]


Metrics = Annotated[
    str | None,
    option(OUTPUT, "Address of metrics for Prometheus, such as 127.0.0.1:9464; default: none.", "--metrics"),
]
LogFormat = Annotated[str | None, option(OUTPUT, "Lines of logs: text or json; default: text.")]
LogLevel = Annotated[str | None, option(OUTPUT, "debug, info, warning or error; default: info.")]
AsJson = Annotated[bool, option(OUTPUT, "Print JSON.", "--json")]


@app.command(cls=options.Command)
def init(
    folder: Folder,
    *,
    algorithm: options.Algorithm = None,
    model: Annotated[
        str | None,
        option(
            MODEL, "A name (`copfl list models`), module:function or hf:NAME; default: cnn.", "--model", "-m"
        ),
    ] = None,
    adapter: Annotated[
        str | None, option(MODEL, "lora, or lora:r=8,alpha=16,targets=query+value; default: none.")
    ] = None,
    data: Annotated[
        str,
        option(
            DATA, "Data like that of the nodes: a name, a file or a folder; default: digits.", "--data", "-d"
        ),
    ] = "digits",
    clients: Annotated[int | None, option(FEDERATION, "Number of clients; default: 3.")] = None,
    host: Annotated[str, option(FEDERATION, "Address of the server; default: 127.0.0.1.")] = "127.0.0.1",
    port: Annotated[int, option(FEDERATION, "Port of the server; default: 8800.")] = 8800,
    secure: Secure = None,
    secure_aggregation: Annotated[
        bool,
        option(
            FEDERATION, "The server receives only the sum of the uploads (SecAgg+).", "--secure-aggregation"
        ),
    ] = False,
    wire: Wire = None,
    rounds: Rounds = None,
    settings: Settings = None,
) -> None:
    """Write a Flower app for an algorithm, a model and data."""
    from copfl.flower import app as flower_app

    names = {"algorithm": algorithm, "model": model, "adapter": adapter}
    given = {**names, "clients": clients, "wire": wire, "rounds": rounds}
    config = _config(settings, **given) | ({"secure-aggregation": True} if secure_aggregation else {})
    flower_app.init(folder, data=data, host=host, port=port, secure=secure, config=config)
    print(f"{folder} is ready. Run it on this machine: copfl federate up {folder}")
    print(f"For several machines see {folder / 'README.md'}")


@app.command(cls=options.Command)
def up(
    folder: Folder,
    *,
    nodes: Nodes = None,
    data: Data = None,
    scheme: Scheme = "dirichlet",
    secure: Secure = None,
    wire: Wire = None,
    rounds: Rounds = None,
    settings: Settings = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run the app on this machine, with real processes that end with this command."""
    _set_environment(metrics, log_format, log_level)
    config = _config(settings, wire=wire, rounds=rounds)
    _show(folder, _local().up(folder, nodes=nodes, data=data, scheme=scheme, secure=secure, config=config))


@app.command(cls=options.Command)
def resume(
    folder: Folder,
    *,
    run: Run = None,
    nodes: Nodes = None,
    data: Data = None,
    scheme: Scheme = "dirichlet",
    rounds: Rounds = None,
    rollback: Annotated[
        bool,
        option(FEDERATION, "Set the nodes back to the server's round, if it lost checkpoints.", "--rollback"),
    ] = False,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Continue a local run that was interrupted; the data options must be those of `up`."""
    _set_environment(metrics, log_format, log_level)
    config = _config(None, rounds=rounds) | ({"rollback": True} if rollback else {})
    _show(folder, _local().resume(folder, run, nodes=nodes, data=data, scheme=scheme, config=config))


@app.command(cls=options.Command)
def join(
    folder: Folder,
    *,
    data: Annotated[str, option(DATA, "The new client's data: a file or a folder.", "--data", "-d")],
    run: Run = None,
    updates: Annotated[int, option(TRAINING, "Number of local updates, at least 1; default: 3.")] = 3,
    state: Annotated[str | None, option(OUTPUT, "Folder of its model; default: nodes/new-client.")] = None,
) -> None:
    """Personalise the trained model for a new client, and print its metric before and after."""
    from copfl.core.metrics import MetricInfo

    result = _local().join(folder, data, state=state, run=run, updates=updates)
    name = result["metric"]
    before, after = result[f"{name}_before"], result[f"{name}_after"]
    print(f"{MetricInfo(name).title} {before:.4f} before, {after:.4f} after {updates} local updates")


@app.command(cls=options.Command)
def server(
    folder: Folder,
    *,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run the server of the app, until the command is ended; it registers the keys in keys/*.pub."""
    _require_flower()
    _set_environment(metrics, log_format, log_level)
    from copfl.flower.deployed import serve

    serve(folder)


@app.command(cls=options.Command)
def run(
    folder: Folder,
    *,
    run: Annotated[
        str | None, option(OUTPUT, "The run's name; default: a new one, or with --resume the last one.")
    ] = None,
    resume: Annotated[
        bool, option(FEDERATION, "Continue a run from its last checkpoint.", "--resume")
    ] = False,
    rounds: Rounds = None,
    settings: Settings = None,
) -> None:
    """Start a run on the federation whose server runs in the folder, and follow it to its end."""
    _require_flower()
    from copfl.errors import stoppable
    from copfl.flower.deployed import start_run
    from copfl.flower.status import as_text

    with stoppable(f"the run continues on the server; see `copfl federate status {folder}`"):
        print(as_text(start_run(folder, _config(settings, run=run, rounds=rounds), resume=resume)))


@app.command(cls=options.Command)
def status(
    folder: Annotated[Path, typer.Argument(help="The app's folder, or the state-dir of a node.")],
    *,
    run: Run = None,
    check: Annotated[bool, option(OUTPUT, "Exit code 1 if there is a problem.", "--check")] = False,
    as_json: AsJson = False,
) -> None:
    """Print nodes, rounds, who is late and the last error; the audit log is verified."""
    import json

    from copfl.flower import status as state

    found = state.status(folder, run)
    print(json.dumps(found, indent=1) if as_json else state.as_text(found))
    if check and found["problems"]:
        raise typer.Exit(1)


@app.command(cls=options.Command)
def upgrade(folder: Folder) -> None:
    """Rewrite the settings of an app of an older version under today's names."""
    from copfl.flower.app import upgrade as upgraded

    old = upgraded(folder)
    print(f"{folder}: settings rewritten; the old ones are in {old}" if old else f"{folder} is up to date")


@app.command(cls=options.Command)
def backup(
    folder: Annotated[Path, typer.Argument(help="The app's folder, or the state-dir of a node.")],
    file: Annotated[Path, typer.Argument(help="The archive to write.")],
) -> None:
    """Write a server's or a node's files into one archive, which contains its private keys."""
    from copfl.flower.backup import write_backup

    print(write_backup(folder, file))


@app.command(cls=options.Command)
def restore(
    file: Annotated[Path, typer.Argument(help="An archive of `copfl federate backup`.")],
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Restore a server's or a node's files into a new folder."""
    from copfl.flower.backup import restore_backup

    print(restore_backup(file, folder))


@app.command(cls=options.Command)
def node(
    *,
    superlink: Annotated[str, option(FEDERATION, "Address of the server, HOST:PORT.")],
    data: Annotated[
        str | None, option(DATA, "The node's data: a file, a folder or module:function.", "--data", "-d")
    ] = None,
    state_dir: Annotated[
        Path | None, option(OUTPUT, "Folder of the node's state, its personal model.")
    ] = None,
    client: Annotated[
        int | None, option(FEDERATION, "The client's number; default: the server's choice.")
    ] = None,
    root_certificates: Annotated[
        Path | None, option(FEDERATION, "The authority's ca.pem; default: without TLS.")
    ] = None,
    key: Annotated[Path | None, option(FEDERATION, "The node's private key.")] = None,
    settings: Annotated[
        list[str] | None,
        option(TRAINING, "Another key of the node, such as threads=4; repeatable.", "--set", "-s"),
    ] = None,
    allow_app_code: Annotated[
        bool, option(TRAINING, "Execute modules that the server's app contains.", "--allow-app-code")
    ] = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
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
