"""The data contract as a file for people: TOML with comments.

Commands write and read it; a server keeps the agreed one.
"""

import tomllib
from pathlib import Path
from typing import Any

from copfl.data.contract.contract import ARRAYS, NUMBER, TABLE, Column, Contract
from copfl.errors import DataError, UsageError, raised_as
from copfl.files import write_bytes

HEAD = """\
# The data contract of a federation: what the data of every member must be. All members have the same one.
# `copfl site check THIS_FILE --data TABLE` compares a member's data with it; nothing leaves the machine.
"""
KEYS = """\
# Of a column: type (number, category, boolean, date, text), unit, minimum, maximum, guess (whether the range is one
# site's, widened; delete the line when it is right), missing (whether values may be
# missing), indicator (whether the model also learns where a number is missing), categories. Dates and texts are
# checked, and not learned from. Numbers without mean and deviation, and categories that are not listed, are agreed by
# sums over all members: `copfl federate agree`. With candidates, those that a member has become the categories.
# The first `missing` says what happens to missing values: refuse (an error), fill (the mean, or no category), drop
# (their rows). `group` names a column: rows with the same value, such as those of a patient, are on one side, train or
# test. `time` names a column: the later rows of a member are test. `split` is the seed of the draw of the test rows.
"""


def written(contract: Contract) -> str:
    """The contract as TOML, with comments."""
    import tomli_w

    table = contract.as_table()
    entries = {title: table.pop(title, []) for title in ("columns", "targets")}
    lines = [HEAD, tomli_w.dumps(table)]
    if contract.data == TABLE:
        lines.append(KEYS)
    for title, columns in (("columns", contract.columns), ("targets", contract.targets)):
        for entry, column in zip(entries[title], columns, strict=True):
            comment = _comment(contract, column)
            fields = [f"{key} = {_value(value)}" for key, value in entry.items()]
            lines.append("\n".join([f"[[{title}]]{comment}", *fields, ""]))
    return "\n".join(lines)


def _value(value: Any) -> str:
    """A value in one line, which is how people read a list."""
    import tomli_w

    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"v": value}).strip().removeprefix("v = ")


def _comment(contract: Contract, column: Column) -> str:
    notes = [
        _to_agree(contract, column),
        "its range is a guess from one site: correct it" if column.guess else "",
    ]
    return f"  # {'; '.join(filter(None, notes))}" if any(notes) else ""


def _to_agree(contract: Contract, column: Column) -> str:
    if column in contract.open and contract.data != ARRAYS:
        return f"to be agreed: {'mean and deviation' if column.type == NUMBER else 'categories'}"
    return ""


def write_contract(path: Path, contract: Contract) -> None:
    """Writes the file.

    Args:
        path: Of the file.
        contract: What it says.
    """
    write_bytes(path, written(contract).encode())


def read_contract(path: Path) -> Contract:
    """The contract in a file; UsageError or DataError names what is wrong."""
    damaged = f"{path} is no data contract: {{}}"
    with raised_as(UsageError, damaged, OSError, ValueError, RecursionError):
        content: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    with raised_as(DataError, f"{path}: {{}}", DataError):
        return Contract.of_table(content)
