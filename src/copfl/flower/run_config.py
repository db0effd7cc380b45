"""The form of a run config: Flower's flat keys as tables. The settings and the policy read it here. Without torch."""

import json
import re
from collections.abc import Mapping
from typing import Any

from copfl.errors import UsageError, raised_as
from copfl.settings.toml import Tables

COMPONENTS = {"serverapp": "copfl.flower.server_app:app", "clientapp": "copfl.flower.client_app:app"}
TABLES = {  # prefixes of keys with a dot, and the tables of run.toml that they are
    "options": "algorithm",
    "optimizer": "optimizer",
    "model-options": "model",
    "adapter-options": "adapter",
    "server-options": "server",
    "robust-options": "robust",
    "task": "task",
}
# A list of one may be written as a number.
LISTS = ("shape", "classes", "mean", "std", "target-mean", "target-std")
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def is_plain_name(run: str) -> bool:
    """Whether the name of a run can be the name of a folder, and of no file that a machine has beside it."""
    return PLAIN_NAME.fullmatch(run) is not None


def flat_keys(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run config without a dot."""
    return {key.replace("_", "-"): value for key, value in tables_of(run_config)[0].items()}


def tables_of(run_config: Mapping[str, Any]) -> tuple[dict[str, Any], Tables]:
    """The keys without a dot, and the others as tables of run.toml."""
    if new := {"new-clients", "new_clients", "run.new_clients"} & run_config.keys():
        raise UsageError(
            f"{min(new)} is for the simulation, which keeps a fraction of its clients out of the training; "
            "here a new client joins after it: `copfl federate join FOLDER --data FILE`, or join=3 in a run"
        )
    flat: dict[str, Any] = {}
    tables: Tables = {title: {} for title in TABLES.values()}
    for key, value in run_config.items():
        prefix, _, option = key.partition(".")
        if prefix in TABLES and isinstance(value, Mapping):  # as in pyproject.toml
            tables[TABLES[prefix]] |= {name: _listed(name, v) for name, v in value.items()}
        elif prefix in TABLES and option:
            tables[TABLES[prefix]][option] = _listed(option, value)
        else:
            flat[key.replace("-", "_")] = str(value) if key in LISTS else value
    tables["algorithm"]["name"] = flat.get("algorithm", "copfl")
    return flat, tables


def _listed(name: str, value: Any) -> Any:
    """The list that `deployed.flat` wrote as text; any other value unchanged."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    wrong = f"{name}={value[:40]} must be a list such as [1, 2] or a word ({{}})"
    with raised_as(UsageError, wrong, ValueError, RecursionError):
        return json.loads(value)
