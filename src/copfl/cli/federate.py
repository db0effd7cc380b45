"""`copfl federate`: create a federation of real machines, run it locally, resume it, and add a new client."""

from __future__ import annotations

import importlib.util
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
) -> None:
    """Run the app on this machine, with real processes that end with this command."""
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
) -> None:
    """Continue a local run that was interrupted; the data options must be those of `up`."""
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
    """Personalise the trained model for a new client, and print its accuracy before and after."""
    result = _local().join(folder, data, state=state, run=run, updates=updates)
    before, after = result["accuracy_before"], result["accuracy_after"]
    print(f"accuracy {before:.4f} before, {after:.4f} after {updates} local updates")


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
) -> None:
    """Connect this machine to a federation as a node, until the command is ended."""
    _require_flower()
    from copfl.flower.supernode import Address, serve

    state = None if state_dir is None else str(state_dir.expanduser().absolute())
    config = _config(settings, data=data, client=client) | ({"state-dir": state} if state else {})
    serve(Address(superlink, root_certificates, key), config, allow_app_code=allow_app_code)


def _require_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UsageError('Flower is not installed: pip install "copfl[flower]"')


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
