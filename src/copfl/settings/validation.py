"""Tables of settings to the record of a run: every name, type and limit is checked here.

Simulations, comparisons and federations make their records with `validate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.core.algorithm import rate_of, traits, with_optimizer, with_rate
from copfl.core.optim import DefaultNumber
from copfl.data.clients.partition import Partition
from copfl.data.clients.schemes import SCHEMES
from copfl.errors import UsageError
from copfl.settings import schema
from copfl.settings.checking import SettingError, options_of
from copfl.settings.components import WRAPPERS, component, name_of, usual_optimizer
from copfl.settings.data import data_record
from copfl.settings.facts import Facts
from copfl.settings.model import adapter_record, model_record
from copfl.settings.schema import Run, record_of
from copfl.settings.suggestions import usual_rates
from copfl.settings.task import task_record
from copfl.settings.toml import Tables
from copfl.settings.values import record_of_value

# Where one of these is set, by somebody or by the defaults of a data set, the number of rounds is not searched.
ROUNDS = {"rounds", "select", "validation", "patience"}


def validate(tables: Tables, facts: Facts | None = None) -> Run:
    """The record of these tables; SettingError names what is wrong.

    Args:
        tables: Settings by title and key. A federation has no [data] and no [partition].
        facts: What is known of the data, and the values that a program passed. None: the tables are a run
            config, in which everything is chosen that follows from data.
    """
    tables = {kind: {} for kind in schema.KINDS} | tables
    passed = facts.passed if facts else {}
    for kind, table in tables.items():
        if facts and "value" in table and kind not in passed:
            argument = "dataset" if kind == "data" else kind
            raise UsageError(
                f"the {kind} of this run is {table['value']}, a value that a Python program passed; "
                f"pass it again from there: {argument}=..., or name it: [{kind}] name = ..."
            )
    rates = usual_rates(facts) if facts else {}
    by_rule = facts is not None and facts.follows_rule
    records: dict[str, Any] = {}
    if "algorithm" in passed:
        records["algorithm"] = _algorithm_of_value(tables, passed["algorithm"], rates, by_rule)
    else:
        records["algorithm"] = algorithm = component("algorithm", tables["algorithm"])
        table, value = tables["optimizer"], passed.get("optimizer")
        usual = usual_options(algorithm, table, rates, value, by_rule)
        if value is not None:
            records["optimizer"] = record_of_value("optimizer", table, value, repr(value))
        elif usual:
            records["optimizer"] = component("optimizer", {**usual, **table})
    if "data" in passed:
        shown = getattr(passed["data"], "name", type(passed["data"]).__name__)
        records["data"] = record_of_value("data", tables["data"], passed["data"], shown)
    elif tables["data"]:
        records["data"] = data_record(tables["data"])
    run = dict(tables["run"])
    if run.get("find_rounds") == "auto":
        is_open = not (ROUNDS & run.keys() or tables["privacy"] or run.get("store") == "disk")
        run["find_rounds"] = "first" if is_open and by_rule else "off"
    if "partition" in passed or tables["partition"]:
        records["partition"] = chosen = _partition(tables["partition"], passed.get("partition"), run)
        is_open = chosen.name == "by_group" and "clients" not in run
        of_data = facts.of_data if is_open and facts else None
        if of_data is not None and of_data.groups:  # without any, the scheme refuses the data
            run["clients"] = of_data.groups
    records["model"] = model_record(tables["model"], bool(tables["adapter"]), passed.get("model"))
    if tables["adapter"]:
        records["adapter"] = adapter_record(tables["adapter"])
    records["task"] = task_record(tables["task"])
    records["run"] = record_of("run", run)
    records |= {kind: component(kind, tables[kind]) for kind in WRAPPERS if tables[kind]}
    addons = records["addons"].options if facts and "addons" in records else {}
    if addons.get("lr_schedule", "constant") != "constant" and not addons["lr_rounds"]:
        # So that resuming to more rounds keeps the schedule.
        rounds = {"lr_rounds": records["run"].rounds}
        records["addons"] = schema.Addons(options={**addons, **rounds})
    return Run(**records)


def _algorithm_of_value(
    tables: Tables, algorithm: Any, rates: Mapping[str, float], by_rule: bool
) -> schema.Algorithm:
    """An algorithm that a program passed, with the data set's optimizer and rate where it chooses none."""
    options = {**tables["algorithm"], **tables["optimizer"]}
    used = usual_optimizer(algorithm, by_rule=by_rule)
    if used is not traits(algorithm).optimizer:
        algorithm = with_optimizer(algorithm, used)
    rate = rates.get("" if used is None else name_of("optimizer", used))
    if rate is not None and isinstance(rate_of(algorithm), DefaultNumber):
        algorithm = with_rate(algorithm, rate)
    return record_of_value("algorithm", options, algorithm, repr(algorithm))  # type: ignore[no-any-return]


def usual_options(
    algorithm: schema.Algorithm,
    table: Mapping[str, Any],
    rates: Mapping[str, float],
    value: Any = None,
    by_rule: bool = False,
) -> dict[str, Any]:
    """The optimizer of an algorithm where nothing is set: its name and options; nothing if it has none.

    The learning rate that counts is the first of these: what is set, on the command line, in a file, a
    preset, or by `first_choice`; what the algorithm's authors chose; what suits the data set; the default of
    the optimizer.

    Args:
        algorithm: The algorithm, whose own optimizer is the default.
        table: What is set.
        rates: Learning rates by optimizer that suit the data set, see `suggestions.usual_rates`.
        value: An optimizer that a program passed.
        by_rule: Whether Adam is the default of an algorithm whose author chose none.
    """
    usual = usual_optimizer(algorithm.name, algorithm.code, by_rule=by_rule)
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
        return {}
    name = str(table.get("name", name_of("optimizer", usual)))
    options = options_of(usual) if name == name_of("optimizer", usual) else {}
    if name in rates and isinstance(options.get("lr", DefaultNumber()), DefaultNumber):
        options["lr"] = rates[name]  # the algorithm's authors chose none
    return {"name": name, **options}


def _partition(table: Mapping[str, Any], passed: Partition | None, run: dict[str, Any]) -> schema.Partition:
    """The partition; one that exists already determines the number of clients."""
    name, value = str(table.get("name", "")), passed
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
    return dataclasses.replace(record, value=passed)  # type: ignore[no-any-return]
