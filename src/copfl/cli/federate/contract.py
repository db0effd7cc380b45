"""`copfl federate contract`: a first data contract."""

import sys
from pathlib import Path
from typing import Annotated

from copfl.cli.options import argument, option
from copfl.errors import UsageError

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
    group: Annotated[
        str, option("Data", "The column that says what belongs together; default: none.", "--group")
    ] = "",
    time: Annotated[
        str, option("Data", "The column that says when a row was; default: none.", "--time")
    ] = "",
    task: Annotated[str | None, option("Data", "The kind of the targets; default: inferred.")] = None,
    event: Annotated[
        str | None, option("Data", "Of survival, the column that says whether the event was seen.", "--event")
    ] = None,
    start: Annotated[
        str | None,
        option("Data", "Of survival, the column of the time after which a row is at risk.", "--start"),
    ] = None,
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
    """Draft the data contract from one site's table.
    Values that should not leave the site are not in it.
    """
    from copfl.data.contract.draft import draft
    from copfl.data.contract.file import write_contract
    from copfl.tables import listed

    if out.exists():
        raise UsageError(f"{out} exists already; choose another file with --out")
    if smallest_count < 1:
        raise UsageError(f"--smallest-count {smallest_count} must be at least 1")
    made = draft(
        table,
        target=",".join(filter(None, (target, event, start))),
        text=text,
        drop=drop,
        categories=categories,
        missing=missing,
        task="survival" if event is not None and task is None else task,
        smallest=smallest_count,
        statistics=statistics,
        leave_open=leave_open,
        group=group,
        time=time,
        tell=lambda text: print(f"copfl: warning: {text}", file=sys.stderr),
    )
    write_contract(out, made)
    count = f"{len(made.columns)} columns, {made.task} of {', '.join(t.name for t in made.targets)}"
    print(f"{out} is a draft: {count}. Read it, add units and ranges, and send it to the members")
    if made.open:
        names = listed([column.name for column in made.open], SHOWN)
        print(f"To be agreed by sums over all members, or given in the file: {names}")
