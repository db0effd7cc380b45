"""A Flower app in a folder: run it with `flwr run`, or first on one machine with `copfl federate up`."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.data.datasets import load
from copfl.data.samples import CLASSIFICATION
from copfl.errors import RunError, UsageError
from copfl.flower.certificates import LOOPBACK, make_certificates
from copfl.flower.deployed import flat, write_connection
from copfl.flower.membership import AUTHORITY, make_coordinator, make_member_keys
from copfl.flower.policy import FILE, Policy, Proposals
from copfl.flower.policy_file import allowing, write_policy
from copfl.flower.proposal import KEY
from copfl.flower.run_config import TABLES
from copfl.flower.settings import DEFAULTS, settings_of
from copfl.settings.toml import Tables, written

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
    trial: bool | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """The folder, with a Flower app for this algorithm and model, and for samples like those of `data`.

    `secure` makes certificates; it is the default for every host but this machine.
    `trial` makes a key for every member, and leaves all private keys in the folder: for a federation whose machines
    have one owner, as on this machine, where it is the default. Else members make their own keys, and those of the
    coordinator and of the authority are in `authority_of(folder)`, outside of the server's folder.
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
    run_config["model"] = settings.run.model.name  # of a folder, its absolute path
    (folder / "federated").mkdir(parents=True, exist_ok=True)
    for path in (TEMPLATE / "federated").glob("*.py"):
        shutil.copy(path, folder / "federated")
    shutil.copy(TEMPLATE / "gitignore.txt", folder / ".gitignore")
    readme = TEMPLATE / f"README-{'secure' if secure else 'insecure'}.md"
    (folder / "README.md").write_text(readme.read_text().format(host=host, port=port))
    trial = not is_open if trial is None else trial
    authority = folder / "keys" if trial else authority_of(folder)
    about = {"data": data, "host": host, "port": port, "secure": secure}
    about |= {} if trial else {AUTHORITY: str(authority.resolve())}
    name = re.sub(r"[\W_]", "-", folder.resolve().name.lower()).strip("-") or "federation"
    nested = _nested(run_config, settings.run.tables())
    tool = {"copfl": about, "flwr": {"app": {"config": {KEY: "", **nested}}}}
    pyproject = (TEMPLATE / "pyproject.txt").read_text().format(name=name) + written({"tool": tool})
    (folder / "pyproject.toml").write_text(pyproject)
    # Whoever makes the app owns the server: what it names here is allowed there.
    (folder / "keys").mkdir(mode=0o700, exist_ok=True)
    own = Proposals(coordinators=(make_coordinator(folder, authority),))
    write_policy(folder / FILE, allowing(Policy(rollback=True, proposals=own), nested, settings.run))
    if secure:
        make_certificates(folder / "keys", host, authority)
    if trial:
        make_member_keys(folder, settings.config.clients)
    write_connection(folder, host, port, secure)
    return folder


def authority_of(folder: Path) -> Path:
    """Where `init` puts the keys of the authority and of the coordinator: beside the server's folder."""
    return folder.resolve().with_name(f"{folder.resolve().name}-authority")


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
        options = {name: v for name, v in tables.get(title, {}).items() if name not in hidden}
        plain = {name: flat(v) for name, v in options.items() if not isinstance(v, dict)}
        result |= {prefix: plain} if plain else {}
    return result
