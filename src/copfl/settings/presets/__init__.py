"""Settings by name: layers below a run file and the command line."""

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from copfl.settings.checking import unknown_name
from copfl.settings.first_look import Layer
from copfl.settings.schema import RunSettings
from copfl.settings.toml import Tables, read

PERCENTAGE = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?%")


def names() -> list[str]:
    """The presets that there are."""
    files = [path.name for path in resources.files(__name__).iterdir()]
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def preset(name: str, layers: Sequence[Layer] = (), defaults: Layer | None = None) -> Tables:
    """The settings of a preset for the run of these layers, whose rounds its percentages are of.

    Args:
        name: Of the preset.
        layers: What is set above it.
        defaults: What suits the data set, below it.
    """
    own = content(name)
    tables = (defaults or {}, own, *layers)
    rounds = [layer["run"]["rounds"] for layer in tables if "rounds" in layer.get("run", {})]
    last = rounds[-1] if rounds and isinstance(rounds[-1], int) else RunSettings.rounds  # else refused later
    return counted(own, last)


def content(name: str) -> Tables:
    """The content of a preset's file, in which a number of rounds may be a percentage."""
    if name not in names():
        raise unknown_name("preset", name, names())
    return read((resources.files(__name__) / f"{name}.toml").read_bytes(), f"preset {name}")


def counted(tables: Mapping[str, Mapping[str, Any]], rounds: int) -> Tables:
    """The tables with numbers of rounds in place of percentages such as "50%".

    Args:
        tables: Settings by title and key.
        rounds: Of the run.
    """

    def number(value: Any) -> Any:
        is_part = isinstance(value, str) and PERCENTAGE.fullmatch(value)
        return round(float(value[:-1]) / 100 * rounds) if is_part else value

    return {kind: {key: number(value) for key, value in table.items()} for kind, table in tables.items()}
