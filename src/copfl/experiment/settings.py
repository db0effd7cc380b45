"""What a run may be told, as names and numbers: the tables of run.toml, checked, with every default filled in."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from copfl import models
from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import EVAL_MODELS
from copfl.data.partition import SCHEMES, Partition
from copfl.errors import UsageError, unknown
from copfl.experiment import config, user_code
from copfl.experiment.config import Tables
from copfl.wrappers.addons import with_addons
from copfl.wrappers.attacks import ATTACKS, attacked
from copfl.wrappers.privacy import Private
from copfl.wrappers.robust import ROBUST_RULES

# "auto" is tf32 on a GPU and fp32 elsewhere; in tf32 and bf16 only the matrix products are short.
PRECISIONS = {
    "auto": torch.float32, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.float32, "fp64": torch.float64
}  # fmt: skip
ENGINES = ("auto", "sequential", "vmap", "cuda_graph")
STORES = ("memory", "disk")
SWITCH = ("auto", "on", "off")
MOST = {"clients": 10**7, "threads": 1024, "workers": 1024}  # beyond, memory is gone before there is an error
KINDS = ("algorithm", "optimizer", "data", "partition", "model", "run")
AROUND = (
    "addons",
    "robust",
    "privacy",
    "attack",
)  # around the algorithm: tables that a run has only if given
ATTACKED = ("algorithm", "attack", "clients", "seed")  # what `attacked` and `Private` get from other tables
PRIVATE = ("algorithm", "clients", "taking_part", "seed")

# What suits a data set where the user says nothing: the paper's protocol, and for the embedded digits a federation
# that is scarce and skewed enough for personalisation to matter and small enough to finish in seconds.
SUITS: dict[str, Tables] = {
    "digits": {
        "run": {"rounds": 40, "batch": 8},
        "classes": {"per_client": 3, "train_per_class": 5, "test_per_class": 15},
        "model": {"name": "cnn"},
        "adam": {"lr": 1e-3},
        "mamo": {"lr": 1e-3},
        "sgd": {"lr": 0.1},
    },
    "cifar10c": {"data": {"all": True}, "classes": {"group_per_client": True}, "copfl": {"rate": 0.15}},
    # At its native 84 pixels a round takes minutes on a CPU; --set data.size=84 is one option away.
    "mini_imagenet": {"data": {"size": 32}, "classes": {"per_client": 10}},
}


SHARE = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?%")


@dataclass(frozen=True)
class Loop:
    """The numbers of the round loop."""

    clients: int = 10
    rounds: int = 100
    seed: int = 0
    batch: int = 32
    participation: float = 1.0
    eval_every: int = 1  # rounds between evaluations
    eval_models: str = "all"  # "personal": not the global model alone; "final": only after training
    checkpoint_every: int = 10
    buffers: str = "local"
    device: str = "cpu"
    engine: str = "auto"
    chunk: int = 0  # clients side by side; 0: the engine's own choice
    precision: str = "auto"
    threads: int = 1
    workers: int = 1  # processes that train clients, on a CPU; 0: as many as a short measurement finds to pay
    store: str = (
        "memory"  # where the clients' states are between their turns: "memory", or "disk" for many clients
    )
    mkldnn: str = "auto"  # a CPU's kernels: "on", "off", or what a short measurement finds quicker
    save_models: bool = True  # whether every client's personal model is written when the run ends

    def __post_init__(self) -> None:
        for name in ("clients", "rounds", "batch", "eval_every", "checkpoint_every", "threads"):
            if not 1 <= getattr(self, name) <= MOST.get(name, 10**9):
                most = f"at least 1 and at most {MOST.get(name, 10**9):,}"
                raise UsageError(f"{name}={getattr(self, name)} must be {most}")
        if not 0 <= self.workers <= MOST["workers"]:
            raise UsageError(
                f"workers={self.workers} must be at least 1 and at most {MOST['workers']:,}, or 0: as many as pay"
            )
        if self.chunk < 0:
            raise UsageError(f"chunk={self.chunk} must be at least 0; 0 leaves the choice to the engine")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed} must be at least 0 and below 2^63")
        if not 0 < self.participation <= 1:
            raise UsageError(f"participation={self.participation} must be above 0 and at most 1")
        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.eval_models not in EVAL_MODELS:
            raise unknown("eval_models", self.eval_models, EVAL_MODELS)
        if self.store not in STORES:
            raise unknown("store", self.store, STORES)
        if self.mkldnn not in SWITCH:
            raise unknown("mkldnn", self.mkldnn, SWITCH)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)


def resolve(layers: Sequence[Mapping[str, Mapping[str, Any]]], fixed: Mapping[str, object]) -> Tables:
    """The tables with every name checked and every default filled in: what run.toml will say.

    Of several layers, a run file and the command line, the later ones win. A table is titled by its kind ([algorithm],
    [partition], [model], ...) or by what is chosen there ([copfl]). A kind that is `fixed` is a value the caller has.
    """
    merged = _merged(layers, fixed)
    for kind in ("algorithm", "addons"):
        merged[kind] = {key: _of_rounds(value, merged["run"]) for key, value in merged[kind].items()}
    for kind, table in merged.items():
        _check_plain(kind, table)
        if "value" in table and kind not in fixed:
            raise UsageError(
                f"the {kind} of this run is {table['value']}, a value that a Python program passed; run it again from "
                f"there, or name it: [{kind}] name = ..."
            )
    result = {
        **_algorithm(merged["algorithm"], merged["optimizer"], fixed.get("algorithm")),
        "data": _data(merged["data"], fixed.get("data")),
        "partition": _partition(merged["partition"], fixed.get("partition"), merged["run"]),
        "model": _model(merged["model"], fixed.get("model")),
    }
    loop = Loop(**config.checked("run", Loop, merged["run"]))
    result |= _around(merged, loop.rounds)
    return {**result, "run": vars(loop)}


def _of_rounds(value: Any, run: Mapping[str, Any]) -> Any:
    """A share of the run's rounds, such as "50%", as a number of rounds; anything else as it is."""
    rounds = run.get("rounds", Loop.rounds)
    if not (isinstance(value, str) and SHARE.fullmatch(value) and isinstance(rounds, int)):
        return value
    return round(float(value[:-1]) / 100 * rounds)


def _check_plain(kind: str, table: Mapping[str, Any]) -> None:
    """Nothing, if the table can be written down and read again as it is."""
    if not isinstance(table.get("name", ""), str):
        raise UsageError(f"{kind}.name={table['name']!r} must be a word")
    for key, value in table.items():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, dict | list | datetime.date | datetime.time):
                raise UsageError(f"{kind}.{key}={value!r} must be a number, a word, or a list of them")


def _around(merged: Tables, rounds: int) -> Tables:
    """The tables of what stands around the algorithm, as far as there are any, with their defaults."""
    result: Tables = {}
    for kind, known in (("robust", ROBUST_RULES), ("attack", ATTACKS)):
        if table := merged[kind]:
            name = table.get("name")
            if name is None:
                raise UsageError(f"[{kind}] needs a name: {', '.join(known)}")
            if name not in known:
                raise unknown("robust rule" if kind == "robust" else kind, str(name), known)
            factory, skip = (ROBUST_RULES[name], ("algorithm",)) if kind == "robust" else (attacked, ATTACKED)
            options = config.checked(kind, factory, _without(table, "name"), skip)
            result[kind] = {"name": name, **config.keywords_of(factory, skip), **options}
    if merged["addons"]:
        options = config.checked("addons", with_addons, merged["addons"], ("algorithm",))
        result["addons"] = config.keywords_of(with_addons, ("algorithm",)) | options
        if result["addons"]["lr_schedule"] != "constant" and not result["addons"]["lr_rounds"]:
            result["addons"]["lr_rounds"] = (
                rounds  # fixed, so that resuming to more rounds keeps the schedule
            )
    if merged["privacy"]:
        options = config.checked("privacy", Private, merged["privacy"], PRIVATE)
        result["privacy"] = config.keywords_of(Private, PRIVATE) | options
    return {kind: result[kind] for kind in AROUND if kind in result}


def _merged(layers: Sequence[Mapping[str, Mapping[str, Any]]], fixed: Mapping[str, object]) -> Tables:
    """One table of each kind, its name in it, out of all layers and of what suits the data set."""
    merged: Tables = {kind: {} for kind in (*KINDS, *AROUND)}
    for layer in layers:
        for kind in merged:
            name = layer.get(kind, {}).get("name")
            if name is not None and str(name) != _names(merged, fixed).get(kind):
                # Options of what is no longer chosen go with it, and another algorithm brings its own optimizer.
                for gone in ("algorithm", "optimizer") if kind == "algorithm" else (kind,):
                    merged[gone] = {}
                merged[kind]["name"] = str(name)
        titles = {title: kind for kind, title in _names(merged, fixed).items()} | {
            kind: kind for kind in merged
        }
        for title, table in layer.items():
            if title not in titles:
                raise unknown("table", title, titles)
            merged[titles[title]].update(table)
    names = _names(merged, fixed)
    titles = {title: kind for kind, title in names.items()} | {kind: kind for kind in ("run", *names)}
    for title, table in SUITS.get(names.get("data", ""), {}).items():
        if title in titles:
            merged[titles[title]] = {**table, **merged[titles[title]]}
    return {
        kind: {"name": names[kind], **table} if kind in names else table for kind, table in merged.items()
    }


def _names(merged: Tables, fixed: Mapping[str, object]) -> dict[str, str]:
    """What is chosen of each kind, or would be if nothing more is said."""
    given = {kind: str(table["name"]) for kind, table in merged.items() if "name" in table}
    names = {"algorithm": "copfl", "data": "digits", "partition": "classes", "model": "resnet18", **given}
    names = {kind: name for kind, name in names.items() if kind not in fixed}
    if "model" in names and "model" not in given:
        names["model"] = SUITS.get(names.get("data", ""), {}).get("model", {}).get("name", "resnet18")
    factory = ALGORITHMS.get(names.get("algorithm", ""))
    if factory is not None and "optimizer" not in given:
        names["optimizer"] = type(config.keywords_of(factory)["optimizer"]).__name__.lower()
    return names


def _algorithm(table: dict[str, Any], optimizer: dict[str, Any], value: object) -> Tables:
    if value is not None:
        if table.keys() - {"value"} or optimizer:
            raise UsageError("the algorithm is a value, so its options and its optimizer are set there")
        return {"algorithm": {"value": repr(value)}}
    name, own_options = table["name"], _without(table, "name")
    made = config.algorithm_of(ALGORITHMS, name, own_options, optimizer)
    factory = ALGORITHMS[name]
    options = config.keywords_of(factory, ("optimizer",)) | config.checked(name, factory, own_options)
    used = made.optimizer
    return {
        "algorithm": {"name": name, **options},
        "optimizer": {"name": type(used).__name__.lower(), **vars(used)},
    }


def _data(table: dict[str, Any], value: object) -> dict[str, Any]:
    """The table with its paths made absolute, so that the run can be run again from any folder."""
    if value is not None:
        if table.keys() - {"value"}:
            raise UsageError("the data set is a value, so it has no options")
        return {"value": str(getattr(value, "name", type(value).__name__))}
    table = dict(table)
    if "dir" not in table and os.environ.get("COPFL_DATA"):
        table["dir"] = os.environ["COPFL_DATA"]
    if "dir" in table:
        table["dir"] = str(Path(str(table["dir"])).absolute())
    name = table["name"]
    if user_code.is_reference(name):
        user_code.attribute("data", name, table.get("code"))
        return table | _code(name)
    if len(Path(name).parts) > 1 or os.path.exists(name):  # which does not mind names that no file can have
        from copfl.data.datasets import DATASETS

        table["name"] = name if name in DATASETS else str(Path(name).absolute())
    return table


def _partition(table: dict[str, Any], value: object, run: dict[str, Any]) -> dict[str, Any]:
    """The table; where the partition is there already, it says how many clients there are."""
    name = table.get("name", "")
    if value is None and "value" not in table and name not in SCHEMES and name.endswith(".json"):
        table = {**table, "name": str(Path(name).absolute())}
        value = Partition.load(name)
    if isinstance(value, Partition):
        if run.setdefault("clients", value.clients) != value.clients:
            raise UsageError(
                f"clients={run['clients']}, but the partition is of {value.clients}; leave the number of clients out"
            )
        return table if table else {"value": f"a partition by {value.scheme}"}
    if name not in SCHEMES:
        raise unknown("partition", name, SCHEMES)
    skip = ("dataset", "clients", "seed")
    options = config.checked(name, SCHEMES[name], _without(table, "name"), skip)
    return {"name": name, **config.keywords_of(SCHEMES[name], skip), **options}


def _model(table: dict[str, Any], value: object) -> dict[str, Any]:
    if value is not None:
        if table.keys() - {"value", "head"}:
            raise UsageError('the model is a value, so it has no options but "head"')
        return {**table, "value": type(value).__name__}
    name, head = table["name"], {k: v for k, v in table.items() if k == "head"}
    if user_code.is_reference(name):
        factory = user_code.attribute("model", name, table.get("code"))
        options = _without(table, "name", "head", "code")
        if callable(factory) and not user_code.takes_any(factory):
            options = config.checked(name, factory, options, tuple(user_code.given_by_copfl(factory)))
        return {"name": name, **options, **head, **_code(name)}
    if name not in models.MODELS:
        raise unknown("model", name, [*models.MODELS, "mymodule:MyNet"])
    factory, skip = models.MODELS[name], ("shape", "classes")
    options = config.checked(name, factory, _without(table, "name", "head"), skip)
    return {"name": name, **config.keywords_of(factory, skip), **options, **head}


def _code(reference: str) -> dict[str, str]:
    """Where code of one's own was found, so that the run can be run again from any folder."""
    home = user_code.home_of(reference)
    return {} if home is None else {"code": home}


def _without(table: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k not in keys}
