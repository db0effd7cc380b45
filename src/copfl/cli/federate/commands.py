"""`copfl federate`: its commands in the order of use; here the one that creates a federation."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli import options, upkeep
from copfl.cli.federate import contract as drafting
from copfl.cli.federate import members, server, trial, watch
from copfl.cli.federate.options import NewAppFolder, Secure
from copfl.cli.options import Tables, option
from copfl.errors import with_code
from copfl.settings import toml
from copfl.settings.federation import OWN
from copfl.settings.schema import KINDS

LEVELS = "levels"  # the method of tables


@options.training(kinds={**KINDS, **OWN})
def init(
    line: Tables,
    *,
    folder: NewAppFolder,
    config: Annotated[
        Path | None, option("Training", "A run.toml; options on the line override it.", "--config -c")
    ] = None,
    preset: Annotated[
        str | None, option("Training", "A preset: paper, plus, adapters or demo; default: none.")
    ] = None,
    like: Annotated[
        Path | None,
        option("Training", "A finished run, whose method and settings are deployed; default: none."),
    ] = None,
    contract: Annotated[
        Path | None,
        option("Data", "The members' data contract, instead of a data set like theirs; default: none."),
    ] = None,
    invite: Annotated[
        list[str] | None,
        option("Federation", "The name of a site, whose invitation is written; repeatable; default: none."),
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
    """Create a federation: settings, certificates and invitations."""
    from copfl.data.contract.file import read_contract
    from copfl.federation.server.invitations import check_names
    from copfl.tables import listed

    if sys.stdin.isatty() and not (line or config or preset or like or contract or invite):
        contract, invite, host, is_summed = asked()
        line["secure"] = {"aggregation": is_summed}
    if invite:
        check_names(invite)  # before anything is written
        line.setdefault("run", {}).setdefault("clients", len(invite))
        secure, trial = True, False
    layers = [line] if config is None else [toml.read_file(config), line]
    agreed = None if contract is None else read_contract(contract)
    from copfl.federation.machines import app as flower_app  # with torch, after the errors in files

    flower_app.init(
        folder,
        *layers,
        preset=preset or "",
        host=host,
        port=port,
        secure=secure,
        trial=trial,
        contract=agreed,
        like=like,
    )
    _tell_method(folder, like, is_named=bool(config or preset or like or line.get("algorithm")))
    if agreed is not None and not agreed.is_frozen:
        print("Its contract is open: the members agree on the rest by sums before the training")
    if agreed is not None and (guesses := [column for column in agreed.columns if column.guess]):
        ranges = [f"{c.name} {c.minimum:g} to {c.maximum:g}" for c in guesses]
        print(
            f"These ranges are guesses from one site's table: {listed(ranges, drafting.SHOWN)}. The sites see "
            f"them as such; to set others, correct {contract}, delete its lines `guess`, and begin again in "
            "a new folder"
        )
    if (authority := flower_app.authority_of(folder)).exists():
        print(f"The keys of the coordinator and of the authority are in {authority}: move it off the server")
    if invite:
        members.invite(folder=folder, sites=invite)
        print(f"Run the server: copfl federate server {folder}")
        print(f"When all sites are there, train: copfl federate run {folder}")
        return
    more = ("" if agreed is None else " --site FILE --site FILE ...") + with_code()
    if authority.exists():  # no trial
        print(f"Invite the sites: copfl federate invite {folder} NAME NAME ...")
        print(f"To try it on this machine first: copfl federate up {folder}{more}")
        return
    print(f"{folder} is ready. Run it on this machine: copfl federate up {folder}{more}")
    print(f"For several machines see {folder / 'README.md'}")


def _tell_method(folder: Path, like: Path | None, *, is_named: bool) -> None:
    """Prints what will be trained and why.

    Args:
        folder: Of the app.
        like: The run whose settings it has; None: those of no run.
        is_named: Whether somebody chose the method.
    """
    from copfl.federation.protocol.app_folder import read_app

    config = read_app(folder)["config"]
    name, rounds = config["algorithm"]["name"], config["run"]["rounds"]
    if like is not None:
        print(f"Trained as in {like}: {name}, {rounds} rounds")
    elif not is_named and (candidates := config["choice"]["candidates"]):
        print(
            f"Nobody named a method: `copfl federate run` first compares {candidates.replace(',', ', ')} and what each "
            f"site has alone, on rows that each site holds out, by sums of losses; then {rounds} rounds are trained"
        )
    elif name == LEVELS and not is_named:
        print(
            f"Nobody named a method, so {name} is trained, {rounds} rounds: a linear model with an intercept for each "
            "site, exact by a few rounds of sums"
        )
    elif not is_named:
        print(f"Nobody named a method, so {name} is trained, {rounds} rounds: what suits such data at first")
    if not is_named:
        print(
            "To have more methods compared, and to know before, rehearse with `copfl run` on data like the sites', and "
            "begin in a new folder with --like RUN"
        )


def asked() -> tuple[Path, list[str], str, bool]:
    """The contract, the names of the sites, the server's address, and whether only sums leave: what init asks for."""
    contract = typer.prompt(
        "The data contract (copfl federate contract TABLE drafts one)", default="contract.toml"
    )
    names = typer.prompt("The names of the sites, such as: north south west").replace(",", " ").split()
    host = typer.prompt("The address of the server, which the sites reach", default="127.0.0.1")
    is_summed = typer.confirm("Should the server see sums over all sites alone?", default=len(names) > 2)
    return Path(contract), names, host, is_summed


app = typer.Typer(
    help="For the coordinator of a federation of real machines, with Flower. "
    "Whoever owns data has `copfl site`.",
    cls=options.PanelGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
)
PANELS: dict[str, list[options.Function]] = {
    "In this order": [
        drafting.contract,
        init,
        members.invite,
        server.server,
        members.admit,
        watch.watch,
        server.run,
    ],
    "A trial on one machine, after init": [
        options.reading(trial.up),
        options.reading(trial.resume),
        options.reading(trial.personalize),
    ],
    "More": [
        *(upkeep.status, server.stop, members.members, server.agree),
        *(members.propose, members.revoke, members.rotate),
        *(upkeep.backup, upkeep.restore, upkeep.clean),
    ],
}
options.add_panels(app, PANELS)
