"""What is wrong with settings and can be seen without torch, whose import takes seconds: a misspelled name, above all.

The commands look first; `complete` checks all of it again, with the rest.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from copfl.errors import DataError, raised_as
from copfl.settings import named_code
from copfl.settings.checking import SettingError, checked, converted, unknown_key, unknown_name
from copfl.settings.record import Component, declared_types
from copfl.settings.schema import KINDS, paths, record_of

READS = ("data_dir", "path", "location", "name")  # parameters of a reader of data that are no settings
Layer = Mapping[str, Mapping[str, Any]]


def look(layer: Layer, kinds: Collection[str] = tuple(KINDS)) -> None:
    """SettingError for what is wrong with the settings of a command line, as far as torch is not needed.

    Args:
        layer: The settings by title and key.
        kinds: The tables that the command has.
    """
    check_layer(layer, kinds)
    for kind, record in KINDS.items():
        if kind not in layer or kind not in kinds:
            continue
        if issubclass(record, Component):  # whose other keys depend on its name
            known = declared_types(record)
            for key in known.keys() & layer[kind]:
                converted(f"{kind}.{key}", layer[kind][key], *known[key])
        else:
            record_of(kind, layer[kind])
    if "name" in layer.get("data", {}):
        look_at_data(layer["data"])
    if "name" in layer.get("algorithm", {}):
        check_algorithm_name(layer["algorithm"]["name"])


def look_at_data(table: Mapping[str, Any]) -> None:
    """An error for data that are not there, an option that they do not have, or a column that a .csv file lacks.

    Args:
        table: The settings of data, with their name.
    """
    from copfl.data.sets import datasets
    from copfl.data.tables.tables import check_columns, table_file

    record = record_of("data", table)
    if ":" in record.name:  # a module or the hub
        return
    check_data_name(record.name)
    name = record.name if record.name in datasets.DATASETS else str(Path(record.name).absolute())
    reader = datasets.reader(name)
    checked("data", reader, record.arguments, READS, paths())
    if reader is table_file:
        with raised_as(DataError, f"{name}: {{}}", DataError):
            check_columns(Path(name), record.arguments)


def check_layer(layer: Layer, kinds: Collection[str] = tuple(KINDS)) -> None:
    """Nothing, if the layer has tables of known kinds, whose values a file can have and give back.

    Args:
        layer: The settings by title and key.
        kinds: The tables that there may be.
    """
    for kind, table in layer.items():
        if kind not in kinds:
            raise unknown_key(kind, dict(table) if isinstance(table, Mapping) else table, kinds)
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


def check_data_name(name: str) -> None:
    """SettingError for a word that names no data set, and is no path."""
    from copfl.data.sets.datasets import DATASETS
    from copfl.data.sets.hub import PREFIX

    if not (name in DATASETS or name.startswith(PREFIX) or is_path(name)):
        raise unknown_name("data.name", name, [*DATASETS, "FILE", "FOLDER", f"{PREFIX}NAME", "mymodule:load"])


def is_path(name: str) -> bool:
    """Whether a name is written as a path or a file's name, or there is a file or folder of this name."""
    return len(Path(name).parts) > 1 or bool(Path(name).suffix) or name.endswith("/") or os.path.exists(name)


def check_algorithm_name(name: str) -> None:
    """SettingError for a word that names no algorithm, and no module of this folder."""
    if name.isidentifier() and not (
        name in algorithms() or name in named_code.plugins() or os.path.isfile(f"{name}.py")
    ):
        raise unknown_name("algorithm.name", name, [*algorithms(), *named_code.plugins(), "mymodule:MyName"])


@cache
def algorithms() -> tuple[str, ...]:
    """The names of the algorithms of copfl: those of their files, which are not imported."""
    files = sorted(file.name for file in resources.files("copfl").joinpath("algorithms").iterdir())
    return tuple(name.removesuffix(".py") for name in files if name.endswith(".py") and name[0] != "_")
