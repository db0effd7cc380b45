"""Values that a program passed in place of settings, such as `copfl.run(FedAvg(), my_arrays)`.

`complete` takes them out of its layers and puts them into the record.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from copfl.core.optim import DefaultNumber, is_chosen
from copfl.errors import CopflError, UsageError
from copfl.settings import named_code
from copfl.settings.checking import SettingError, options_of
from copfl.settings.components import PLAIN, build, component, name_of
from copfl.settings.content import digest_of
from copfl.settings.merging import Layer
from copfl.settings.record import DIGEST_LENGTH, without_digest
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
    named: Tables  # the settings of the values that have a name, and need not be passed


OF_FILES = (bool, int, float, list, dict, datetime.date, datetime.time)  # what a file can have beside texts


def passed_values(layers: Sequence[Layer | Run], values: Mapping[str, Any]) -> Values:
    """What a program passed, as the key `value` of a layer's table or by itself; its modules are named.

    A text there is the description of a value, in the content of a run.toml. A later layer that names a component
    wins over an earlier one that has it as a value. A class of an algorithm or optimizer is made; one that has a
    name becomes settings.

    Args:
        layers: Settings by title and key, or records; from below.
        values: By kind, values that win over those of the layers; None is none.
    """
    passed: dict[str, Any] = {}
    for layer in layers:
        tables = layer.chosen if isinstance(layer, Run) else layer
        choices = {kind: table for kind, table in tables.items() if isinstance(table, Mapping)}
        in_layer = {
            kind: t["value"] for kind, t in choices.items() if not isinstance(t.get("value", ""), str)
        }
        for kind, value in in_layer.items():
            if isinstance(value, OF_FILES):
                raise SettingError(
                    f"{kind}.value",
                    value,
                    f"is the place of a {kind} that a program has; name one: {kind}.name",
                )
        unnamed = {kind: value for kind, value in passed.items() if not choices.get(kind, {}).get("name")}
        passed = unnamed | in_layer | (layer.values if isinstance(layer, Run) else {})
    passed |= {kind: value for kind, value in values.items() if value is not None}
    passed = {kind: value for kind, value in passed.items() if value is not None}
    named_code.name(modules_of_values(passed))
    named: Tables = {}
    for kind in ("algorithm", "optimizer"):
        if isinstance(passed.get(kind), type):
            passed[kind] = passed[kind]()
        if same_settings := layer_of(kind, passed.get(kind)):
            named |= same_settings
            del passed[kind]
    return Values(passed, named)


def check_same(written: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> None:
    """UsageError if a program passed another value than the run has.

    Args:
        written: The settings of the run.
        now: The settings with the values that are passed now.
    """
    for kind, table in written.items():
        for key in ("value", "name"):
            then, here = (str(one.get(key, "")) for one in (table, now.get(kind, {})))
            if (
                then != without_digest(then)
                and here != without_digest(here)
                and then[-DIGEST_LENGTH:] != here[-DIGEST_LENGTH:]
            ):
                raise UsageError(
                    f"the {kind} that is passed is not that of this run: it is {here}, and was {then}; pass the same "
                    f"{kind}, or start a new run"
                )


def layer_of(kind: str, value: Any) -> Tables:
    """The settings of an algorithm or optimizer of copfl or an importable module; none if it has no name.

    What nobody chose is left out, numbers and the optimizer: it depends on the data set.

    Args:
        kind: "algorithm" or "optimizer".
        value: Of a program.
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
    is_reference = ":" in layer[kind]["name"]
    if is_reference and getattr(module, type(value).__name__, None) is not type(value):
        return False
    plain = (
        option for t in layer.values() for v in t.values() for option in (v if isinstance(v, tuple) else (v,))
    )
    if not all(isinstance(option, PLAIN) and option != "" for option in plain):
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
    settings = {key: v for key, v in table.items() if key in allowed}
    stored = f"{description}@{digest_of(value)}"
    return dataclasses.replace(record_of(kind, settings), value=value, description=stored)
