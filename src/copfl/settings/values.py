"""Values that a program passed in place of settings, such as `copfl.run(FedAvg(), my_arrays)`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from copfl.core.optim import DefaultNumber, is_chosen
from copfl.errors import CopflError, UsageError
from copfl.settings.checking import SettingError, options_of
from copfl.settings.components import PLAIN, build, component, name_of
from copfl.settings.schema import Run, record_of
from copfl.settings.toml import Tables


def modules_of_values(values: Mapping[str, Any]) -> list[str]:
    """The modules of algorithms and optimizers that a program passed: their settings name the classes.

    Args:
        values: By kind, as of `complete`.
    """
    chosen = [values.get("algorithm"), values.get("optimizer")]
    chosen += [getattr(value, "optimizer", None) for value in chosen]
    classes = [value if isinstance(value, type) else type(value) for value in chosen if value is not None]
    return [one.__module__ for one in classes]


class Values(NamedTuple):
    """What a program passed in place of settings."""

    passed: dict[str, Any]  # by kind
    layer: Tables  # the settings of the values that have a name, and need not be passed


def values_of(values: Mapping[str, Any] | None, *runs: Run) -> Values:
    """Values by kind; a class of an algorithm or optimizer is made, one that has a name becomes settings.

    Args:
        values: By kind, what a program passed.
        runs: Records that are completed, which may have values, too.
    """
    passed = {kind: value for run in runs for kind, value in run.values.items()}
    passed |= {kind: value for kind, value in (values or {}).items() if value is not None}
    layer: Tables = {}
    for kind in ("algorithm", "optimizer"):
        if isinstance(passed.get(kind), type):
            passed[kind] = passed[kind]()
        if same_settings := layer_of(kind, passed.get(kind)):
            layer |= same_settings
            del passed[kind]
    return Values(passed, layer)


def check_passed(tables: Tables, passed: Mapping[str, Any]) -> None:
    """UsageError if the tables are of a run with a value, which the program does not pass again.

    Args:
        tables: Settings by title and key, such as the content of run.toml.
        passed: By kind, values that a program passed.
    """
    for kind, table in tables.items():
        if "value" in table and kind not in passed:
            raise UsageError(
                f"the {kind} of this run is {table['value']}, a value that a Python program passed; "
                f"run it again from there, or name it: [{kind}] name = ..."
            )


def layer_of(kind: str, value: Any) -> Tables:
    """The settings of an algorithm or optimizer of copfl or an importable module; none if it has no name.

    What nobody chose is left out, numbers and the optimizer: it depends on the data set.
    """
    if not dataclasses.is_dataclass(value) or not (name := name_of(kind, value)):
        return {}
    layer: Tables = {kind: {"name": name, **_chosen_options(value)}}
    optimizer = getattr(value, "optimizer", None) if kind == "algorithm" else None
    if optimizer is not None and is_chosen(optimizer):
        layer["optimizer"] = {"name": name_of("optimizer", optimizer), **_chosen_options(optimizer)}
    return layer if _describes(kind, value, layer) else {}


def _chosen_options(value: Any) -> dict[str, Any]:
    return {name: v for name, v in options_of(value).items() if not isinstance(v, DefaultNumber)}


def _describes(kind: str, value: Any, layer: Tables) -> bool:
    """Whether these settings make an equal value."""
    module = sys.modules.get(type(value).__module__)
    if ":" in layer[kind]["name"] and getattr(module, type(value).__name__, None) is not type(value):
        return False
    plain = (
        part for t in layer.values() for v in t.values() for part in (v if isinstance(v, tuple) else (v,))
    )
    if not all(isinstance(part, PLAIN) and part != "" for part in plain):
        return False
    try:
        records = {title: component(title, table) for title, table in layer.items()}
        optimizer = records.get("optimizer") if kind == "algorithm" else None
        return bool(build(kind, records[kind], optimizer=optimizer) == value)
    except CopflError:
        return False


def record_of_value(kind: str, table: Mapping[str, Any], value: Any, description: str, *allowed: str) -> Any:
    """The record of a kind whose value the caller has.

    Args:
        kind: Such as "model".
        table: What is set beside the value.
        value: What the program passed.
        description: The value in words.
        allowed: The settings that it can have; another one is an error.
    """
    if options := sorted(table.keys() - {"value", *allowed}):
        path = f"{kind}.{options[0]}"
        raise SettingError(path, table[options[0]], f"cannot be set: the {kind} is a value; set it there")
    kept = {key: v for key, v in table.items() if key in allowed}
    return dataclasses.replace(record_of(kind, kept), value=value, description=description)
