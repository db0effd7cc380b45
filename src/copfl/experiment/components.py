"""The parts of a run by kind: `resolve` fills in the defaults of a table, `build` makes its value.

A kind is a table of run.toml: [algorithm], [optimizer], [data], [partition], [model], [task] or a wrapper.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, example_output, rate_of, with_rate
from copfl.core.optim import Adam, DefaultNumber, Optimizer, Sgd
from copfl.core.task import Task
from copfl.data import datasets
from copfl.data.arrays import npz_file
from copfl.data.federation import Federation
from copfl.data.hub import PREFIX
from copfl.data.partition import Partition
from copfl.data.published import leaf
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset
from copfl.data.schemes import SCHEMES, number_of_groups
from copfl.engine import autotune
from copfl.errors import UsageError, unknown
from copfl.experiment import config, user_code
from copfl.experiment.config import Component, Table, Tables, without
from copfl.experiment.model_tables import MODEL_KEYS, resolve_adapter, resolve_model, shared_keys
from copfl.experiment.run_settings import RunSettings
from copfl.experiment.task_tables import resolve_task
from copfl.models import pretrained
from copfl.parts.mamo import Mamo
from copfl.wrappers.addons import with_addons
from copfl.wrappers.attacks import ATTACKS, attacked
from copfl.wrappers.privacy import Private, check_sums
from copfl.wrappers.robust import ROBUST_RULES

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "mamo": Mamo, "sgd": Sgd}
KINDS = ("algorithm", "optimizer", "data", "partition", "model", "run")

# On a user's own data: rates at which the built-in models, and adapters or a head alone, learn within tens
# of rounds. A pretrained model that is trained as a whole keeps the optimizer's.
OWN_DATA: Tables = {"adam": {"lr": 1e-3}, "mamo": {"lr": 1e-3}, "sgd": {"lr": 0.1}}
OWN_ADAPTED: Tables = {**OWN_DATA, "adam": {"lr": 1e-2}, "mamo": {"lr": 1e-2}}
SMALL_TABLE: Tables = {
    "run": {"rounds": 20, "batch": 16, "clients": 5},
    "partition": {"name": "dirichlet"},
    "model": {"name": "mlp"},
    **OWN_DATA,
}
# Defaults for a data set: the paper's protocol. The digits' federation is small enough to finish in seconds
# and skewed enough for personalisation to matter.
BY_GROUP: Tables = {"partition": {"name": "by_group"}}
DEFAULTS: dict[str, Tables] = {
    "digits": {
        "run": {"rounds": 40, "batch": 8},
        "classes": {"per_client": 3, "train_per_class": 5, "test_per_class": 15},
        "model": {"name": "cnn"},
        **OWN_DATA,
    },
    "cifar10c": {"data": {"all": True}, "classes": {"group_per_client": True}, "copfl": {"rate": 0.15}},
    # At its native 84 pixels a round takes minutes on a CPU; --set data.size=84 selects them.
    "mini_imagenet": {"data": {"size": 32}, "classes": {"per_client": 10}},
    "breast_cancer": SMALL_TABLE,
    "wine": SMALL_TABLE,
    "diabetes": {**SMALL_TABLE, "partition": {"name": "iid"}},
    # Sets with clients by nature: domains, persons, writers, roles.
    **dict.fromkeys(("pacs", "office_caltech10", "digits_five", "femnist"), BY_GROUP),
    "uci_har": {**BY_GROUP, "model": {"name": "cnn1d"}},
    "shakespeare": {**BY_GROUP, "model": {"name": "causal_cnn"}},
    "clinc150": {**BY_GROUP, "model": {"name": "embedding"}},
    **{name: {"model": {"name": "embedding"}} for name in ("ag_news", "sst2", "banking77")},
}
SMALL_IMAGE = 64  # pixels a side; cnn up to here, ResNet-18 for larger images
PERCENTAGE = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?%")


# Components


ALGORITHM = Component("algorithm", ALGORITHMS, ("optimizer",))
OPTIMIZER = Component("optimizer", OPTIMIZERS)
PARTITION = Component("partition", SCHEMES, ("dataset", "clients", "seed"))
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


def default_rate(optimizer: str, data: str, model: str = "", adapted: bool = False) -> float:
    """The learning rate of an optimizer on a data set where none is given; the lowest that a tuning tries."""
    usual = config.keywords_of(OPTIMIZER.factory({"name": optimizer}))["lr"]
    return float(defaults_on(data, model, adapted).get(optimizer, {}).get("lr", usual))


def defaults_on(data: str, model: str = "", adapted: bool = False) -> Tables:
    """The settings of a data set where none are given; what is no name of copfl's is a user's own."""
    whole = pretrained.is_pretrained(model) and not adapted
    return DEFAULTS.get(data, {} if whole or data in datasets.DATASETS else OWN_DATA)


def optimizer_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Such as "adam 0.001", the optimizer and its learning rate; "" where an algorithm was a value."""
    table = tables.get("optimizer", {})
    return f"{table['name']} {table['lr']:g}" if "name" in table and "lr" in table else ""


def resolve_algorithm(table: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Tables:
    """The tables of an algorithm and of its optimizer, which without a name is the algorithm's own."""
    resolved = ALGORITHM.resolve(table)
    default = default_optimizer(table["name"])
    usual = type(default).__name__.lower()
    options = vars(default) if optimizer.get("name", usual) == usual else {}
    return {"algorithm": resolved, "optimizer": OPTIMIZER.resolve({"name": usual, **options, **optimizer})}


def with_usual_numbers(algorithm: Any, defaults: Tables) -> Any:
    """The algorithm, or an instance of the class, with the data set's defaults for numbers that nobody chose.

    They are the learning rate and, of a registered algorithm, its options: as for the algorithm by its name.
    """
    algorithm = algorithm() if isinstance(algorithm, type) else algorithm
    kinds = {kind: name for name, kind in {**ALGORITHMS, **OPTIMIZERS}.items()}
    optimizer = getattr(algorithm, "optimizer", None)
    lr = defaults.get(kinds.get(type(optimizer), ""), {}).get("lr")
    if lr is not None and isinstance(rate_of(algorithm), DefaultNumber):
        algorithm = with_rate(algorithm, lr)
    for option, value in defaults.get(kinds.get(type(algorithm), ""), {}).items():
        for field, part in vars(algorithm).items():
            if isinstance(getattr(part, option, None), DefaultNumber):
                changed = dataclasses.replace(part, **{option: value})
                algorithm = dataclasses.replace(algorithm, **{field: changed})
    return algorithm


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
    is_path = (len(Path(name).parts) > 1 or os.path.exists(name)) and not name.startswith(PREFIX)
    if is_path and name not in datasets.DATASETS:
        table["name"] = str(Path(name).absolute())
    if table.get("test"):  # the test rows of a table
        table["test"] = str(Path(str(table["test"])).absolute())
    return table


def build_data(table: Mapping[str, Any]) -> Dataset:
    """The data set that the table describes."""
    name, folder = table["name"], Path(table["dir"]) if "dir" in table else None
    options = without(table, "name", "dir", "code")
    if user_code.is_reference(name):
        given = user_code.attribute("data", name, table.get("code"))
        return user_code.dataset_of(given, folder, options, name)
    checked = config.checked(name, datasets.reader(name), options, skip=("data_dir", "path", "place", "name"))
    return datasets.load(name, folder, **checked)


class Usual(NamedTuple):
    """The settings of a run on a data set where none are given, and its number of natural clients."""

    model: str
    partition: str
    groups: int


def _usual_of(dataset: Dataset) -> Usual:
    by_target = "classes" if dataset.kind == CLASSIFICATION else "iid"
    partition = "by_group" if dataset.natural else by_target
    return Usual(_model_for(dataset), partition, number_of_groups(dataset))


def _usual_of_data(table: Mapping[str, Any]) -> Usual:
    """`_usual_of` of the data set that the table describes; it is read again only after its file changed."""
    table = resolve_data(table)
    path = Path(table["name"])
    written = path.stat().st_mtime_ns if path.is_file() else 0
    return _read_once(json.dumps(table, sort_keys=True), written)


@lru_cache(maxsize=8)  # a run asks several times, and a comparison resolves many runs on the same data
def _read_once(table: str, written: int) -> Usual:
    return _usual_of(build_data(json.loads(table)))


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
    autotune.check_fit(task, federation)  # before the examples below
    clients, augment = federation.clients, federation.dataset.augment
    samples = tree.row(federation.train.rows([0]), 0)
    context: dict[str, dict[str, Any]] = {
        "privacy": {
            "clients": len(settings.split_clients[0]),
            "taking_part": settings.participants,
            "seed": settings.seed,
        },
        "attack": {
            "clients": settings.split_clients[0],  # a new client is honest
            "seed": settings.seed,
            "attack": tables.get("attack", {}).get("name"),
        },
    }
    for kind, wrapper in given.items():
        if kind == "privacy":
            check_sums(algorithm, task, example_output(algorithm, task, samples, augment, 2).upload)
        algorithm = wrapper.build(tables[kind], algorithm=algorithm, **context.get(kind, {}))
    # One server update on an example, so that wrappers that do not fit fail before the run.
    upload = example_output(algorithm, task, samples, augment, clients).upload
    server = algorithm.server_init(task, clients)
    with torch.no_grad():
        total = algorithm.summand(task, server, torch.tensor(0, device=task.device), upload)
        algorithm.server_update(task, server, total)
    return algorithm


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
        options = {**merged["algorithm"], **optimizer}
        algorithm = with_usual_numbers(algorithm, _defaults(merged, fixed))
        tables = {"algorithm": _value_table("algorithm", options, repr(algorithm))}
    if data is None:
        tables["data"] = resolve_data(merged["data"])
    else:
        tables["data"] = _value_table("data", merged["data"], getattr(data, "name", type(data).__name__))
    tables["partition"] = _partition(merged["partition"], fixed.get("partition"), run)
    if tables["partition"].get("name") == "by_group" and "clients" not in run:
        groups = number_of_groups(data) if data is not None else _usual_of_data(tables["data"]).groups
        if groups:  # without any, the scheme refuses the data
            run["clients"] = groups
    if model is None:
        tables["model"] = resolve_model(merged["model"], bool(merged["adapter"]))
    else:
        shared = {**merged["model"], **shared_keys(merged["model"])}
        tables["model"] = _value_table("model", shared, type(model).__name__, *MODEL_KEYS)
    if merged["adapter"]:
        tables["adapter"] = resolve_adapter(merged["adapter"])
    if merged["task"]:
        tables["task"] = resolve_task(merged["task"])
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
    merged: Tables = {kind: {} for kind in (*KINDS, "adapter", "task", *WRAPPERS)}
    for layer in layers:
        for kind in merged:
            name = layer.get(kind, {}).get("name")
            # The options of the former choice are dropped; another algorithm has another optimizer.
            former = ("algorithm", "optimizer") if kind == "algorithm" else (kind,)
            has_options = name is not None and any(merged[one] for one in former)
            if has_options and str(name) != _names(merged, fixed).get(kind):
                merged |= {one: {} for one in former}
            merged[kind].update(layer.get(kind, {}))
        choices = {title: table for title, table in layer.items() if title not in merged}
        titles = {name: kind for kind, name in _names(merged, fixed).items()} if choices else {}
        for title, table in choices.items():
            if title not in titles:
                raise unknown("table", title, [*titles, *merged])
            merged[titles[title]].update(table)
    names, defaults = _names(merged, fixed), _defaults(merged, fixed)
    for kind, name in {**names, "run": "run"}.items():
        merged[kind] = {**defaults.get(kind, {}), **defaults.get(name, {}), **merged[kind]}
    return {kind: {"name": names[kind], **t} if kind in names else t for kind, t in merged.items()}


def _defaults(merged: Tables, fixed: Mapping[str, object]) -> Tables:
    """The settings where none are given, for the data set and the model."""
    names = _names(merged, fixed)
    published = getattr(fixed.get("data"), "name", "") in datasets.DATASETS
    adapted = bool(merged["adapter"]) or merged["model"].get("train") == "head"
    defaults = {} if published else defaults_on(names.get("data", ""), names.get("model", ""), adapted)
    # OWN_DATA is also the start of compare's grid; the rate of adapters is that of a single run.
    return OWN_ADAPTED if adapted and defaults is OWN_DATA else defaults


def _names(merged: Tables, fixed: Mapping[str, object]) -> dict[str, str]:
    """The choice of each kind, with the defaults."""
    given = {kind: str(table["name"]) for kind, table in merged.items() if "name" in table}
    if "adapter" in given:
        given["adapter"] = given["adapter"].partition(":")[0]
    names = {"algorithm": "copfl", "data": "digits", **given}
    if "partition" not in fixed and "partition" not in given:
        names["partition"] = _usual_partition(merged["data"], names["data"], fixed.get("data"))
    names = {kind: name for kind, name in names.items() if kind not in fixed}
    if "model" not in fixed and "model" not in given:
        names["model"] = _usual_model(merged["data"], names.get("data", ""), fixed.get("data"))
    if "optimizer" not in given and (default := default_optimizer(names.get("algorithm", ""))) is not None:
        names["optimizer"] = type(default).__name__.lower()
    return names


def _usual_model(table: Table, name: str, value: object) -> str:
    """The model where none is given: by the form of the samples where it is known, else ResNet-18."""
    if isinstance(value, Dataset):
        return _model_for(value)
    if _of_tokens(table, name):
        return "causal_cnn"
    if _is_own(name) and not table.get("text") and not table.get("target"):
        return _usual_of_data({**table, "name": name}).model
    usual = "embedding" if table.get("text") else "mlp" if table.get("target") else "resnet18"
    return str(DEFAULTS.get(name, {}).get("model", {}).get("name", usual))


def _model_for(data: Dataset) -> str:
    """The smallest built-in model that fits the samples; a published data set keeps the paper's ResNet-18."""
    x = data.train.x
    if data.kind == NEXT_TOKEN:
        return "causal_cnn"
    if isinstance(x, dict) or x.dtype.kind in "US":
        return "resnet18" if isinstance(x, dict) else "embedding"
    if x.ndim == 4 and data.name not in datasets.DATASETS and max(x.shape[2:]) <= SMALL_IMAGE:
        return "cnn" if min(x.shape[2:]) >= 4 else "mlp"
    return {2: "mlp", 3: "cnn1d"}.get(x.ndim, "resnet18")


def _is_own(name: str) -> bool:
    """Whether the name is of a user's file, folder or function."""
    return name not in datasets.DATASETS and (os.path.exists(name) or user_code.is_reference(name))


def _of_tokens(table: Table, name: str) -> bool:
    """Whether a file has texts whose next token is predicted."""
    return str(table.get("kind", NEXT_TOKEN if name.endswith(".txt") else "")) == NEXT_TOKEN


def _usual_partition(table: Table, name: str, value: object) -> str:
    """The partition where none is given: by natural clients where the data has them, else by class."""
    if isinstance(value, Dataset):
        return _usual_of(value).partition
    if table.get("client"):
        return "by_group"
    # The clients of a table are the column `client`, and a folder of images has none.
    if _is_own(name) and (user_code.is_reference(name) or datasets.reader(name) in (npz_file, leaf)):
        return _usual_of_data({**table, "name": name}).partition
    usual = DEFAULTS.get(name, {}).get("partition", {}).get("name", "classes")
    is_other = table.get("kind", CLASSIFICATION) != CLASSIFICATION or _of_tokens(table, name)
    return "iid" if is_other else str(usual)
