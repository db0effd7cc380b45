"""[optimizer]: the record of a table, and which learning rate it has where several could count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from copfl.core.optim import Adam, DefaultNumber, is_chosen
from copfl.data.sets import datasets
from copfl.models import pretrained
from copfl.settings import schema
from copfl.settings.checking import SettingError, options_of, parameters_of
from copfl.settings.components import component, factory_of, name_of, usual_optimizer
from copfl.settings.first_choice import ADAPTIVE, follows_rule, known_of, training_of
from copfl.settings.toml import Tables
from copfl.settings.usual import SMALL_SETS
from copfl.settings.values import record_of_value

# Learning rates at which the built-in models, and adapters or a head alone, learn within tens of rounds on a
# user's own data; for a model from scratch the rule of `first_choice` may choose another one. A pretrained
# model that is trained as a whole keeps the optimizer's.
OWN_RATES = {"adam": 1e-3, "mamo": 1e-3, "sgd": 0.1}
ADAPTER_RATES = {"adam": 1e-2, "mamo": 1e-2, "sgd": 0.1}


def optimizer_record(
    algorithm: schema.Algorithm,
    table: Mapping[str, Any],
    rates: Mapping[str, float],
    value: Any = None,
    by_rule: bool = False,
) -> schema.Optimizer:
    """The optimizer of an algorithm.

    The learning rate that counts is the first of these: what is set, on the command line, in a file, a
    preset, or by `first_choice`; what the algorithm's authors chose; what suits the data set; the default of
    the optimizer.

    Args:
        algorithm: The algorithm, whose own optimizer is the default.
        table: What is set.
        rates: Learning rates by optimizer that suit the data set, see `data_rates`.
        value: An optimizer that a program passed.
        by_rule: Whether Adam is the default of an algorithm whose author chose none.
    """
    usual = usual_optimizer(algorithm.name, algorithm.code)
    if usual is not None and by_rule and not is_chosen(usual):
        usual = Adam()
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
        return record_of_value("optimizer", table, value, repr(value))  # type: ignore[no-any-return]
    name = str(table.get("name", name_of("optimizer", usual)))
    suggested = options_of(usual) if name == name_of("optimizer", usual) else {}
    if name in rates and isinstance(suggested.get("lr", DefaultNumber()), DefaultNumber):
        suggested["lr"] = rates[name]  # the algorithm's authors chose none
    return component("optimizer", {"name": name, **suggested, **table})  # type: ignore[no-any-return]


def data_rates(tables: Tables, passed: Mapping[str, Any]) -> Mapping[str, float]:
    """Learning rates by optimizer that suit the data set and what is trained.

    Args:
        tables: One of each kind, from all layers.
        passed: By kind, values that a program passed.
    """
    if getattr(passed.get("data"), "name", "") in datasets.DATASETS:
        return {}
    adapted = bool(tables["adapter"]) or tables["model"].get("train") == "head"
    data = "" if "data" in passed else str(tables["data"].get("name", "digits"))
    rates = usual_rates(data, "" if "model" in passed else str(tables["model"].get("name", "")), adapted)
    if rates and "lr" not in tables["optimizer"] and follows_rule(tables, passed):
        return {**rates, **dict.fromkeys(ADAPTIVE, training_of(known_of(tables, passed)).lr)}
    return ADAPTER_RATES if adapted and rates and data not in SMALL_SETS else rates


def usual_rates(data: str, model: str = "", adapted: bool = False) -> Mapping[str, float]:
    """Learning rates by optimizer, where they are not the optimizer's own."""
    whole = pretrained.is_pretrained(model) and not adapted
    return OWN_RATES if data in SMALL_SETS or not (whole or data in datasets.DATASETS) else {}


def usual_rate(optimizer: str, data: str, model: str = "", adapted: bool = False) -> float:
    """The learning rate of an optimizer on a data set where none is given; the lowest that a tuning tries."""
    usual = parameters_of(factory_of("optimizer", optimizer))["lr"].default
    return float(usual_rates(data, model, adapted).get(optimizer, usual))


def optimizer_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Such as "adam 0.001", the optimizer and its learning rate; "" where an algorithm was a value."""
    table = tables.get("optimizer", {})
    return f"{table['name']} {table['lr']:g}" if "name" in table and "lr" in table else ""
