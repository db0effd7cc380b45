"""Settings as text: run.toml, and TABLE.KEY=VALUE on the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from copfl import foreign
from copfl.errors import UsageError, raised_as
from copfl.settings.checking import SettingError
from copfl.settings.schema import paths

Tables = dict[str, dict[str, Any]]  # one layer of settings, before it is checked: by title and key


def read(content: bytes, source: str) -> Tables:
    """The tables in the content of a file.

    Args:
        content: The bytes of the file.
        source: Its name, for errors.
    """
    damaged = f"{source} is damaged or no run file: it is not valid TOML: {{}}"
    with raised_as(UsageError, damaged, ValueError, RecursionError):
        tables = foreign.toml_of(content)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f'{source}: "{name}" is outside any table; a run file has tables such as [run]')
    return tables


def read_file(path: Path) -> Tables:
    """The tables of a run file."""
    with raised_as(UsageError, f"cannot read {path}: {{}}; give the run.toml of a run", OSError):
        content = foreign.read_bytes(path)
    return read(content, str(path))


def written(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables as TOML text."""
    return tomli_w.dumps(tables)


def value_of(text: str) -> Any:
    """The value of a text on the command line: read as TOML, or else a plain word."""
    try:
        return foreign.toml_of(f"v = {text.strip()}")["v"]
    except (ValueError, RecursionError):
        return text.strip()


def assignment(text: str) -> tuple[str, str, Any]:
    """("algorithm", "rate", 0.15) for "algorithm.rate=0.15"."""
    path, equals, value = text.partition("=")
    table, dot, key = path.strip().partition(".")
    if not (equals and dot and table and key):
        meant = [known for known in paths() if path.strip() and known.rpartition(".")[2] == path.strip()]
        hint = f'; did you mean "{meant[0]}"?' if meant else ""  # such as optimizer.lr of lr
        raise SettingError("--set", text, f"must be TABLE.KEY=VALUE, such as algorithm.rate=0.15{hint}")
    return table, key, value_of(value)
