"""Where layers of settings become a complete record. Below `complete` no mapping of settings exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.core.algorithm import rate_of, traits, with_optimizer, with_rate
from copfl.core.optim import Adam, DefaultNumber, is_chosen
from copfl.data.clients.groups import number_of_groups
from copfl.data.clients.partition import Partition
from copfl.data.clients.schemes import SCHEMES
from copfl.errors import UsageError
from copfl.settings import named_code, schema
from copfl.settings.checking import SettingError
from copfl.settings.components import WRAPPERS, build, component, name_of
from copfl.settings.data import data_record
from copfl.settings.first_choice import check_head_only, follows_rule
from copfl.settings.layers import Layer, check_layer, lower_layers, merged
from copfl.settings.model import adapter_record, model_record
from copfl.settings.optimizer import data_rates, optimizer_record
from copfl.settings.schema import Run, record_of
from copfl.settings.task import task_record
from copfl.settings.toml import Tables
from copfl.settings.usual import usual_model, usual_of_table, usual_partition
from copfl.settings.values import layer_of, modules_of_values, record_of_value

ROUNDS = {
    "rounds",
    "select",
    "validation",
    "patience",
}  # where one of these is set, somebody chose the rounds


@named_code.scope()
def complete(
    *layers: Layer,
    preset: str = "",
    values: Mapping[str, Any] | None = None,
    sums_only: bool = False,
    code: named_code.Modules = (),
) -> Run:
    """The record of a run with every name checked and every default filled in.

    Args:
        layers: Settings by title and key, as in run.toml; later ones win. Where a layer chooses another
            algorithm, model, ..., the options of the former one are dropped; another algorithm has its own
            optimizer.
        preset: The name of a preset, which is below the layers.
        values: By kind, an algorithm, a data set, a model, a partition or an optimizer that a program has.
        sums_only: Whether the server may see sums of uploads only, which counts where no algorithm is named.
        code: Modules of yours that the layers may name: a layer may be a file's, and names none itself.
    """
    named_code.name(code, modules_of_values(values or {}))
    passed = {kind: value for kind, value in (values or {}).items() if value is not None}
    named: Tables = {}  # settings of values that have a name
    for kind in ("algorithm", "optimizer"):
        if isinstance(passed.get(kind), type):
            passed[kind] = passed[kind]()
        if same_settings := layer_of(kind, passed.get(kind)):
            named |= same_settings
            del passed[kind]
    upper = [*layers, named]
    for layer in upper:
        check_layer(layer)
    tables = merged([*lower_layers(upper, passed, preset, sums_only), *upper], passed)
    for kind, table in tables.items():
        if "value" in table and kind not in passed:
            raise UsageError(
                f"the {kind} of this run is {table['value']}, a value that a Python program passed; "
                f"run it again from there, or name it: [{kind}] name = ..."
            )
    records: dict[str, Any] = {}
    rates, by_rule = data_rates(tables, passed), follows_rule(tables, passed)
    if "algorithm" in passed:
        records["algorithm"] = _algorithm_of_value(tables, passed["algorithm"], rates, by_rule)
    else:
        records["algorithm"] = component("algorithm", tables["algorithm"])
        records["optimizer"] = optimizer_record(
            records["algorithm"], tables["optimizer"], rates, passed.get("optimizer"), by_rule
        )
    if "data" in passed:
        shown = getattr(passed["data"], "name", type(passed["data"]).__name__)
        records["data"] = record_of_value("data", tables["data"], passed["data"], shown)
    else:
        records["data"] = data_record({"name": "digits", **tables["data"]})
    run = dict(tables["run"])
    if run.get("find_rounds") == "auto":
        is_open = not (ROUNDS & run.keys() or tables["privacy"] or run.get("store") == "disk")
        run["find_rounds"] = "first" if is_open and by_rule else "off"
    records["partition"] = _partition(tables, passed, run)
    if records["partition"].name == "by_group" and "clients" not in run:
        groups = (
            number_of_groups(passed["data"]) if "data" in passed else usual_of_table(tables["data"]).groups
        )
        if groups:  # without any, the scheme refuses the data
            run["clients"] = groups
    if "model" not in passed and "name" not in tables["model"]:
        tables["model"]["name"] = usual_model(tables["data"], passed.get("data"))
    records["model"] = model_record(tables["model"], bool(tables["adapter"]), passed.get("model"))
    if tables["adapter"]:
        records["adapter"] = adapter_record(tables["adapter"])
    records["task"] = task_record(tables["task"])
    records["run"] = settings = record_of("run", run)
    for kind in WRAPPERS:
        if tables[kind]:
            records[kind] = component(kind, tables[kind])
    addons = records.get("addons", schema.Addons()).options
    if addons.get("lr_schedule", "constant") != "constant" and not addons["lr_rounds"]:
        # So that resuming to more rounds keeps the schedule.
        records["addons"] = schema.Addons(options={**addons, "lr_rounds": settings.rounds})
    completed = Run(**records)
    # Made only to be checked: its parts check their numbers.
    check_head_only(completed, build("algorithm", completed.algorithm, optimizer=completed.optimizer))
    return completed


def _algorithm_of_value(
    tables: Tables, algorithm: Any, rates: Mapping[str, float], by_rule: bool
) -> schema.Algorithm:
    """An algorithm that a program passed, with the data set's optimizer and rate where it chooses none."""
    options = {**tables["algorithm"], **tables["optimizer"]}
    used = traits(algorithm).optimizer
    if used is not None and by_rule and not is_chosen(used):
        algorithm = with_optimizer(algorithm, used := Adam())
    rate = rates.get("" if used is None else name_of("optimizer", used))
    if rate is not None and isinstance(rate_of(algorithm), DefaultNumber):
        algorithm = with_rate(algorithm, rate)
    return record_of_value("algorithm", options, algorithm, repr(algorithm))  # type: ignore[no-any-return]


def _partition(tables: Tables, passed: Mapping[str, Any], run: dict[str, Any]) -> schema.Partition:
    """The partition; one that exists already determines the number of clients."""
    table, value = tables["partition"], passed.get("partition")
    name = str(table.get("name", "")) or (
        "" if value is not None else usual_partition(tables["data"], passed.get("data"))
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
    return dataclasses.replace(record, value=passed.get("partition"))  # type: ignore[no-any-return]
