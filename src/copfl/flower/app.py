"""A Flower app in a folder: run it with `flwr run`, or first on one machine with `copfl federate up`."""

import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.data.datasets import load
from copfl.data.samples import CLASSIFICATION
from copfl.errors import RunError, UsageError
from copfl.experiment.config import Tables, as_toml, without
from copfl.files import write_bytes
from copfl.flower.certificates import LOOPBACK, make_certificates, make_node_key
from copfl.flower.deployed import flat, write_connection
from copfl.flower.policy import FILE, Policy
from copfl.flower.policy_file import allowing, write_policy
from copfl.flower.run_config import COMPONENTS, TABLES, flat_keys
from copfl.flower.settings import DEFAULTS, settings_of
from copfl.flower.status import read_app

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
    readme = TEMPLATE / f"README-{'secure' if secure else 'insecure'}.md"
    (folder / "README.md").write_text(readme.read_text().format(host=host, port=port))
    about = {"data": data, "host": host, "port": port, "secure": secure}
    name = re.sub(r"[\W_]", "-", folder.resolve().name.lower()).strip("-") or "federation"
    nested = _nested(run_config, settings.tables)
    tool = {"copfl": about, "flwr": {"app": {"config": nested}}}
    pyproject = (TEMPLATE / "pyproject.txt").read_text().format(name=name) + as_toml({"tool": tool})
    (folder / "pyproject.toml").write_text(pyproject)
    # Whoever makes the app owns the server: what it names here is allowed there.
    write_policy(folder / FILE, allowing(Policy(rollback=True), nested, settings.tables))
    if secure:
        make_certificates(folder / "keys", host)
        for client in range(settings.config.clients):
            make_node_key(folder / "keys" / f"node-{client}")
    write_connection(folder, host, port, secure)
    return folder


def upgrade(folder: Path) -> Path | None:
    """Rewrites the run config of an older app with all of today's keys; the old file's path, if it changed.

    Flower overrides only keys that pyproject.toml has. Runs and nodes' states are read as they are.
    """
    app, path = read_app(folder), folder / "pyproject.toml"
    config = without(app["config"], "runs")  # a server's folder is not the run's to choose any more
    settings, flat = settings_of(config), flat_keys(config)
    content = tomllib.loads(path.read_text())
    flower = content["tool"]["flwr"]["app"]
    flower["config"] = _nested({**DEFAULTS, **flat}, settings.tables)
    flower["components"] = dict(COMPONENTS)
    if content == tomllib.loads(path.read_text()):
        return None
    old = path.with_name(f"{path.name}.old")
    if old.exists():
        raise RunError(f"{old} exists, and is not overwritten; move it away first")
    shutil.copy(path, old)
    write_bytes(path, as_toml(content).encode())
    return old


def _sample_keys(data: str) -> dict[str, Any]:
    """The keys of the run config that describe a sample, from a data set of the same kind."""
    if not data:
        return {}
    dataset = load(data)
    is_text = dataset.train.x.dtype.kind == "U"
    numbers = tuple(map(str, range(len(dataset.classes))))
    is_named = dataset.kind == CLASSIFICATION and dataset.classes != numbers
    return {
        "shape": "text" if is_text else ",".join(map(str, dataset.train.x.shape[1:])),
        "kind": dataset.kind,
        "classes": ",".join(dataset.classes) if is_named else str(len(dataset.classes)),
        "target-mean": ",".join(map(str, dataset.target_scale[0])),
        "target-std": ",".join(map(str, dataset.target_scale[1])),
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
        plain = {name: flat(v) for name, v in options.items() if not isinstance(v, dict)}
        result |= {prefix: plain} if plain else {}
    return result
