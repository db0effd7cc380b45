"""`copfl federate`: make a federation, try it, go on with it, join it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Federations of real machines, by Flower.", rich_markup_mode=None, no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(help="The app's folder.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="KEY=VALUE of the run config, such as rounds=5 or options.rate=0.1."),
]
Wire = Annotated[str | None, typer.Option(help="Numbers on the wire: fp32, fp16 or bf16.")]
Rounds = Annotated[int | None, typer.Option(help="How many rounds in all.")]
Secure = Annotated[
    bool | None, typer.Option("--secure/--insecure", help="Certificates and node keys, or none.")
]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write the app.")],
    algorithm: Annotated[
        str, typer.Option("--algorithm", "-a", help="See `copfl list algorithms`.")
    ] = "copfl",
    model: Annotated[str, typer.Option("--model", "-m", help="A model's name, or module:function.")] = "cnn",
    data: Annotated[
        str,
        typer.Option(
            "--data", "-d", help="Data such as the nodes have: a name, an .npz file or an image folder."
        ),
    ] = "digits",
    clients: Annotated[int, typer.Option(help="How many clients the federation has.")] = 3,
    host: Annotated[str, typer.Option(help="The server's address, as the nodes know it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The server's port.")] = 8800,
    secure: Secure = None,
    wire: Wire = None,
    rounds: Rounds = None,
    set_: Set = None,
) -> None:
    """Write a Flower app for your algorithm, model and data."""
    from copfl.flower.app import init as write

    config = _config(set_, wire=wire, rounds=rounds)
    where: dict[str, Any] = {"host": host, "port": port, "secure": secure}
    write(folder, algorithm=algorithm, model=model, data=data, clients=clients, config=config, **where)
    print(
        f"{folder} is ready. Try it on this machine: copfl federate up {folder}\nThen see {folder / 'README.md'}"
    )


@app.command()
def up(
    folder: Folder,
    nodes: Annotated[
        int | None, typer.Option(help="How many nodes; default: as many as the app has clients.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", "-d", help="What to deal to the nodes.")] = None,
    partition: Annotated[str, typer.Option(help="How to deal it: dirichlet, iid, by_group.")] = "dirichlet",
    secure: Secure = None,
    wire: Wire = None,
    rounds: Rounds = None,
    set_: Set = None,
) -> None:
    """Try the app on this machine: real processes, that all end with this command."""
    from copfl.flower.trial import up as start

    _need_flower()
    config = _config(set_, wire=wire, rounds=rounds)
    _show(start(folder, nodes=nodes, data=data, scheme=partition, secure=secure, config=config))


@app.command()
def resume(
    folder: Folder,
    run: Annotated[str | None, typer.Option(help="The run's name; default: the last one.")] = None,
    nodes: Annotated[int | None, typer.Option(help="How many nodes it had.")] = None,
    data: Annotated[str | None, typer.Option("--data", "-d", help="What was dealt to the nodes.")] = None,
    partition: Annotated[str, typer.Option(help="How it was dealt.")] = "dirichlet",
    rounds: Rounds = None,
) -> None:
    """Go on with a trial that was interrupted."""
    from copfl.flower.trial import resume as go_on

    _need_flower()
    _show(go_on(folder, run, nodes=nodes, data=data, scheme=partition, config=_config(None, rounds=rounds)))


@app.command()
def join(
    folder: Folder,
    data: Annotated[
        str, typer.Option("--data", "-d", help="The newcomer's data: an .npz file or an image folder.")
    ],
    run: Annotated[str | None, typer.Option(help="The finished run; default: the last one.")] = None,
    turns: Annotated[int, typer.Option(help="How many local turns the newcomer trains.")] = 3,
    state: Annotated[str | None, typer.Option(help="The newcomer's folder for its own model.")] = None,
) -> None:
    """Personalise the trained model for a newcomer, and say what it gained."""
    from copfl.flower.trial import join as welcome

    _need_flower()
    result = welcome(folder, data, state=state, run=run, turns=turns)
    print(
        f"accuracy {result['accuracy_before']:.4f} before, {result['accuracy_after']:.4f} after {turns} local turns"
    )


def _need_flower() -> None:
    import importlib.util

    from copfl.errors import UsageError

    if importlib.util.find_spec("flwr") is None:
        raise UsageError('Flower is not installed: pip install "copfl[flower]"')


def _config(texts: list[str] | None, **given: Any) -> dict[str, Any]:
    """The run config's keys that the command line sets."""
    import tomllib

    from copfl.errors import UsageError

    config = {key: value for key, value in given.items() if value is not None}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f'--set "{text}" must look like KEY=VALUE, such as --set rounds=5')
        try:
            config[key.strip()] = tomllib.loads(f"v = {value.strip()}")["v"]
        except tomllib.TOMLDecodeError:
            config[key.strip()] = value.strip()
    return config


def _show(rounds: Iterator[dict[str, Any]]) -> None:
    """A line a round, as it ends."""
    print("Starting a SuperLink and the nodes; the first round takes a minute.", file=sys.stderr)
    for record in rounds:
        accuracy = record["mean"].get("accuracy")
        parts = [f"round {record['round']:>3}", f"{len(record['clients'])} clients"]
        parts += [f"accuracy {accuracy:.4f}"] if accuracy is not None else []
        parts += [f"{record['bytes']['up'] / 1e6:.2f} MB up, {record['bytes']['down'] / 1e6:.2f} MB down"]
        parts += [f"client {client}: {why}" for client, why in record["why"].items()]
        print("  ".join(parts), flush=True)
