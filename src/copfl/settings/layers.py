"""Layers of settings to one table of each kind. A layer is a plain mapping; later ones win.

From below: the defaults of a data set, a preset or else the rule of `first_choice`, a run file, the command
line.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from copfl.algorithms import ALGORITHMS
from copfl.errors import how_to_set
from copfl.settings import presets, schema
from copfl.settings.checking import SettingError, parameters_of, unknown_key
from copfl.settings.first_choice import first_choice, known_of, named_layer, usual_name
from copfl.settings.record import declared
from copfl.settings.schema import KINDS, RunSettings
from copfl.settings.toml import Tables
from copfl.settings.usual import defaults_of, usual_model, usual_partition

Layer = Mapping[str, Mapping[str, Any]]


def merged(layers: Sequence[Layer], passed: Mapping[str, Any]) -> Tables:
    """One table of each kind: each layer on top of the ones before it.

    Where a layer chooses another algorithm, model, ..., the options of the former one are dropped; another
    algorithm has its own optimizer.

    Args:
        layers: Settings by title and key, from below; `check_layer` found nothing wrong.
        passed: By kind, values that a program passed.
    """
    tables: Tables = {kind: {} for kind in KINDS}
    for layer in layers:
        for kind in (kind for kind in KINDS if layer.get(kind)):
            table = layer[kind]
            former = ("algorithm", "optimizer") if kind == "algorithm" else (kind,)
            has_options = "name" in table and any(tables[other] for other in former)
            current = _chosen(kind, _current(kind, tables, passed)) if has_options else ""
            if current and current != _chosen(kind, table["name"]):  # without one, they were set for any
                tables |= {other: {} for other in former}
            tables[kind] = {**tables[kind], **table}
    return tables


def lower_layers(
    layers: Sequence[Layer], passed: Mapping[str, Any], preset: str = "", sums_only: bool = False
) -> list[Layer]:
    """What is below these layers: the data set's defaults, and the preset or what suits the data.

    Args:
        layers: What a person or a program set.
        passed: By kind, values that a program passed.
        preset: The name of a preset.
        sums_only: Whether the server may see sums of uploads only, which counts where no algorithm is named.
    """
    names = [str(layer["data"]["name"]) for layer in layers if "name" in layer.get("data", {})]
    defaults: Tables = {}
    if "data" not in passed:
        suited = defaults_of(names[-1] if names else "digits")
        defaults = {kind: table for kind, table in suited.items() if kind not in passed}
    if preset:
        rounds = [
            layer["run"]["rounds"]
            for layer in (defaults, presets.content(preset), *layers)
            if "rounds" in layer.get("run", {})
        ]
        last = rounds[-1] if rounds and isinstance(rounds[-1], int) else RunSettings.rounds
        return [defaults, presets.preset(preset, last)]
    tables = merged([defaults, *layers], passed)
    if names_algorithm(*layers) or "algorithm" in passed:
        is_batch_set = any("batch" in layer.get("run", {}) for layer in layers)
        return [defaults, named_layer(tables, passed, is_batch_set)]
    _check_options_of_nobody(tables["algorithm"], defaults.get("algorithm", {}))
    return [defaults, first_choice(known_of(tables, passed, sums_only)).layer]


def names_algorithm(*layers: Layer, preset: str = "") -> bool:
    """Whether an algorithm is chosen; if not, `first_choice` decides."""
    return bool(preset) or any(layer.get("algorithm", {}).get("name") for layer in layers)


def _check_options_of_nobody(table: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Nothing, if no option of a certain algorithm is set, where no algorithm is named."""
    common = {f.name for f in declared(schema.Algorithm)}
    for key in table.keys() - common - usual.keys():
        if any(key in parameters_of(algorithm, skip=("optimizer",)) for algorithm in ALGORITHMS.values()):
            name = how_to_set("algorithm.name", "copfl", "--algorithm")
            raise SettingError(
                f"algorithm.{key}", table[key], f"needs the name of its algorithm, such as {name}"
            )


def _chosen(kind: str, name: str) -> str:
    return name.partition(":")[0] if kind == "adapter" else name


def _current(kind: str, tables: Tables, passed: Mapping[str, Any]) -> str:
    """The name that a kind has so far, or would have; "" where it is open."""
    if "name" in tables[kind]:
        return str(tables[kind]["name"])
    if kind == "optimizer":
        is_open = "algorithm" in passed or "name" not in tables["algorithm"]
        return "" if is_open else usual_name(tables, passed)
    usual = {"partition": usual_partition, "model": usual_model}
    if kind in usual:
        return usual[kind](tables["data"], passed.get("data"))
    return "digits" if kind == "data" else ""


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
            for part in value if isinstance(value, list | tuple) else (value,):
                if isinstance(part, Mapping | list | datetime.date | datetime.time):
                    raise SettingError(path, value, "must be a number, a word, or a list of them")
                if not f"{path}{part}".isascii() and any("\ud800" <= c <= "\udfff" for c in f"{path}{part}"):
                    raise SettingError(path, value, "is not valid Unicode text; use another name")
