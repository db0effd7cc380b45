"""The parts of a run by kind: `resolve` fills in the defaults of a table, `build` makes its value.

A kind is a table of run.toml: [algorithm], [optimizer], [data], [partition], [model] or a wrapper.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from copfl import models
from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import AnyAlgorithm, example_upload
from copfl.core.optim import Adam, Optimizer, Sgd
from copfl.core.task import Task
from copfl.data import datasets
from copfl.data.federation import Federation
from copfl.data.partition import Partition
from copfl.data.samples import CLASSIFICATION, Dataset
from copfl.data.schemes import SCHEMES, number_of_groups
from copfl.errors import UsageError, unknown
from copfl.experiment import config, user_code
from copfl.experiment.config import Tables
from copfl.experiment.run_settings import RunSettings
from copfl.models import adapters, pretrained, text
from copfl.parts.mamo import Mamo
from copfl.wrappers.addons import with_addons
from copfl.wrappers.attacks import ATTACKS, attacked
from copfl.wrappers.privacy import Private, check_sums
from copfl.wrappers.robust import ROBUST_RULES

Table = dict[str, Any]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "mamo": Mamo, "sgd": Sgd}
KINDS = ("algorithm", "optimizer", "data", "partition", "model", "run")
MODEL_KEYS = ("head", "train", "freeze", "tokenizer", "max_length")  # of every model, however it is made

# Defaults for a data set: the paper's protocol. The digits' federation is small enough to finish in seconds
# and skewed enough for personalisation to matter.
DEFAULTS: dict[str, Tables] = {
    "digits": {
        "run": {"rounds": 40, "batch": 8},
        "classes": {"per_client": 3, "train_per_class": 5, "test_per_class": 15},
        "model": {"name": "cnn"},
        "adam": {"lr": 1e-3},
        "mamo": {"lr": 1e-3},
        "sgd": {"lr": 0.1},
    },
    "cifar10c": {"data": {"all": True}, "classes": {"group_per_client": True}, "copfl": {"rate": 0.15}},
    # At its native 84 pixels a round takes minutes on a CPU; --set data.size=84 selects them.
    "mini_imagenet": {"data": {"size": 32}, "classes": {"per_client": 10}},
}
PERCENTAGE = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?%")


# Components


@dataclass(frozen=True)
class Component:
    """A choice among factories by name, whose keyword arguments are the options of the table."""

    kind: str
    factories: Mapping[str, Callable[..., Any]]  # without a name where there is nothing to choose
    context: tuple[str, ...] = ()  # parameters that do not come from the table

    def factory(self, table: Mapping[str, Any]) -> Callable[..., Any]:
        name = table.get("name", "")
        if name not in self.factories:
            if not name:
                raise UsageError(f"[{self.kind}] needs a name: {', '.join(self.factories)}")
            raise unknown(self.kind, name, self.factories)
        return self.factories[name]

    def resolve(self, table: Mapping[str, Any]) -> Table:
        """The table with its options checked and every default filled in."""
        factory = self.factory(table)
        name = {"name": table["name"]} if "name" in table else {}
        options = config.checked(table.get("name", self.kind), factory, without(table, "name"), self.context)
        return {**name, **config.keywords_of(factory, self.context), **options}

    def build(self, table: Mapping[str, Any], **context: Any) -> Any:
        """The value that a resolved table describes."""
        return config.built(self.factory(table), {**context, **without(table, "name")})


ALGORITHM = Component("algorithm", ALGORITHMS, ("optimizer",))
OPTIMIZER = Component("optimizer", OPTIMIZERS)
PARTITION = Component("partition", SCHEMES, ("dataset", "clients", "seed"))
MODEL = Component("model", models.MODELS, ("shape", "classes"))
ADAPTER = Component("adapter", adapters.ADAPTERS, ("model",))
ROBUST = Component("robust", ROBUST_RULES, ("algorithm",))
WRAPPERS = {  # around the algorithm, from the inside out; only if given
    "addons": Component("addons", {"": with_addons}, ("algorithm",)),
    "robust": ROBUST,
    "privacy": Component("privacy", {"": Private}, ("algorithm", "clients", "taking_part", "seed")),
    "attack": Component(
        "attack", dict.fromkeys(ATTACKS, attacked), ("algorithm", "attack", "clients", "seed")
    ),
}


def default_optimizer(algorithm: str) -> Any:
    """The optimizer of an algorithm where none is given; None for an unknown algorithm."""
    return config.keywords_of(ALGORITHMS[algorithm])["optimizer"] if algorithm in ALGORITHMS else None


def resolve_algorithm(table: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Tables:
    """The tables of an algorithm and of its optimizer, which without a name is the algorithm's own."""
    resolved = ALGORITHM.resolve(table)
    default = default_optimizer(table["name"])
    usual = type(default).__name__.lower()
    options = vars(default) if optimizer.get("name", usual) == usual else {}
    return {"algorithm": resolved, "optimizer": OPTIMIZER.resolve({"name": usual, **options, **optimizer})}


def build_algorithm(tables: Mapping[str, Mapping[str, Any]]) -> AnyAlgorithm:
    """The algorithm that the resolved tables [algorithm] and [optimizer] describe."""
    optimizer = OPTIMIZER.build(tables["optimizer"])
    algorithm: AnyAlgorithm = ALGORITHM.build(tables["algorithm"], optimizer=optimizer)
    return algorithm


def resolve_data(table: Mapping[str, Any]) -> Table:
    """The table with absolute paths, so that the run can be repeated from any folder."""
    table = dict(table)
    if folder := table.get("dir", os.environ.get("COPFL_DATA")):
        table["dir"] = str(Path(str(folder)).absolute())
    name = table["name"]
    if user_code.is_reference(name):
        user_code.attribute("data", name, table.get("code"))
        return table | {"code": user_code.folder_of(name)}
    if (len(Path(name).parts) > 1 or os.path.exists(name)) and name not in datasets.DATASETS:
        table["name"] = str(Path(name).absolute())
    return table


def build_data(table: Mapping[str, Any]) -> Dataset:
    """The data set that the table describes."""
    name, folder = table["name"], Path(table["dir"]) if "dir" in table else None
    options = without(table, "name", "dir", "code")
    if user_code.is_reference(name):
        given = user_code.attribute("data", name, table.get("code"))
        return user_code.dataset_of(given, folder, options, name)
    checked = config.checked(name, datasets.reader(name), options, skip=("data_dir", "path"))
    return datasets.load(name, folder, **checked)


@lru_cache(maxsize=1)  # a comparison resolves many runs on the same data
def _read_once(table: str) -> Dataset:
    """The data set that the table, as JSON, describes."""
    return build_data(json.loads(table))


def resolve_model(table: Mapping[str, Any]) -> Table:
    """The table of a model by name, of a pretrained one, or of the user's: module:attribute."""
    name, shared = table["name"], _shared(table)
    options = without(table, "name", "code", *MODEL_KEYS)
    if pretrained.is_pretrained(name):
        return {**_resolve_pretrained(name, options), **shared}
    if not user_code.is_reference(name):
        if name not in models.MODELS:
            raise unknown("model", name, [*models.MODELS, "mymodule:MyNet", *models.SOURCES])
        return {**MODEL.resolve({"name": name, **options}), **shared}
    factory = user_code.attribute("model", name, table.get("code"))
    if callable(factory) and not user_code.takes_any(factory):
        options = config.checked(name, factory, options, tuple(user_code.given_by_copfl(factory)))
    return {"name": name, **options, **shared, "code": user_code.folder_of(name)}


def _shared(table: Mapping[str, Any]) -> Table:
    """The keys of the table that every model has, checked."""
    shared = config.checked("model", _every_model, {k: v for k, v in table.items() if k in MODEL_KEYS})
    if os.path.isdir(shared.get("tokenizer", "")):
        shared["tokenizer"] = str(Path(shared["tokenizer"]).absolute())
    return shared


def _every_model(*, head: str, train: str, freeze: str, tokenizer: str, max_length: int) -> None:
    """The signature of MODEL_KEYS."""


def _resolve_pretrained(name: str, options: Table) -> Table:
    """The table with absolute paths and the SHA-256 of the base, which a given one must equal."""
    source, _, place = name.partition(":")
    skip = ("name", "classes", "seed", *(() if source == "hf" else ("task",)))
    given = config.checked(name, pretrained.build, without(options, "sha256"), skip)
    table = {"name": name, **config.keywords_of(pretrained.build, skip), **given}
    if source == "hf" and os.path.isdir(place):
        table["name"] = f"hf:{Path(place).absolute()}"
    if table["weights"] not in ("default", "none"):
        table["weights"] = str(Path(table["weights"]).absolute())
    base = pretrained.base_of(table["name"], table["weights"])
    if source == "hf":
        table["task"] = pretrained.task_of(base, table["task"])
    if (expected := options.get("sha256")) not in (None, base.sha256):
        raise UsageError(
            f"the base {table['name']} has the SHA-256 {base.sha256}, but this run is of a base with {expected}; "
            "put that one back, or start a new run without model.sha256"
        )
    return {**table, "sha256": base.sha256}


def resolve_adapter(table: Mapping[str, Any]) -> Table:
    """The table of an adapter, whose name may contain options: lora:r=8,alpha=16,targets=query+value."""
    name, _, words = str(table.get("name", "")).partition(":")
    options = {}
    for word in filter(None, words.split(",")):
        _, key, value = config.setting(f"adapter.{word}")
        options[key] = value
    return ADAPTER.resolve({**options, **table, "name": name})


def build_model(
    table: Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    adapter: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The model that the tables [model] and [adapter] describe, with the initial weights of this seed."""
    name, options = table["name"], without(table, "name", "code", "sha256", *MODEL_KEYS)
    if pretrained.is_pretrained(name):
        model: nn.Module = pretrained.build(name, classes, seed, **options)
    elif user_code.is_reference(name):
        given = user_code.attribute("model", name, table.get("code"))
        model = user_code.model_of(given, shape, classes, seed, options, name)
    else:
        model = models.build(name, shape, classes, seed, **options)
    return adapted(model, table, seed, adapter)


def adapted(
    model: nn.Module, table: Mapping[str, Any], seed: int, adapter: Mapping[str, Any] | None = None
) -> nn.Module:
    """The model with its adapter, in which only the chosen parameters require a gradient."""
    train, freeze = table.get("train", ""), table.get("freeze", "")
    if pretrained.wrapped(model) is model and not (adapter or train or freeze):
        return model
    model = pretrained.wrapped(copy.deepcopy(model))
    if adapter:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ADAPTER.build(adapter, model=model)
    adapters.select(model, head=table.get("head"), train=train, freeze=freeze, adapted=bool(adapter))
    return model


def tokenizer_of(table: Mapping[str, Any]) -> text.Tokenizer:
    """The tokenizer of the model that the table describes."""
    name = str(table.get("name", ""))
    model = Path(pretrained.base_of(name, "none").name) if name.startswith("hf:") else None
    folder = Path(table["tokenizer"]) if "tokenizer" in table else model
    if folder is None:
        raise UsageError(
            "the data set has sentences, and the model has no tokenizer; take a model of transformers, such as "
            "--model hf:FOLDER, or name a folder with the tokenizer of yours: --set model.tokenizer=FOLDER"
        )
    return text.Tokenizer(folder, table.get("max_length", 0), model)


def tokenized(dataset: Dataset, table: Mapping[str, Any]) -> Dataset:
    """The data set with token numbers in place of sentences; any other data set unchanged."""
    splits = (dataset.train, dataset.test)
    if not all(isinstance(split.x, np.ndarray) and split.x.dtype.kind in "UO" for split in splits):
        return dataset
    texts = [str(sentence) for split in splits for sentence in split.x]
    arrays: dict[str, Any] = dict(tokenizer_of(table).cached(texts))
    train = len(dataset.train)
    rows = (slice(0, train), slice(train, None))
    inputs: list[Any] = [{name: a[some] for name, a in arrays.items()} for some in rows]
    parts = [dataclasses.replace(split, x=x) for split, x in zip(splits, inputs, strict=True)]
    return dataclasses.replace(dataset, train=parts[0], test=parts[1])


def build_partition(table: Mapping[str, Any], dataset: Dataset, settings: RunSettings) -> Partition:
    """The partition that the table describes, by a scheme or from a file."""
    if table["name"] not in SCHEMES:
        return Partition.load(table["name"])
    result: Partition = PARTITION.build(table, dataset=dataset, clients=settings.clients, seed=settings.seed)
    return result


def build_wrappers(
    algorithm: AnyAlgorithm, tables: Tables, task: Task, federation: Federation, settings: RunSettings
) -> AnyAlgorithm:
    """The algorithm in its wrappers: add-ons, robust aggregation, private uploads, simulated attacks."""
    given = {kind: wrapper for kind, wrapper in WRAPPERS.items() if kind in tables}
    if not given:
        return algorithm
    clients, shape, augment = federation.clients, federation.shape, federation.dataset.augment
    context: dict[str, dict[str, Any]] = {
        "privacy": {"clients": clients, "taking_part": settings.participants, "seed": settings.seed},
        "attack": {"clients": clients, "seed": settings.seed, "attack": tables.get("attack", {}).get("name")},
    }
    for kind, wrapper in given.items():
        if kind == "privacy":
            check_sums(algorithm, task, example_upload(algorithm, task, shape, augment, 2))
        algorithm = wrapper.build(tables[kind], algorithm=algorithm, **context.get(kind, {}))
    # One server update on an example, so that wrappers that do not fit fail before the run.
    upload = example_upload(algorithm, task, shape, augment, clients)
    server = algorithm.server_init(task, clients)
    with torch.no_grad():
        total = algorithm.summand(task, server, torch.tensor(0, device=task.device), upload)
        algorithm.server_update(task, server, total)
    return algorithm


def without(table: Mapping[str, Any], *keys: str) -> Table:
    """The table without these keys."""
    return {k: v for k, v in table.items() if k not in keys}


# All tables of a run


class Resolved(NamedTuple):
    """The tables of a run with every default, and what was built to check them."""

    tables: Tables
    settings: RunSettings
    algorithm: AnyAlgorithm


def resolve(layers: Sequence[Mapping[str, Mapping[str, Any]]], fixed: Mapping[str, Any]) -> Tables:
    """The tables of `resolved`: the content of run.toml."""
    return resolved(layers, fixed).tables


def resolved(layers: Sequence[Mapping[str, Mapping[str, Any]]], fixed: Mapping[str, Any]) -> Resolved:
    """The tables with every name checked and every default filled in.

    Of several layers, such as a run file and the command line, the later ones win. A table is titled by its
    kind ([algorithm], [model], ...) or by the choice ([copfl]). For a `fixed` kind the caller has the value.
    """
    merged = _merged(layers, fixed)
    run, optimizer = merged["run"], merged["optimizer"]
    rounds = run.get("rounds", RunSettings.rounds)
    for kind in ("algorithm", "addons"):
        merged[kind] = {key: _rounds(value, rounds) for key, value in merged[kind].items()}
    for kind, table in merged.items():
        _check_plain(kind, table)
        if "value" in table and kind not in fixed:
            raise UsageError(
                f"the {kind} of this run is {table['value']}, a value that a Python program passed; "
                f"run it again from there, or name it: [{kind}] name = ..."
            )
    algorithm, data, model = (fixed.get(kind) for kind in ("algorithm", "data", "model"))
    if algorithm is None:
        tables = resolve_algorithm(merged["algorithm"], optimizer)
        algorithm = build_algorithm(tables)
    else:
        tables = {
            "algorithm": _value_table("algorithm", {**merged["algorithm"], **optimizer}, repr(algorithm))
        }
    if data is None:
        tables["data"] = resolve_data(merged["data"])
    else:
        tables["data"] = _value_table("data", merged["data"], getattr(data, "name", type(data).__name__))
    tables["partition"] = _partition(merged["partition"], fixed.get("partition"), run)
    if tables["partition"].get("name") == "by_group" and "clients" not in run:
        run["clients"] = number_of_groups(
            data if data is not None else _read_once(json.dumps(tables["data"]))
        )
    if model is None:
        tables["model"] = resolve_model(merged["model"])
    else:
        shared = {**merged["model"], **_shared(merged["model"])}
        tables["model"] = _value_table("model", shared, type(model).__name__, *MODEL_KEYS)
    if merged["adapter"]:
        tables["adapter"] = resolve_adapter(merged["adapter"])
    settings = RunSettings(**config.checked("run", RunSettings, run))
    tables |= {kind: wrapper.resolve(merged[kind]) for kind, wrapper in WRAPPERS.items() if merged[kind]}
    addons = tables.get("addons", {})
    if addons.get("lr_schedule", "constant") != "constant" and not addons["lr_rounds"]:
        addons["lr_rounds"] = settings.rounds  # so that resuming to more rounds keeps the schedule
    return Resolved({**tables, "run": vars(settings)}, settings, algorithm)


def _rounds(value: Any, rounds: Any) -> Any:
    """A percentage of the run's rounds, such as "50%", as a number of rounds; any other value unchanged."""
    if not (isinstance(value, str) and PERCENTAGE.fullmatch(value) and isinstance(rounds, int)):
        return value
    return round(float(value[:-1]) / 100 * rounds)


def _check_plain(kind: str, table: Mapping[str, Any]) -> None:
    """Nothing, if the table can be written to a file and read back."""
    if not isinstance(table.get("name", ""), str):
        raise UsageError(f"{kind}.name={table['name']!r} must be a word")
    for key, value in table.items():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, dict | list | datetime.date | datetime.time):
                raise UsageError(f"{kind}.{key}={value!r} must be a number, a word, or a list of them")
            if not f"{key}{part}".isascii() and any("\ud800" <= c <= "\udfff" for c in f"{key}{part}"):
                raise UsageError(f"{kind}.{key}={value!r} is not valid Unicode text; use another name")


def _value_table(kind: str, table: Mapping[str, Any], description: str, *allowed: str) -> Table:
    """The table of a kind whose value the caller has."""
    if options := sorted(table.keys() - {"value", *allowed}):
        raise UsageError(f"the {kind} is a value, which has no option {', '.join(options)}; set it there")
    return {**table, "value": description}


def _partition(table: Table, value: Partition | None, run: Table) -> Table:
    """The table; a partition that exists already determines the number of clients."""
    name = table.get("name", "")
    if value is None and "value" not in table and name not in SCHEMES and name.endswith(".json"):
        table, value = {**table, "name": str(Path(name).absolute())}, Partition.load(name)
    if value is None:
        return PARTITION.resolve(table)
    if run.setdefault("clients", value.clients) != value.clients:
        raise UsageError(
            f"clients={run['clients']}, but the partition is of {value.clients}; leave clients out"
        )
    return table or {"value": f"a partition by {value.scheme}"}


def _merged(layers: Sequence[Mapping[str, Mapping[str, Any]]], fixed: Mapping[str, object]) -> Tables:
    """One table of each kind, with its name, from all layers and the defaults for the data set."""
    merged: Tables = {kind: {} for kind in (*KINDS, "adapter", *WRAPPERS)}
    for layer in layers:
        for kind in merged:
            name = layer.get(kind, {}).get("name")
            if name is not None and str(name) != _names(merged, fixed).get(kind):
                # The options of the former choice are dropped; another algorithm has another optimizer.
                for dropped in ("algorithm", "optimizer") if kind == "algorithm" else (kind,):
                    merged[dropped] = {}
                merged[kind]["name"] = str(name)
        titles = {name: kind for kind, name in _names(merged, fixed).items()} | {
            kind: kind for kind in merged
        }
        for title, table in layer.items():
            if title not in titles:
                raise unknown("table", title, titles)
            merged[titles[title]].update(table)
    names = _names(merged, fixed)
    defaults = DEFAULTS.get(names.get("data", ""), {})
    for kind, name in {**names, "run": "run"}.items():
        merged[kind] = {**defaults.get(kind, {}), **defaults.get(name, {}), **merged[kind]}
    return {kind: {"name": names[kind], **t} if kind in names else t for kind, t in merged.items()}


def _names(merged: Tables, fixed: Mapping[str, object]) -> dict[str, str]:
    """The choice of each kind, with the defaults."""
    given = {kind: str(table["name"]) for kind, table in merged.items() if "name" in table}
    if "adapter" in given:
        given["adapter"] = given["adapter"].partition(":")[0]
    names = {"algorithm": "copfl", "data": "digits", **given}
    names.setdefault("partition", _usual_partition(merged["data"], names["data"], fixed.get("data")))
    names = {kind: name for kind, name in names.items() if kind not in fixed}
    if "model" not in fixed and "model" not in given:
        names["model"] = DEFAULTS.get(names.get("data", ""), {}).get("model", {}).get("name", "resnet18")
    if "optimizer" not in given and (default := default_optimizer(names.get("algorithm", ""))) is not None:
        names["optimizer"] = type(default).__name__.lower()
    return names


def _usual_partition(table: Table, name: str, value: object) -> str:
    """The partition where none is given: by natural clients where the data has them, else by class."""
    if isinstance(value, Dataset):
        usual = "classes" if value.kind == CLASSIFICATION else "iid"
        return "by_group" if value.natural else usual
    usual = DEFAULTS.get(name, {}).get("partition", {}).get("name", "classes")
    return "by_group" if table.get("client") else usual
