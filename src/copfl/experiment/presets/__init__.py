"""Settings by name: layers below a run file and the command line."""

from importlib import resources

from copfl.errors import one_of
from copfl.experiment.config import Tables, read_toml


def names() -> list[str]:
    files = [path.name for path in resources.files(__name__).iterdir()]
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def preset(name: str) -> Tables:
    one_of(names(), preset=name)
    return read_toml((resources.files(__name__) / f"{name}.toml").read_bytes(), f"preset {name}")
