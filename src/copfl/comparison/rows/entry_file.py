"""A comparison as a TOML file: an [[entry]] per row, options, and tables for all rows.

`copfl compare -c FILE` reads it.
"""

from pathlib import Path
from typing import Any, NamedTuple

from copfl import foreign
from copfl.comparison.rows.entries import Entry, checked_entry, described
from copfl.errors import UsageError, raised_as, unknown
from copfl.settings.arguments import put
from copfl.settings.toml import Tables


class EntryFile(NamedTuple):
    """The contents of a comparison's file."""

    entries: list[Entry]
    base: Tables  # for every run
    options: dict[str, Any]  # the table [compare]


OPTIONS = {
    "seeds": list,
    "tune": dict,
    "trials": int,
    "tune_seeds": list,
    "validation": float,
    "reference": str,
    "last": int,
}


def read_file(path: Path) -> EntryFile:
    """A file with an [[entry]] per row, a table [compare] of options, and tables for all rows."""
    damaged = f"{path} is not valid TOML: {{}}; correct it there"
    with raised_as(UsageError, f"cannot read {path}: {{}}", OSError):
        text = foreign.read_bytes(path)
    with raised_as(UsageError, damaged, ValueError, RecursionError):  # numbers or brackets without end
        content = foreign.toml_of(text)
    rows, options = content.pop("entry", []), content.pop("compare", {})
    for name, table in [("compare", options), *content.items()]:
        if not isinstance(table, dict):
            raise UsageError(f'{path}: "{name}" is outside any table; it belongs under [compare] or [run]')
    for name, value in options.items():
        if name not in OPTIONS:
            raise unknown("option in [compare]:", name, OPTIONS)
        if not isinstance(value, OPTIONS[name]):
            raise UsageError(f"{path}: [compare] {name} must be a {OPTIONS[name].__name__}, not {value!r}")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: write the rows as [[entry]], each with a name")
    return EntryFile([_entry(path, **row) for row in rows], content, options)


def _entry(path: Path, /, name: str = "", label: str = "", settings: Any = (), **unknown_keys: Any) -> Entry:
    for key in unknown_keys:
        raise unknown("key in [[entry]]:", key, ("name", "label", "settings"))
    if settings != () and not isinstance(settings, dict):
        raise UsageError(f"{path}: the settings of {name} must be a table, such as {{ score = 'none' }}")
    tables: Tables = {}
    for key, value in dict(settings).items():
        if isinstance(value, dict):
            tables.setdefault(key, {}).update(value)
        else:
            put(tables, key, value)
    label = label or f"{name} {described(tables, 'algorithm', 'optimizer')}".strip()
    return checked_entry(Entry(str(name), str(label), tables))
