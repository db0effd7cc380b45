"""The one place where layers of settings become a complete record.

A layer is a plain mapping: the defaults of a data set, a preset, a run file, the command line. Later ones win.
Below `complete` no such mapping exists.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import rate_of, traits, with_rate
from copfl.core.criteria import LOSSES
from copfl.core.metrics import METRICS
from copfl.core.optim import DefaultNumber
from copfl.data import datasets
from copfl.data.arrays import npz_file
from copfl.data.hub import PREFIX
from copfl.data.partition import Partition
from copfl.data.published import leaf
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset
from copfl.data.schemes import SCHEMES, number_of_groups
from copfl.errors import CopflError, UsageError, how_to_set
from copfl.models import MODELS, pretrained
from copfl.settings import presets, schema, toml, user_code
from copfl.settings.checking import (
    SettingError,
    checked,
    options_of,
    parameters_of,
    unknown_key,
    unknown_name,
)
from copfl.settings.components import (
    WRAPPERS,
    algorithm_of,
    build,
    context_of,
    factory_of,
    name_of,
    usual_optimizer,
)
from copfl.settings.first_choice import Known, first_choice
from copfl.settings.schema import KINDS, Component, Run, RunSettings, record_of
from copfl.settings.toml import Tables

Layer = Mapping[str, Mapping[str, Any]]
R = TypeVar("R", bound=Component)

# Learning rates at which the built-in models, and adapters or a head alone, learn within tens of rounds on a user's
# own data. A pretrained model that is trained as a whole keeps the optimizer's.
OWN_RATES = {"adam": 1e-3, "mamo": 1e-3, "sgd": 0.1}
ADAPTER_RATES = {"adam": 1e-2, "mamo": 1e-2, "sgd": 0.1}
SMALL_TABLE: Tables = {
    "run": {"rounds": 20, "batch": 16, "clients": 5},
    "partition": {"name": "dirichlet"},
    "model": {"name": "mlp"},
}
BY_GROUP: Tables = {"partition": {"name": "by_group"}}
# Defaults for a data set: the paper's protocol. The digits' federation is small enough to finish in seconds
# and skewed enough for personalisation to matter.
DEFAULTS: dict[str, Tables] = {
    "digits": {
        "run": {"rounds": 40, "batch": 8},
        "partition": {"name": "classes", "per_client": 3, "train_per_class": 5, "test_per_class": 15},
        "model": {"name": "cnn"},
    },
    "cifar10c": {
        "data": {"all": True},
        "partition": {"name": "classes", "group_per_client": True},
        "algorithm": {"name": "copfl", "rate": 0.15},
    },
    # At its native 84 pixels a round takes minutes on a CPU; --set data.size=84 selects them.
    "mini_imagenet": {"data": {"size": 32}, "partition": {"name": "classes", "per_client": 10}},
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
SMALL_SETS = ("digits", "breast_cancer", "wine", "diabetes")  # they have the rates of a user's own data
READS = ("data_dir", "path", "place", "name")  # parameters of a reader of data that are no settings
SMALL_IMAGE = 64  # pixels a side; cnn up to here, ResNet-18 for larger images
PLAIN = (bool, int, float, str)


def complete(
    *layers: Layer, preset: str = "", values: Mapping[str, Any] | None = None, sums_only: bool = False
) -> Run:
    """The record of a run with every name checked and every default filled in.

    Args:
        layers: Settings by title and key, as in run.toml; later ones win. Where a layer chooses another algorithm,
            model, ..., the options of the former one are dropped; another algorithm has its own optimizer.
        preset: The name of a preset, which is below the layers.
        values: By kind, an algorithm, a data set, a model, a partition or an optimizer that a program has.
        sums_only: Whether the server may see sums of uploads only, which counts where no algorithm is named.
    """
    own = {kind: value for kind, value in (values or {}).items() if value is not None}
    named: Tables = {}
    for kind in ("algorithm", "optimizer"):
        if isinstance(own.get(kind), type):
            own[kind] = own[kind]()
        if layer := layer_of(kind, own.get(kind)):
            named |= layer
            del own[kind]
    *_, name = [
        "digits",
        *(str(layer["data"]["name"]) for layer in layers if "name" in layer.get("data", {})),
    ]
    defaults = (
        {kind: t for kind, t in _defaults(name).items() if kind not in own} if "data" not in own else {}
    )
    preset_layers = _preset(preset, [defaults, *layers])
    tables = _merged([defaults, *preset_layers, *layers, named], own)
    if not names_algorithm(*layers, named, preset=preset) and "algorithm" not in own:
        _check_options_of_nobody(tables["algorithm"], defaults.get("algorithm", {}))
        known = _known(tables, own)
        known = known._replace(sums_only=known.sums_only or sums_only)
        tables = _merged([defaults, first_choice(known).layer, *layers, named], own)
    for kind, table in tables.items():
        if "value" in table and kind not in own:
            raise UsageError(
                f"the {kind} of this run is {table['value']}, a value that a Python program passed; "
                f"run it again from there, or name it: [{kind}] name = ..."
            )
    records: dict[str, Any] = {}
    if "algorithm" in own:
        options = {**tables["algorithm"], **tables["optimizer"]}
        used, rates = traits(own["algorithm"]).optimizer, _rates(tables, own)
        rate = rates.get("" if used is None else name_of("optimizer", used))
        if rate is not None and isinstance(rate_of(own["algorithm"]), DefaultNumber):
            own["algorithm"] = with_rate(own["algorithm"], rate)
        records["algorithm"] = _of_value("algorithm", options, own["algorithm"], repr(own["algorithm"]))
    else:
        records["algorithm"] = component("algorithm", tables["algorithm"])
        rates = _rates(tables, own)
        records["optimizer"] = optimizer(
            records["algorithm"], tables["optimizer"], rates, own.get("optimizer")
        )
    if "data" in own:
        shown = getattr(own["data"], "name", type(own["data"]).__name__)
        records["data"] = _of_value("data", tables["data"], own["data"], shown)
    else:
        records["data"] = data({"name": "digits", **tables["data"]})
    run = dict(tables["run"])
    records["partition"] = _partition(tables, own, run)
    if records["partition"].name == "by_group" and "clients" not in run:
        groups = number_of_groups(own["data"]) if "data" in own else _usual_of_data(tables["data"]).groups
        if groups:  # without any, the scheme refuses the data
            run["clients"] = groups
    if "model" not in own and "name" not in tables["model"]:
        tables["model"]["name"] = _usual_model(tables, own.get("data"))
    records["model"] = model(tables["model"], bool(tables["adapter"]), own.get("model"))
    if tables["adapter"]:
        records["adapter"] = adapter(tables["adapter"])
    records["task"] = task(tables["task"])
    records["run"] = settings = record_of("run", run)
    for kind in WRAPPERS:
        if tables[kind]:
            records[kind] = component(kind, tables[kind])
    addons = records.get("addons", schema.Addons()).options
    if addons.get("lr_schedule", "constant") != "constant" and not addons["lr_rounds"]:
        # So that resuming to more rounds keeps the schedule.
        records["addons"] = schema.Addons(options={**addons, "lr_rounds": settings.rounds})
    complete = Run(**records)
    algorithm_of(complete)  # its parts check their numbers
    return complete


# Layers


def names_algorithm(*layers: Layer, preset: str = "") -> bool:
    """Whether an algorithm is chosen; if not, `first_choice` decides."""
    return bool(preset) or any(layer.get("algorithm", {}).get("name") for layer in layers)


def _check_options_of_nobody(table: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Nothing, if no option of a certain algorithm is set, where no algorithm is named."""
    common = {f.name for f in schema.declared(schema.Algorithm)}
    for key in table.keys() - common - usual.keys():
        if any(key in parameters_of(algorithm, skip=("optimizer",)) for algorithm in ALGORITHMS.values()):
            name = how_to_set("algorithm.name", "copfl", "--algorithm")
            raise SettingError(
                f"algorithm.{key}", table[key], f"needs the name of its algorithm, such as {name}"
            )


def _known(tables: Tables, own: Mapping[str, Any]) -> Known:
    """What is known of a federation before anything is trained, without reading a published data set."""
    table, run = tables["data"], tables["run"]
    name = str(table.get("name", "digits"))
    model = str(
        getattr(own.get("model"), "name", "")
        or tables["model"].get("name")
        or ("" if "model" in own else _usual_model(tables, own.get("data")))
    )
    partition = (
        ""
        if "partition" in own
        else str(tables["partition"].get("name") or _usual_partition(tables, own.get("data")))
    )
    usual: Usual | None = None
    if isinstance(own.get("data"), Dataset):
        usual = _usual_of(own["data"])
    elif "data" not in own and (_is_own(name) or name in SMALL_SETS):
        usual = _usual_of_data(table)
    if partition in ("classes", "concept_shift"):
        options = component("partition", {**tables["partition"], "name": partition}).options
        samples = float(options["per_client"] * options["train_per_class"])
    elif usual is None:
        samples = math.inf
    else:
        by_group = usual.groups if partition == "by_group" else 0
        clients = own["partition"].clients if "partition" in own else run.get("clients") or by_group
        samples = usual.samples / (clients or RunSettings.clients)
    return Known(
        usual.kind if usual else NEXT_TOKEN if model == "causal_cnn" else CLASSIFICATION,
        samples,
        run["rounds"] if isinstance(run.get("rounds"), int) else RunSettings.rounds,
        model,
        pretrained.is_pretrained(model),
        bool(tables["privacy"] or tables["robust"]),
        tables["model"].get("train") == "head" or _has_one_layer(own.get("model")),
    )


def _has_one_layer(model: object) -> bool:
    """Whether the model is a module whose trained parameters are all in one layer."""
    if not hasattr(model, "named_parameters") or isinstance(model, type):
        return False
    return len({name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}) < 2


def _defaults(data: str) -> Tables:
    """The lowest layer: what suits a data set."""
    tables = {kind: dict(table) for kind, table in DEFAULTS.get(data, {}).items()}
    return {**tables, "data": {"name": data, **tables["data"]}} if "data" in tables else tables


def _preset(name: str, others: Sequence[Layer]) -> list[Layer]:
    """The layer of a preset, if there is one; the rounds are those of the layer that is first below and then above."""
    if not name:
        return []
    layers = (others[0], presets.content(name), *others[1:])
    rounds = [layer["run"]["rounds"] for layer in layers if "rounds" in layer.get("run", {})]
    return [
        presets.preset(name, rounds[-1] if rounds and isinstance(rounds[-1], int) else RunSettings.rounds)
    ]


def _merged(layers: Sequence[Layer], own: Mapping[str, Any]) -> Tables:
    """One table of each kind, from all layers."""
    merged: Tables = {kind: {} for kind in KINDS}
    for layer in layers:
        for kind, table in layer.items():
            if kind not in KINDS:
                raise unknown_key(kind, dict(table) if isinstance(table, Mapping) else table, KINDS)
            if not isinstance(table, Mapping):
                raise SettingError(kind, table, "must be a table of settings")
            for key, value in table.items():
                _check_plain(f"{kind}.{key}", value)
        for kind in (kind for kind in KINDS if layer.get(kind)):
            table = layer[kind]
            former = ("algorithm", "optimizer") if kind == "algorithm" else (kind,)
            has_options = "name" in table and any(merged[other] for other in former)
            current = _chosen(kind, _current(kind, merged, own)) if has_options else ""
            if current and current != _chosen(kind, table["name"]):  # without one, they were set for any
                merged |= {other: {} for other in former}
            merged[kind] = {**merged[kind], **table}
    return merged


def _chosen(kind: str, name: str) -> str:
    return name.partition(":")[0] if kind == "adapter" else name


def _current(kind: str, merged: Tables, own: Mapping[str, Any]) -> str:
    """The name that a kind has so far, or would have; "" where it is open."""
    if "name" in merged[kind]:
        return str(merged[kind]["name"])
    if kind == "optimizer":
        is_open = "algorithm" in own or "name" not in merged["algorithm"]
        return "" if is_open else _usual_optimizer(merged["algorithm"])
    usual = {"partition": _usual_partition, "model": _usual_model}
    return usual[kind](merged, own.get("data")) if kind in usual else {"data": "digits"}.get(kind, "")


def _check_plain(path: str, value: Any) -> None:
    """Nothing, if the value can be written to a file and read back."""
    if path.endswith(".name") and not isinstance(value, str):
        raise SettingError(path, value, "must be a word")
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, Mapping | list | datetime.date | datetime.time):
            raise SettingError(path, value, "must be a number, a word, or a list of them")
        if not f"{path}{part}".isascii() and any("\ud800" <= c <= "\udfff" for c in f"{path}{part}"):
            raise SettingError(path, value, "is not valid Unicode text; use another name")


# Values that a program passed


def layer_of(kind: str, value: Any) -> Tables:
    """The settings of an algorithm or optimizer of copfl or of an importable module; none if it has no name there.

    Numbers that nobody chose are left out: they depend on the data set.
    """
    if not dataclasses.is_dataclass(value) or not (name := name_of(kind, value)):
        return {}
    layer: Tables = {kind: {"name": name, **_chosen_options(value)}}
    optimizer = getattr(value, "optimizer", None) if kind == "algorithm" else None
    if optimizer is not None:
        layer["optimizer"] = {"name": name_of("optimizer", optimizer), **_chosen_options(optimizer)}
    return layer if _describes(kind, value, layer) else {}


def _chosen_options(value: Any) -> dict[str, Any]:
    return {name: v for name, v in options_of(value).items() if not isinstance(v, DefaultNumber)}


def _describes(kind: str, value: Any, layer: Tables) -> bool:
    """Whether these settings make an equal value."""
    module = sys.modules.get(type(value).__module__)
    if ":" in layer[kind]["name"] and getattr(module, type(value).__name__, None) is not type(value):
        return False
    plain = (
        part for t in layer.values() for v in t.values() for part in (v if isinstance(v, tuple) else (v,))
    )
    if not all(isinstance(part, PLAIN) and part != "" for part in plain):
        return False
    try:
        records = {title: component(title, table) for title, table in layer.items()}
        return bool(
            (algorithm_of(Run(**records)) if kind == "algorithm" else build(kind, records[kind])) == value
        )
    except CopflError:
        return False


def _of_value(kind: str, table: Mapping[str, Any], value: Any, description: str, *allowed: str) -> Any:
    """The record of a kind whose value the caller has."""
    if options := sorted(table.keys() - {"value", *allowed}):
        path = f"{kind}.{options[0]}"
        raise SettingError(path, table[options[0]], f"cannot be set: the {kind} is a value; set it there")
    kept = {key: v for key, v in table.items() if key in allowed}
    return dataclasses.replace(record_of(kind, kept), value=value, description=description)


# Kinds


def component(kind: str, table: Mapping[str, Any], skip: Sequence[str] = (), fill: bool = True) -> Any:
    """The record of a table, with its options checked and, to `fill`, every default."""
    record = record_of(kind, table)
    factory = factory_of(kind, record.name, record.code)
    skip = (*context_of(kind, factory), *skip)
    arguments = checked(kind, factory, record.arguments, skip, schema.paths())
    if fill:
        known = {name: _number(p.default) for name, p in parameters_of(factory, skip).items()}
        arguments = {**{name: default for name, default in known.items() if _is_plain(default)}, **arguments}
    return _with(kind, record, arguments)


def _number(default: Any) -> Any:
    """The default, as a plain float where it is one."""
    return float(default) if isinstance(default, DefaultNumber) else default


def _is_plain(value: Any) -> bool:
    return all(isinstance(v, (*PLAIN, type(None))) for v in (value if isinstance(value, tuple) else (value,)))


def _with(kind: str, record: R, arguments: Mapping[str, Any]) -> R:
    """The record with these arguments of its component, and the folder of a user's module."""
    names = {f.name for f in schema.declared(type(record)) if not f.metadata["ours"]} - {"name"}
    fields = {name: arguments.get(name) for name in names}
    code = user_code.folder_of(record.name) if user_code.is_reference(record.name) else record.code
    options = {name: value for name, value in arguments.items() if name not in names}
    return dataclasses.replace(record, **fields, options=options, code=code)  # type: ignore[arg-type]


def _usual_optimizer(algorithm: Mapping[str, Any]) -> str:
    usual = usual_optimizer(str(algorithm["name"]), algorithm.get("code"))
    return name_of("optimizer", usual)


def optimizer(
    algorithm: schema.Algorithm, table: Mapping[str, Any], rates: Mapping[str, float], value: Any = None
) -> schema.Optimizer:
    """The optimizer of an algorithm.

    Args:
        algorithm: The algorithm, whose own optimizer is the default.
        table: What is set.
        rates: Learning rates by optimizer that are used instead of the optimizer's own.
        value: An optimizer that a program passed.
    """
    usual = usual_optimizer(algorithm.name, algorithm.code)
    if usual is None and (table or value is not None):
        path, set_to = (
            ("optimizer", value)
            if value is not None
            else next((f"optimizer.{k}", v) for k, v in table.items())
        )
        raise SettingError(
            path, set_to, f"has no effect: {algorithm.name} has no field `optimizer`; leave it out"
        )
    if usual is None:
        return schema.Optimizer()
    if value is not None:
        return _of_value("optimizer", table, value, repr(value))  # type: ignore[no-any-return]
    usual_name = name_of("optimizer", usual)
    name = str(table.get("name", usual_name))
    options = options_of(usual) if name == usual_name else {}
    is_chosen = name == usual_name and not isinstance(getattr(usual, "lr", None), DefaultNumber)
    lr = {"lr": rates[name]} if name in rates and not is_chosen else {}
    return component("optimizer", {"name": name, **options, **lr, **table})  # type: ignore[no-any-return]


def _rates(tables: Tables, own: Mapping[str, Any]) -> Mapping[str, float]:
    """Learning rates by optimizer that suit the data set and what is trained."""
    if getattr(own.get("data"), "name", "") in datasets.DATASETS:
        return {}
    adapted = bool(tables["adapter"]) or tables["model"].get("train") == "head"
    data = "" if "data" in own else str(tables["data"].get("name", "digits"))
    rates = usual_rates(data, "" if "model" in own else str(tables["model"].get("name", "")), adapted)
    return ADAPTER_RATES if adapted and rates and data not in SMALL_SETS else rates


def usual_rates(data: str, model: str = "", adapted: bool = False) -> Mapping[str, float]:
    """Learning rates by optimizer, where they are not the optimizer's own."""
    whole = pretrained.is_pretrained(model) and not adapted
    return OWN_RATES if data in SMALL_SETS or not (whole or data in datasets.DATASETS) else {}


def usual_rate(optimizer: str, data: str, model: str = "", adapted: bool = False) -> float:
    """The learning rate of an optimizer on a data set where none is given; the lowest that a tuning tries."""
    usual = parameters_of(factory_of("optimizer", optimizer))["lr"].default
    return float(usual_rates(data, model, adapted).get(optimizer, usual))


def optimizer_text(tables: Layer) -> str:
    """Such as "adam 0.001", the optimizer and its learning rate; "" where an algorithm was a value."""
    table = tables.get("optimizer", {})
    return f"{table['name']} {table['lr']:g}" if "name" in table and "lr" in table else ""


def data(table: Mapping[str, Any]) -> schema.Data:
    """The data with absolute paths, so that the run can be repeated from any folder."""
    record: schema.Data = record_of("data", table)
    if folder := record.dir or os.environ.get("COPFL_DATA"):
        record = dataclasses.replace(record, dir=str(Path(folder).absolute()))
    name = record.name
    if user_code.is_reference(name):
        user_code.attribute("data", name, record.code)
        return dataclasses.replace(record, code=user_code.folder_of(name))
    is_path = (len(Path(name).parts) > 1 or os.path.exists(name)) and not name.startswith(PREFIX)
    if not (is_path or name in datasets.DATASETS or name.startswith(PREFIX) or Path(name).suffix):
        raise unknown_name(
            "data.name", name, [*datasets.DATASETS, "FILE", "FOLDER", "hf:NAME", "mymodule:load"]
        )
    if name in datasets.DATASETS:
        checked("data", datasets.DATASETS[name], record.arguments, READS, schema.paths())
    if is_path and name not in datasets.DATASETS:
        record = dataclasses.replace(record, name=str(Path(name).absolute()))
    if test := record.options.get("test"):  # the test rows of a table
        record = dataclasses.replace(
            record, options={**record.options, "test": str(Path(str(test)).absolute())}
        )
    return record


def data_of(record: schema.Data) -> Dataset:
    """The data set that a record describes."""
    name, folder = record.name, None if record.dir is None else Path(record.dir)
    if record.value is not None:
        return record.value  # type: ignore[no-any-return]
    if user_code.is_reference(name):
        found = user_code.attribute("data", name, record.code)
        return user_code.dataset_of(found, folder, record.arguments, name)
    options = checked("data", datasets.reader(name), record.arguments, READS, schema.paths())
    return datasets.load(name, folder, **options)


class Usual(NamedTuple):
    """The settings of a run on a data set where none are given, and what they follow from."""

    model: str
    partition: str
    groups: int  # natural clients
    kind: str  # of task
    samples: int  # for training


def _usual_of(dataset: Dataset) -> Usual:
    by_target = "classes" if dataset.kind == CLASSIFICATION else "iid"
    partition = "by_group" if dataset.natural else by_target
    return Usual(_model_for(dataset), partition, number_of_groups(dataset), dataset.kind, len(dataset.train))


def _usual_of_data(table: Mapping[str, Any]) -> Usual:
    """`_usual_of` of the data set that the table describes; it is read again only after its file changed."""
    record = data({"name": "digits", **table})
    path = Path(record.name)
    written = path.stat().st_mtime_ns if path.is_file() else 0
    return _read_once(json.dumps(schema.table_of(record), sort_keys=True), written)


@lru_cache(maxsize=8)  # a run asks several times, and a comparison completes many runs on the same data
def _read_once(table: str, written: int) -> Usual:
    return _usual_of(data_of(record_of("data", json.loads(table))))


def _partition(tables: Tables, own: Mapping[str, Any], run: dict[str, Any]) -> schema.Partition:
    """The partition; one that exists already determines the number of clients."""
    table, value = tables["partition"], own.get("partition")
    name = str(table.get("name", "")) or (
        "" if value is not None else _usual_partition(tables, own.get("data"))
    )
    if value is None and name not in SCHEMES and name.endswith(".json"):
        name, value = str(Path(name).absolute()), Partition.load(name)
    if value is None:
        return component("partition", {**table, "name": name})  # type: ignore[no-any-return]
    if run.setdefault("clients", value.clients) != value.clients:
        few = f"is not the number of clients of the partition, {value.clients}; leave it out"
        raise SettingError("run.clients", run["clients"], few)
    if not name:
        return schema.Partition(value=value, description=f"a partition by {value.scheme}")
    record = record_of("partition", {**table, "name": name})
    return dataclasses.replace(record, value=own.get("partition"))  # type: ignore[no-any-return]


def _usual_partition(tables: Tables, data: object) -> str:
    """The partition where none is given: by natural clients where the data has them, else by class."""
    if isinstance(data, Dataset):
        return _usual_of(data).partition
    table = tables["data"]
    name = str(table.get("name", "digits"))
    if table.get("client"):
        return "by_group"
    # The clients of a table are the column `client`, and a folder of images has none.
    if _is_own(name) and (user_code.is_reference(name) or datasets.reader(name) in (npz_file, leaf)):
        return _usual_of_data(table).partition
    return "iid" if table.get("kind", CLASSIFICATION) != CLASSIFICATION or _of_tokens(table) else "classes"


def model(table: Mapping[str, Any], adapted: bool = False, value: Any = None) -> schema.Model:
    """The model: by name, pretrained, of the user, or a value.

    Args:
        table: What is set.
        adapted: Whether there is an adapter.
        value: A module, or a function that makes one, that a program passed.
    """
    table = dict(table)
    if os.path.isdir(str(table.get("tokenizer", ""))):
        table["tokenizer"] = str(Path(table["tokenizer"]).absolute())
    if value is not None:
        ours = [f.name for f in schema.declared(schema.Model) if f.metadata["ours"]]
        return _of_value("model", table, value, type(value).__name__, *ours)  # type: ignore[no-any-return]
    name = str(table.get("name", ""))
    if not (
        pretrained.is_pretrained(name) or "sha256" in table
    ):  # a record of a run has the hash, and no place
        return component("model", table, fill=name in MODELS)  # type: ignore[no-any-return]
    if table.get("train") == "head" and not adapted and "sha256" not in table:
        table.setdefault("frozen_dropout", False)
    return _pretrained(record_of("model", table))


def _pretrained(record: schema.Model) -> schema.Model:
    """The record with absolute paths and the SHA-256 of the base, which a given one must equal."""
    source, _, place = record.name.partition(":")
    skip = ("name", "classes", "seed", *(() if source == "hf" else ("task",)))
    known = {name: p.default for name, p in parameters_of(pretrained.build, skip).items()}
    options = known | checked("model", pretrained.build, record.arguments, skip, schema.paths())
    name = f"hf:{Path(place).absolute()}" if source == "hf" and os.path.isdir(place) else record.name
    file = None if options["weights"] in ("default", "none") else pretrained.located(options["weights"])
    if file is not None:
        options["weights"] = str(file.absolute())
    if record.sha256 is not None and (pretrained.located(place) if source == "hf" else file) is None:
        return _with("model", dataclasses.replace(record, name=name), options)  # compared when it is built
    if source == "hf":
        options["task"] = pretrained.task_of(pretrained.base_of(name, options["weights"]), options["task"])
    record = _with("model", dataclasses.replace(record, name=name), options)
    return dataclasses.replace(record, sha256=checked_hash(record))


def checked_hash(record: schema.Model) -> str | None:
    """The SHA-256 of a pretrained base, which is the record's if it has one."""
    base = pretrained.base_of(record.name, str(record.weights))
    if record.sha256 not in (None, base.sha256):
        raise UsageError(
            f"the base {record.name} has the SHA-256 {base.sha256}, but this run is of a base with "
            f"{record.sha256}; put that one back, or start a new run without model.sha256"
        )
    return base.sha256


def _usual_model(tables: Tables, data: object) -> str:
    """The model where none is given: by the form of the samples where it is known, else ResNet-18."""
    table = tables["data"]
    name = str(table.get("name", "digits"))
    if isinstance(data, Dataset):
        return _model_for(data)
    if _of_tokens(table):
        return "causal_cnn"
    if _is_own(name) and not table.get("text") and not table.get("target"):
        return _usual_of_data(table).model
    return "embedding" if table.get("text") else "mlp" if table.get("target") else "resnet18"


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


def _of_tokens(table: Mapping[str, Any]) -> bool:
    """Whether a file has texts whose next token is predicted."""
    usual = NEXT_TOKEN if str(table.get("name", "")).endswith(".txt") else ""
    return str(table.get("kind", usual)) == NEXT_TOKEN


def adapter(table: Mapping[str, Any]) -> schema.Adapter:
    """The adapter, whose name may contain options: lora:r=8,alpha=16,targets=query+value."""
    name, _, words = str(table.get("name", "")).partition(":")
    if user_code.is_reference(str(table.get("name", ""))):
        return component("adapter", table)  # type: ignore[no-any-return]
    options: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        _, key, value = toml.assignment(f"adapter.{word}")
        options[key] = str(value) if key == "targets" else value
    return component("adapter", {**options, **table, "name": name})  # type: ignore[no-any-return]


def task(table: Mapping[str, Any]) -> schema.Task:
    """The objective and the metrics, with the user's code found."""
    record: schema.Task = record_of("task", table)
    metrics = tuple(name.strip() for text in record.metrics for name in text.split(",") if name.strip())
    losses = [] if record.loss is None else [record.loss]
    code = record.code
    known = {loss for names in LOSSES.values() for loss in names}
    for path, names, defined in (("task.metrics", metrics, METRICS), ("task.loss", losses, known)):
        for name in names:
            if user_code.is_reference(name):
                user_code.attribute("task", name, record.code)
                code = user_code.folder_of(name)
            elif name not in defined:
                raise unknown_name(path, name, [*defined, "mymodule:myfunction"])
    return dataclasses.replace(record, metrics=metrics, code=code)
