"""Names in files of version 0.1, and today's names; applied wherever such a file is read."""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from copfl.errors import UsageError

Tables = dict[str, dict[str, Any]]

TABLES = {"levers": "addons", "guard": "robust"}
KEYS: dict[str, dict[str, str]] = {  # by the table's title, or by the algorithm's name
    "run": {"look_every": "eval_every", "look_at": "eval_models"},
    "addons": {
        "momentum": "server_momentum",
        "average": "ema",
        "schedule": "lr_schedule",
        "over": "lr_rounds",
        "statistics": "bn_stats",
    },
    "attack": {"share": "fraction"},
    "robust": {"times": "norm_factor", "louder": "weight_factor"},
    "partition": {"concentration": "alpha"},
    "copfl": {
        "among": "candidates",
        "every": "interval",
        "by": "criterion",
        "without": "leave_one_out",
        "most": "max_weight",
    },
    "apfl": {"share": "alpha", "share_rate": "alpha_rate"},
    "ditto": {"pull": "lam"},
    "fedala": {"share": "fraction"},
    "fedcalm": {"keeps": "personal"},
    "fedper": {"keeps": "personal"},
    "fedpoe": {"held": "holdout"},
    "fedprox": {"pull": "mu"},
    "fedselect": {"every": "interval"},
    "lg_fedavg": {"keeps": "personal"},
    "pfedme": {"pull": "lam"},
}
VALUES: dict[tuple[str, str], dict[Any, Any]] = {
    ("run", "engine"): {"one_by_one": "sequential", "all_at_once": "vmap", "captured": "cuda_graph"},
    ("run", "eval_models"): {"own": "personal", "after": "final"},
    ("addons", "bn_stats"): {"own": "local"},
    ("model", "kernels"): {"living": "pruned"},
    ("copfl", "candidates"): {"anew": "reselect"},
    ("copfl", "leave_one_out"): {"letter": "paper"},
}
# Options that were measured and removed, with the value that changes nothing; docs/notes/what-we-tried.md.
REMOVED: dict[tuple[str, str], Any] = {
    ("copfl", "hold"): "value",
    ("copfl", "phases"): "restart",
    ("copfl", "scale"): "none",
    ("copfl", "smooth"): 0.0,
}
METRICS = {
    "personal_share": "personal_fraction",
    "personal_share_of_moving": "personal_fraction_of_moving",
    "hostile": "malicious",
    "own_share": "local_weight",
    "mean_share": "global_weight",
    "own_head": "own_head_weight",
    "own_coefficient": "own_weight",
    "distance": "distillation_loss",
    "share": "alpha",
    "taken": "global_fraction",
}
# Fields of the records in a checkpoint; applied to the names that the algorithm does not have.
RECORDS = {
    "claim": "reported_weight",
    "hostile": "malicious",
    "own": "personal",
    "share": "alpha",
    "turns": "rounds",
    "then": "reference",
    "held": "uploaded",
    "heard": "reports",
    "length": "norm",
}
ENVIRONMENT = {"side_by_side": "batched_model", "held": "label_counts"}

# The kind of a new client's message in `wire.FORMAT` 2; another name needs another format.
NEW_CLIENT_MESSAGE = "newcomer"


def migrated(tables: Mapping[str, Mapping[str, Any]]) -> Tables:
    """The tables of a run file under today's names."""
    algorithm = str(tables.get("algorithm", {}).get("name", "copfl"))
    result: Tables = {}
    for title, table in tables.items():
        title = TABLES.get(title, title)
        kind = algorithm if title == "algorithm" else title
        today = result.setdefault(title, {})
        for key, value in table.items():
            key = KEYS.get(kind, {}).get(key, key)
            if isinstance(value, str):
                value = VALUES.get((kind, key), {}).get(value, value)
            if (kind, key) not in REMOVED:
                today[key] = value
            elif value != REMOVED[kind, key]:
                measured = "docs/notes/what-we-tried.md has the measurements"
                remedy = "leave it out, or run this file with copfl 0.1"
                raise UsageError(f"{kind}.{key}={value!r} was removed ({measured}); {remedy}")
    return result


def renamed(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The record with its keys renamed, in its order."""
    return {names.get(key, key): value for key, value in record.items()}


def renamed_tensor(path: str, expected: Collection[str]) -> str | None:
    """Today's name of a checkpoint's tensor, such as "server.moments.u"; None for one that is not needed."""
    fields = [RECORDS.get(field, field) for field in path.split(".")]
    if fields[-1] == "malicious":  # an attack knows its clients without a record
        return None
    name = ".".join(fields)
    inner = name.removeprefix("server.")  # the median and the trimmed mean have no record any more
    return inner if name not in expected and inner in expected else name


def settings_fingerprint(tables: Mapping[str, Mapping[str, Any]], contents: Tables) -> str:
    """The fingerprint of the settings in a checkpoint of version 0.1, from its run.toml as it was written."""
    neutral = {"rounds", "checkpoint_every", "save_models", "dir", "code"}
    neutral |= {"device", "engine", "chunk", "threads", "workers", "mkldnn"}
    kept = {title: {k: v for k, v in t.items() if k not in neutral} for title, t in tables.items()}
    if kept["run"].get("look_at") == "all":
        del kept["run"]["look_at"]
    text = json.dumps({**kept, **contents}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
