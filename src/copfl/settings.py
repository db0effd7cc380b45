"""What a run may be told, as names and numbers: the tables of run.toml, checked, with every default filled in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from copfl import configure, models
from copfl.algorithms import ALGORITHMS
from copfl.data.partition import SCHEMES
from copfl.errors import UsageError, unknown

PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64}
ENGINES = ("auto", "one_by_one", "all_at_once")
Tables = dict[str, dict[str, Any]]

# What suits a data set where the user says nothing: the paper's protocol, and for the embedded digits a federation
# that is scarce and skewed enough for personalisation to matter and small enough to finish in seconds.
SUITS: dict[str, Tables] = {
    "digits": {
        "run": {"rounds": 40, "batch": 8},
        "partition": {"per_client": 3, "train_per_class": 5, "test_per_class": 15},
        "model": {"name": "cnn"},
        "adam": {"lr": 1e-3},
        "mamo": {"lr": 1e-3},
        "sgd": {"lr": 0.1},
    },
    "cifar10c": {"partition": {"group_per_client": True}, "copfl": {"rate": 0.15}},
    "mini_imagenet": {"partition": {"per_client": 10}},
}


@dataclass(frozen=True)
class Loop:
    """The numbers of the round loop."""

    rounds: int = 100
    seed: int = 0
    batch: int = 32
    participation: float = 1.0
    look_every: int = 1  # rounds between evaluations
    checkpoint_every: int = 10
    buffers: str = "local"
    device: str = "cpu"
    engine: str = "auto"
    chunk: int = 0  # clients side by side; 0: the engine's own choice
    precision: str = "fp32"
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("rounds", "batch", "look_every", "checkpoint_every", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise UsageError(f"seed={self.seed} must be at least 0")
        if not 0 < self.participation <= 1:
            raise UsageError(f"participation={self.participation} must be above 0 and at most 1")
        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)


def resolve(tables: Mapping[str, Mapping[str, Any]], fixed: Mapping[str, object]) -> Tables:
    """The tables with every name checked and every default filled in: what run.toml will say.

    A table may be called by its kind ([algorithm], [partition], [model], [data]) or by its name ([copfl]).
    """
    names = {
        "algorithm": _name(tables, "algorithm", "copfl"),
        "data": _name(tables, "data", "digits"),
        "partition": _name(tables, "partition", "classes"),
    }
    suits = SUITS.get(names["data"], {}) if fixed.get("data") is None else {}
    names["model"] = _name(tables, "model", suits.get("model", {}).get("name", "resnet18"))
    kinds = {name: kind for kind, name in names.items()}
    if fixed.get("algorithm") is None:
        if names["algorithm"] not in ALGORITHMS:
            raise unknown("algorithm", names["algorithm"], ALGORITHMS)
        default = configure.keywords_of(ALGORITHMS[names["algorithm"]])["optimizer"]
        kinds[_name(tables, "optimizer", type(default).__name__.lower())] = "optimizer"
    merged: Tables = {kind: {"name": name} for kind, name in names.items()} | {"run": {}, "optimizer": {}}
    for source in (suits, tables):
        for title, table in source.items():
            kind = kinds.get(title, title)
            if kind not in merged:
                if source is suits:
                    continue  # a default for something that was not chosen
                raise unknown("table", title, {*merged, *kinds})
            merged[kind].update(
                {
                    k: v
                    for k, v in table.items()
                    if not (source is suits and kind == "partition" and names[kind] != "classes")
                }
            )
    run = merged["run"]
    clients = run.pop("clients", 10)
    if type(clients) is not int or clients < 1:
        raise UsageError(f"clients={clients!r} must be a whole number of at least 1")
    merged["run"] = {"clients": clients} | vars(Loop(**configure.checked("run", Loop, run)))
    if fixed.get("algorithm") is None:
        own = {k: v for k, v in merged["algorithm"].items() if k != "name"}
        algorithm = configure.algorithm_of(ALGORITHMS, names["algorithm"], own, merged["optimizer"])
        factory = ALGORITHMS[names["algorithm"]]
        defaults = configure.keywords_of(factory, skip=("optimizer",))
        merged["algorithm"] = (
            {"name": names["algorithm"]} | defaults | configure.checked(names["algorithm"], factory, own)
        )
        optimizer = algorithm.optimizer
        merged["optimizer"] = {"name": type(optimizer).__name__.lower()} | vars(optimizer)
    else:
        merged["algorithm"] = {"value": repr(fixed["algorithm"])}
        merged.pop("optimizer")
    for kind, registry, skip in (
        ("partition", SCHEMES, ("dataset", "clients", "seed")),
        ("model", models.MODELS, ("shape", "classes")),
    ):
        if fixed.get(kind) is not None:
            merged[kind] = {k: v for k, v in merged[kind].items() if k == "head"} | {
                "value": type(fixed[kind]).__name__
            }
            continue
        name = names[kind]
        if name not in registry:
            raise unknown(kind, name, registry)
        own = {k: v for k, v in merged[kind].items() if k not in ("name", "head")}
        defaults = configure.keywords_of(registry[name], skip)
        extra = {k: v for k, v in merged[kind].items() if k == "head"}
        merged[kind] = {"name": name} | defaults | configure.checked(name, registry[name], own, skip) | extra
    if fixed.get("data") is not None:
        merged["data"] = {"value": repr(getattr(fixed["data"], "name", ""))}
    elif "dir" not in merged["data"] and os.environ.get("COPFL_DATA"):
        merged["data"]["dir"] = os.environ["COPFL_DATA"]
    return merged


def _name(tables: Mapping[str, Mapping[str, Any]], kind: str, default: str) -> str:
    return str(tables.get(kind, {}).get("name", default))
