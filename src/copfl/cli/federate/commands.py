"""`copfl federate`: its commands, of which the first creates a federation."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli import options
from copfl.cli.federate import (
    data,
    local,
    machines,
    members,
    watch,
)
from copfl.cli.federate.options import AppFolder, Secure
from copfl.cli.options import Tables, option
from copfl.settings import toml
from copfl.settings.federation import OWN
from copfl.settings.schema import KINDS

# What only a simulation has, or what each node decides.
SIMULATED = (
    "attack.name",
    "attack.fraction",
    *(f"run.{key}" for key in ("new_clients", "device", "engine", "precision", "workers", "store")),
    "run.local_baseline",
    "run.rivals",
)


@options.training(*SIMULATED, kinds={**KINDS, **OWN})
def init(
    line: Tables,
    *,
    folder: AppFolder,
    config: Annotated[
        Path | None, option("Training", "A run.toml; options on the line override it.", "--config -c")
    ] = None,
    preset: Annotated[
        str | None, option("Training", "A preset: paper, plus, adapters or demo; default: none.")
    ] = None,
    contract: Annotated[
        Path | None,
        option("Data", "The members' data contract, instead of a data set like theirs; default: none."),
    ] = None,
    host: Annotated[str, option("Federation", "Address of the server; default: 127.0.0.1.")] = "127.0.0.1",
    port: Annotated[int, option("Federation", "Port of the server; default: 8800.")] = 8800,
    secure: Secure = None,
    trial: Annotated[
        bool | None,
        option(
            "Federation",
            "Make the members' keys too: all machines have one owner; default: with 127.0.0.1.",
            "--trial/--no-trial",
        ),
    ] = None,
) -> None:
    """Write a Flower app that trains what `copfl run` with the same options would."""
    from copfl.data.contract.file import read_contract
    from copfl.federation.machines import app as flower_app

    layers = [line] if config is None else [toml.read_file(config), line]
    agreed = None if contract is None else read_contract(contract)
    flower_app.init(
        folder,
        *layers,
        preset=preset or "",
        host=host,
        port=port,
        secure=secure,
        trial=trial,
        contract=agreed,
    )
    sites = "" if agreed is None else " --site FILE --site FILE ..."
    print(f"{folder} is ready. Run it on this machine: copfl federate up {folder}{sites}")
    if agreed is not None and not agreed.is_frozen:
        print(f"Its contract is open: the members agree on the rest with copfl federate agree {folder}")
    print(f"For several machines see {folder / 'README.md'}")
    if (authority := flower_app.authority_of(folder)).exists():
        print(f"The keys of the coordinator and of the authority are in {authority}: move it off the server")


app = typer.Typer(
    help="Federations of real machines, with Flower.", rich_markup_mode=None, no_args_is_help=True
)
Command = Callable[..., None]
LOCAL: list[Command] = [local.up, local.resume, local.join]
OTHERS: list[Command] = [
    *(machines.server, machines.run, machines.status, machines.policy),
    *(machines.clean, machines.backup, machines.restore, machines.node),
    *(data.contract, data.check, data.agree),
    watch.watch,
    *(members.key, members.admit, members.members, members.propose),
    *(members.approve, members.revoke, members.rotate, members.log),
]
for command in [init, *map(options.reading, LOCAL), *OTHERS]:
    app.command(cls=options.Command)(command)
