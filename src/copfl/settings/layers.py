"""One layer of settings, and what is checked of it before torch is imported: the usual slips on a command line.

`complete` checks everything. A command comes here first, as whoever mistyped a name should not wait for torch.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import copfl
from copfl.settings import named_code
from copfl.settings.checking import SettingError, converted, unknown_key, unknown_name
from copfl.settings.record import declared_types
from copfl.settings.schema import KINDS, RunSettings, paths

Layer = Mapping[str, Mapping[str, Any]]


def check_line(layer: Layer, rows: Iterable[str] | None = None) -> None:
    """Nothing, if the names, keys and values on a command line may be right, which is the last layer.

    The options of components are not checked, nor what is written as "module:attribute".

    Args:
        layer: The settings on the line.
        rows: Of a comparison, such as "copfl,fedavg:lr=0.1", in which a table may be an algorithm's; None: of a run.
    """
    check_layer({kind: table for kind, table in layer.items() if rows is None or kind in KINDS})
    for kind, table in layer.items():
        if kind not in KINDS:
            continue
        known = declared_types(KINDS[kind])
        for key, value in table.items():
            if key in known:
                converted(f"{kind}.{key}", value, *known[key])
            elif KINDS[kind] is RunSettings:
                raise unknown_key(f"{kind}.{key}", value, known, paths())
    names = [layer.get("algorithm", {}).get("name", "")]
    words = [word for row in rows or () if not set("[\"'") & set(row) for word in row.split(",")]
    for word in words:
        name, _, option = word.partition(":")
        names += [name] if "=" in option or not option else []  # no "module:attribute"
    for name in names:
        _check_algorithm(name.strip())
    data = layer.get("data", {}).get("name", "")
    if data and ":" not in data:
        from copfl.data.sets import datasets

        is_path = check_data(data) and data not in datasets.DATASETS
        datasets.reader(str(Path(data).absolute()) if is_path else data)


def _check_algorithm(name: str) -> None:
    """SettingError, if it is no name of copfl or an installed package, and is not written as code of the user."""
    known = {file.stem for file in (Path(copfl.__file__).parent / "algorithms").glob("[a-z]*.py")}
    if name in known or name == "all" or not name.isidentifier() or os.path.isfile(f"{name}.py"):
        return
    if name not in named_code.plugins():
        raise unknown_name("algorithm.name", name, [*known, *named_code.plugins(), "mymodule:MyName"])


def check_data(name: str) -> bool:
    """Whether the name of data is the path of a file or folder; SettingError if it cannot be one of data.

    Args:
        name: Not "module:attribute".
    """
    from copfl.data.sets import datasets
    from copfl.data.sets.hub import PREFIX

    is_written_as_path = len(Path(name).parts) > 1 or name.endswith("/")
    is_path = (is_written_as_path or os.path.exists(name)) and not name.startswith(PREFIX)
    if not (is_path or name in datasets.DATASETS or name.startswith(PREFIX) or Path(name).suffix):
        raise unknown_name(
            "data.name", name, [*datasets.DATASETS, "FILE", "FOLDER", "hf:NAME", "mymodule:load"]
        )
    return is_path


def check_layer(layer: Layer) -> None:
    """Nothing, if the layer has tables of known kinds, whose values a file can have and give back."""
    for kind, table in layer.items():
        if kind not in KINDS:
            raise unknown_key(kind, dict(table) if isinstance(table, Mapping) else table, KINDS)
        if not isinstance(table, Mapping):
            raise SettingError(kind, table, "must be a table of settings")
        for key, value in table.items():
            path = f"{kind}.{key}"
            if key == "name" and not isinstance(value, str):
                raise SettingError(path, value, "must be a word")
            for number in value if isinstance(value, list | tuple) else (value,):
                if isinstance(number, Mapping | list | datetime.date | datetime.time):
                    raise SettingError(path, value, "must be a number, a word, or a list of them")
                if not f"{path}{number}".isascii() and any(
                    "\ud800" <= c <= "\udfff" for c in f"{path}{number}"
                ):
                    raise SettingError(path, value, "is not valid Unicode text; use another name")
