"""A Flower app in a folder: run it with `flwr run`, or first on one machine with `copfl federate up`."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.data.datasets import load
from copfl.errors import RunError, UsageError
from copfl.experiment.config import Tables, as_toml, without
from copfl.flower.certificates import LOOPBACK, make_certificates, make_node_key
from copfl.flower.settings import DEFAULTS, TABLES, settings_of

TEMPLATE = Path(__file__).parent / "template"


def init(
    folder: Path | str,
    *,
    algorithm: str = "copfl",
    model: str = "cnn",
    data: str = "digits",
    clients: int = 3,
    host: str = "127.0.0.1",
    port: int = 8800,
    secure: bool | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """The folder, with a Flower app for this algorithm and model, and for samples like those of `data`.

    `secure` makes certificates and a key for every node; it is the default for every host but this machine.
    `config` sets other keys of the run config, see settings.RunConfig.
    """
    folder = Path(folder)
    if (folder / "pyproject.toml").exists():
        raise RunError(f"{folder} holds an app already; choose another folder, or edit its pyproject.toml")
    is_open = host not in LOOPBACK  # other machines can reach it
    secure = is_open if secure is None else secure
    if is_open and not secure:
        raise UsageError(f"{host} can be reached from outside: it needs certificates and node keys")
    names = {"algorithm": algorithm, "model": model, "clients": clients}
    run_config = {**DEFAULTS, **_sample_keys(data), **names, **(config or {})}
    settings = settings_of(run_config)  # an invalid key is an error before anything is written
    run_config["model"] = settings.tables["model"]["name"]  # of a folder, its absolute path
    (folder / "federated").mkdir(parents=True, exist_ok=True)
    for path in (TEMPLATE / "federated").glob("*.py"):
        shutil.copy(path, folder / "federated")
    shutil.copy(TEMPLATE / "gitignore.txt", folder / ".gitignore")
    bind = "0.0.0.0" if is_open else host
    readme = TEMPLATE / f"README-{'secure' if secure else 'insecure'}.md"
    (folder / "README.md").write_text(readme.read_text().format(host=host, port=port, bind=bind))
    about = {"data": data, "host": host, "port": port, "secure": secure}
    name = re.sub(r"[\W_]", "-", folder.resolve().name.lower()).strip("-") or "federation"
    tool = {"copfl": about, "flwr": {"app": {"config": _nested(run_config, settings.tables)}}}
    pyproject = (TEMPLATE / "pyproject.txt").read_text().format(name=name) + as_toml({"tool": tool})
    (folder / "pyproject.toml").write_text(pyproject)
    if secure:
        make_certificates(folder / "keys", host)
        for client in range(settings.config.clients):
            make_node_key(folder / "keys" / f"node-{client}")
    write_connection(folder, host, port, secure)
    return folder


def write_connection(folder: Path, host: str, port: int, secure: bool, home: str = ".flwr") -> None:
    """Writes the SuperLink's address for the `flwr` command with FLWR_HOME=FOLDER/HOME."""
    (folder / home).mkdir(parents=True, exist_ok=True)
    certificate = str((folder / "keys" / "ca.pem").resolve())
    security = {"root-certificates": certificate} if secure else {"insecure": True}
    connection = {"address": f"{host}:{port}", **security}
    content = as_toml({"superlink": {"default": "copfl", "copfl": connection}})
    (folder / home / "config.toml").write_text(content)


def read_app(folder: Path) -> dict[str, Any]:
    """The data, host, port and security of the app in the folder, and its run config."""
    try:
        tool = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]
        return {**tool["copfl"], "config": tool["flwr"]["app"]["config"]}
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise RunError(
            f"{folder} holds no app of copfl ({error}); create one with `copfl federate init {folder}`"
        ) from error


def _sample_keys(data: str) -> dict[str, Any]:
    """The keys of the run config that describe a sample, from a data set of the same kind."""
    if not data:
        return {}
    dataset = load(data)
    is_text = dataset.train.x.dtype.kind == "U"
    is_numbered = dataset.classes == tuple(map(str, range(len(dataset.classes))))
    return {
        "shape": "text" if is_text else ",".join(map(str, dataset.train.x.shape[1:])),
        "classes": str(len(dataset.classes)) if is_numbered else ",".join(dataset.classes),
        "mean": ",".join(map(str, dataset.mean)),
        "std": ",".join(map(str, dataset.std)),
        "augment": dataset.augment,
    }


def _nested(run_config: Mapping[str, Any], tables: Tables) -> dict[str, Any]:
    """The run config with every option: Flower overrides only keys that pyproject.toml has."""
    result = {key: value for key, value in run_config.items() if "." not in key}
    for prefix, title in TABLES.items():
        hidden = () if title == "optimizer" else ("name", "code")  # another key, and a path on this machine
        options = without(tables.get(title, {}), *hidden)
        plain = {name: v for name, v in options.items() if isinstance(v, bool | int | float | str)}
        result |= {prefix: plain} if plain else {}
    return result
