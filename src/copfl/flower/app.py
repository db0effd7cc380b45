"""A Flower app in a folder of one's own: `flwr run` it, or try it on one machine first."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.errors import RunError, UsageError
from copfl.experiment.config import as_toml
from copfl.flower.certificates import is_loopback, make_certificates, make_node_key
from copfl.flower.settings import DEFAULTS, settings_of

PACKAGE = "federated"  # the app's own code

CLIENT = '''"""What each node runs."""

from copfl.flower.client_app import app

__all__ = ["app"]
'''
SERVER = '''"""What the server runs."""

from copfl.flower.server_app import app

__all__ = ["app"]
'''
OWN = '''"""Your own model and data, if copfl's are not what you need.

    model = "federated.own:model"            in pyproject.toml, [tool.flwr.app.config]
    data="federated.own:data"                in a node's --node-config
"""

from torch import nn

from copfl.data.arrays import from_arrays
from copfl.data.samples import Dataset


def model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Any module that maps a batch of samples to logits. Every node builds it with the same seed."""
    size = 1
    for side in shape:
        size *= side
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, classes))


def data(node_config: dict[str, object]) -> Dataset:
    """This node's samples, wherever they are: x [n, ...], y [n]. Nothing of them leaves the node."""
    import numpy as np

    path = str(node_config["path"])
    with np.load(path) as arrays:
        return from_arrays(arrays["x"], arrays["y"], name="own")
'''


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
    """The folder, with a Flower app in it for this algorithm and model, and for samples such as `data` holds.

    `secure`, by default for every host but this machine, makes certificates and a key for every node. `config` goes
    over the keys of the run config, see settings.DEFAULTS.
    """
    folder = Path(folder)
    if (folder / "pyproject.toml").exists():
        raise RunError(f"{folder} holds an app already; name another folder, or edit its pyproject.toml")
    secure = not is_loopback(host) if secure is None else secure
    if not secure and not is_loopback(host):
        raise UsageError(
            f"{host} can be reached from outside: a federation there needs certificates and node keys"
        )
    run = {**_like(data), "algorithm": algorithm, "model": model, "clients": clients, **(config or {})}
    settings_of(run)  # what does not fit is said now
    package = folder / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text('"""A federation with copfl."""\n')
    (package / "client.py").write_text(CLIENT)
    (package / "server.py").write_text(SERVER)
    (package / "own.py").write_text(OWN)
    (folder / ".gitignore").write_text("/keys/\n/.flwr/\n/.trial/\n/nodes/\n/runs/\n/logs/\n/superlink.db*\n")
    (folder / "pyproject.toml").write_text(_pyproject(folder.resolve().name, run, data, host, port, secure))
    (folder / "README.md").write_text(_readme(host, port, clients, secure))
    if secure:
        make_certificates(folder / "keys", host)
        for client in range(clients):
            make_node_key(folder / "keys" / f"node-{client}")
    write_connection(folder, host, port, secure)
    return folder


def write_connection(folder: Path, host: str, port: int, secure: bool, home: str = ".flwr") -> None:
    """Tells the `flwr` command, with FLWR_HOME=FOLDER/HOME, where the SuperLink is."""
    (folder / home).mkdir(exist_ok=True)
    how = f'root-certificates = "{(folder / "keys" / "ca.pem").resolve()}"' if secure else "insecure = true"
    (folder / home / "config.toml").write_text(
        f'[superlink]\ndefault = "copfl"\n\n[superlink.copfl]\naddress = "{host}:{port}"\n{how}\n'
    )


def about(folder: Path) -> dict[str, Any]:
    """What `init` wrote down about the federation: its data, host, port, whether it is secure, and its run config."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        return {**project["tool"]["copfl"], "config": _flat(project["tool"]["flwr"]["app"]["config"])}
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise RunError(
            f"{folder} holds no app of copfl's ({error}); make one with `copfl federate init {folder}`"
        ) from error


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in table.items():
        result |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return result


def _like(data: str) -> dict[str, Any]:
    """The run config's keys that say what a sample is, taken from a data set of the same kind."""
    from copfl.data.datasets import load

    if not data:
        return {}
    dataset = load(data)
    numbered = all(name.isdigit() for name in dataset.classes)
    return {
        "shape": ",".join(str(side) for side in dataset.train.x.shape[1:]),
        "classes": str(len(dataset.classes)) if numbered else ",".join(dataset.classes),
        "mean": ",".join(str(v) for v in dataset.mean),
        "std": ",".join(str(v) for v in dataset.std),
        "augment": dataset.augment,
    }


def _pyproject(name: str, run: Mapping[str, Any], data: str, host: str, port: int, secure: bool) -> str:
    flat = {**DEFAULTS, **{key: value for key, value in run.items() if "." not in key}}
    # Flower lets people override only what is written here, so every option is.
    tables = {**_options(str(flat["algorithm"]), run), "model-options": {}}
    for key, value in run.items():
        table, dot, option = key.partition(".")
        if dot:
            tables[table][option] = value
    plain = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-") or "federation"
    config = ("tool", "flwr", "app", "config")
    titled: dict[tuple[str, ...], Mapping[str, Any]] = {
        ("build-system",): {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        ("project",): {
            "name": plain,
            "version": "1.0.0",
            "description": "A federation with copfl",
            "license": "Apache-2.0",
            "dependencies": ["copfl[flower]"],
        },
        ("tool", "hatch", "build", "targets", "wheel"): {"packages": ["."]},
        ("tool", "copfl"): {"data": data, "host": host, "port": port, "secure": secure},
        ("tool", "flwr", "app"): {"publisher": "copfl"},
        ("tool", "flwr", "app", "components"): {
            "serverapp": f"{PACKAGE}.server:app",
            "clientapp": f"{PACKAGE}.client:app",
        },
        config: flat,
    }
    return as_toml(titled | {(*config, table): options for table, options in tables.items() if options})


def _options(algorithm: str, run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The algorithm's and the optimizer's options with their defaults."""
    from copfl.algorithms import ALGORITHMS
    from copfl.experiment.config import keywords_of, optimizer_of

    factory = ALGORITHMS[algorithm]
    given = {
        key.removeprefix("optimizer."): value for key, value in run.items() if key.startswith("optimizer.")
    }
    options = keywords_of(factory, skip=("optimizer",))
    result = {"options": {name: v for name, v in options.items() if isinstance(v, bool | int | float | str)}}
    if "optimizer" in keywords_of(factory):
        chosen: Any = optimizer_of(factory, given)
        result["optimizer"] = {"name": type(chosen).__name__.lower(), **dataclasses.asdict(chosen)}
    return result


def _readme(host: str, port: int, clients: int, secure: bool) -> str:
    link = (
        "--ssl-ca-certfile keys/ca.pem --ssl-certfile keys/server.pem --ssl-keyfile keys/server.key "
        "--enable-supernode-auth"
    )
    node = "--root-certificates ca.pem --auth-supernode-private-key node-0"
    register = f"""
Register every node's public key once, while the SuperLink runs:

```bash
for n in $(seq 0 {clients - 1}); do flwr supernode register keys/node-$n.pub copfl; done
```
"""
    return f"""# A federation with copfl

Try it on one machine first: `copfl federate up .`

On every machine, once: `pip install "copfl[flower]"`, and in every shell:

```bash
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME=$PWD/.flwr
```

On the server ({host}), in this folder:

```bash
flower-superlink {link if secure else "--insecure"} \\
  --host {host if is_loopback(host) else "0.0.0.0"} --port {port} \\
  --database superlink.db --disable-runtime-dependency-installation
```
{register if secure else ""}
On each node, with its own number and its own data{", and with ca.pem and its own key" if secure else ""}:

```bash
flower-supernode {node if secure else "--insecure"} --superlink {host}:{port} \\
  --node-config 'client=0 data="/path/of/data.npz" state-dir="/path/of/state"'
```

Then, on the server: `flwr run . copfl --stream`
After a crash: `flwr run . copfl --stream -c 'run="NAME" resume=true'`

What can be set is in pyproject.toml under [tool.flwr.app.config]; the rounds are in runs/NAME/rounds.jsonl.
"""
