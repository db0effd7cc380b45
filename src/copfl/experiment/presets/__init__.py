"""Settings that go together under a name: layers below a run file and the command line."""

from __future__ import annotations

from importlib import resources

from copfl.errors import unknown
from copfl.experiment.config import Tables, read_toml


def names() -> list[str]:
    """The presets that there are."""
    return sorted(
        path.name.removesuffix(".toml") for path in resources.files(__name__).iterdir() if _is_one(path.name)
    )


def preset(name: str) -> Tables:
    """The tables of a preset."""
    if name not in names():
        raise unknown("preset", name, names())
    return read_toml((resources.files(__name__) / f"{name}.toml").read_text("utf-8"), f"preset {name}")


def _is_one(name: str) -> bool:
    return name.endswith(".toml")
