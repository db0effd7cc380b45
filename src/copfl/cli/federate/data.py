"""`copfl federate`: the data contract, a site's check against it, and the agreement on encoders."""

import json
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli.federate.options import AppFolder, Settings, app_config, read_proposal, require_flower
from copfl.cli.options import Json, argument, option
from copfl.errors import UsageError, stoppable

SHOWN = 8  # names of columns in a sentence


def contract(
    *,
    table: Annotated[Path, argument("One site's table.")],
    target: Annotated[str, option("Data", "The column to predict, or several separated by commas.")],
    out: Annotated[Path, option("Output", "The file to write; default: contract.toml.", "--out -o")] = Path(
        "contract.toml"
    ),
    text: Annotated[str, option("Data", "The column of the texts to learn from; default: none.")] = "",
    drop: Annotated[
        str, option("Data", "Columns that are not used, separated by commas; default: none.")
    ] = "",
    categories: Annotated[
        str, option("Data", "Columns of numbers that are categories, separated by commas; default: none.")
    ] = "",
    missing: Annotated[
        str, option("Data", "Missing values: refuse, fill or drop; default: fill if there are some.")
    ] = "",
    task: Annotated[str | None, option("Data", "The kind of the targets; default: inferred.")] = None,
    smallest_count: Annotated[
        int, option("Data", "Rows that a category must have to be named; default: 5.")
    ] = 5,
    statistics: Annotated[
        bool, option("Data", "Write the table's means and deviations too; default: off.", "--statistics")
    ] = False,
    leave_open: Annotated[
        bool, option("Data", "Name no categories: the members agree on them; default: off.", "--open")
    ] = False,
) -> None:
    """Write a first data contract from one site's table, without values that should not leave it."""
    from copfl.data.contract.draft import draft
    from copfl.data.contract.file import write_contract
    from copfl.tables import listed

    if out.exists():
        raise UsageError(f"{out} exists already; choose another file with --out")
    if smallest_count < 1:
        raise UsageError(f"--smallest-count {smallest_count} must be at least 1")
    made = draft(
        table,
        target=target,
        text=text,
        drop=drop,
        categories=categories,
        missing=missing,
        task=task,
        smallest=smallest_count,
        statistics=statistics,
        leave_open=leave_open,
    )
    write_contract(out, made)
    count = f"{len(made.columns)} columns, {made.task} of {', '.join(t.name for t in made.targets)}"
    print(f"{out} is a draft: {count}. Read it, add units and ranges, and send it to the members")
    if made.open:
        names = listed([column.name for column in made.open], SHOWN)
        print(f"To be agreed by sums over all members, or given in the file: {names}")


def check(
    *,
    contract: Annotated[Path, argument("The contract, an app's folder, or a proposal.")],
    data: Annotated[Path, option("Data", "This site's data: a file or a folder.", "--data -d")],
    as_json: Json = False,
) -> None:
    """Compare this site's data with the data contract.
    Nothing leaves this machine; exit code 1 if they differ.
    """
    from copfl.data.contract.check import check as compare
    from copfl.federation.server.agreement import contract_at
    from copfl.tables import listed

    agreed = contract_at(contract)
    checked = compare(agreed, data)
    if as_json:
        print(json.dumps({"contract": agreed.digest, **checked.as_table()}, indent=1))
    else:
        for difference in checked.differences:
            print(f"{'note' if difference.is_note else 'differs':<9} {difference.text}")
        if open_names := listed([column.name for column in agreed.open], SHOWN):
            print(
                f"{'note':<9} means and categories that the contract leaves open are not compared: "
                f"{open_names}"
            )
        verdict = "fits" if checked.fits else "does not fit"
        print(f"{data} {verdict} the contract {agreed.digest}: {checked.rows:,} rows")
    if not checked.fits:
        raise typer.Exit(1)


def agree(
    *,
    folder: AppFolder,
    run: Annotated[str | None, option("Output", "The run's name; default: a new one.")] = None,
    settings: Settings = None,
    proposal: Annotated[
        Path | None, option("Federation", "A proposal with session.agree=true; default: one is signed here.")
    ] = None,
) -> None:
    """Agree on the means, deviations and categories that the contract leaves open,
    by sums over all members.
    """
    require_flower()
    from copfl.federation.machines.deployed import agree as by_sums

    config = app_config(settings, **{"session.run": run})
    signed = read_proposal(proposal, config)
    with stoppable("the run continues on the server"):
        frozen = by_sums(folder, config, proposal=signed)
    print(f"{folder / 'contract.toml'} is frozen: {frozen.digest}. The next proposal has it")
