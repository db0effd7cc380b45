"""What suits the data, where nobody chose: the method, the batch, the schedule, the model, the rates.

`complete` asks between the layers that it merges; a tuning asks for the usual rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import Traits, traits
from copfl.data.sets import datasets
from copfl.errors import how_to_set
from copfl.models import pretrained
from copfl.settings import schema
from copfl.settings.checking import SettingError, parameters_of
from copfl.settings.components import factory_of
from copfl.settings.facts import LINEAR, SMALL_SETS, TREES, WORDS, Facts
from copfl.settings.first_choice import first_choice, training_of
from copfl.settings.merging import Layer
from copfl.settings.record import declared
from copfl.settings.toml import Tables

ADAPTIVE = ("adam", "mamo")  # the optimizers that the rule's rate is for
# Learning rates at which the built-in models, and adapters or a head alone, learn within tens of rounds on a
# user's own data; for a model from scratch the rule of `first_choice` may choose another one. A pretrained
# model that is trained as a whole keeps the optimizer's.
OWN_RATES = {"adam": 1e-3, "mamo": 1e-3, "sgd": 0.1}
FITTING = {TREES: TREES, WORDS: "wide_levels"}  # by model, the method that is made for it
ADAPTER_RATES = {"adam": 1e-2, "mamo": 1e-2, "sgd": 0.1}


def suggest(facts: Facts, defaults: Tables, layers: Sequence[Layer], preset: str) -> Tables:
    """What suits the data where nobody chose: a layer below what was chosen.

    Args:
        facts: What is known of the federation.
        defaults: The data set's defaults.
        layers: What a person or a program set.
        preset: The name of a preset; it has a method.
    """
    is_open = {
        kind: kind not in facts.passed and not facts.tables[kind].get("name")
        for kind in ("data", "model", "partition")
    }
    if preset:
        method: Tables = {}
    elif "algorithm" in facts.passed or any(layer.get("algorithm", {}).get("name") for layer in layers):
        method = _training(facts, is_batch_set=any("batch" in layer.get("run", {}) for layer in layers))
    elif (name := FITTING.get(str(facts.tables["model"].get("name")), "")) and "model" not in facts.passed:
        method = {"algorithm": {"name": name}, **_needed(traits(ALGORITHMS[name]), facts)}
        method.pop("model", None)
    else:
        _check_options_of_nobody(facts.tables["algorithm"], defaults.get("algorithm", {}))
        method = first_choice(facts.known).layer
    return {kind: {"name": facts.usual_name(kind)} for kind, is_one in is_open.items() if is_one} | method


def _training(facts: Facts, is_batch_set: bool) -> Tables:
    """The rule's batch and schedule, for an algorithm that is named, and what this one needs.

    Whoever sets a rate gets a constant one.

    Adam and its rate are suggested by `usual_rates`.
    """
    table = facts.tables["algorithm"]
    needed = _needed(
        traits(
            facts.passed.get("algorithm") or factory_of("algorithm", str(table["name"]), table.get("code"))
        ),
        facts,
    )
    if needed or not facts.follows_rule:
        return needed
    optimizer = facts.tables["optimizer"]
    by_rule = (
        str(optimizer.get("name") or facts.usual_name("optimizer")) in ADAPTIVE
        and "lr" not in optimizer
        and "optimizer" not in facts.passed
    )
    if is_batch_set and not by_rule:
        return {}  # the data need not be read
    training = training_of(facts.known)
    return {"addons": training.addons if by_rule else {}, "run": {"batch": training.batch}}


def _needed(of_algorithm: Traits, facts: Facts) -> Tables:
    """The model of an algorithm that trains the head alone, or one model only; and its rounds."""
    rounds = of_algorithm.usual_rounds
    if of_algorithm.rounds_of is not None:
        rounds = of_algorithm.rounds_of(facts.tables)
    needed: Tables = {"run": {"rounds": rounds}} if rounds else {}
    only = of_algorithm.trains
    if of_algorithm.head_only:
        only = WORDS if facts.usual_name("model") == "embedding" else LINEAR
    if only and "model" not in facts.passed:
        needed["model"] = {"name": only}
    return needed


def _check_options_of_nobody(table: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Nothing, if no option of a certain algorithm is set, where no algorithm is named."""
    common = {f.name for f in declared(schema.Algorithm)}
    for key in table.keys() - common - usual.keys():
        if any(key in parameters_of(algorithm, skip=("optimizer",)) for algorithm in ALGORITHMS.values()):
            name = how_to_set("algorithm.name", "copfl", "--algorithm")
            raise SettingError(
                f"algorithm.{key}", table[key], f"needs the name of its algorithm, such as {name}"
            )


def usual_rates(facts: Facts, by_rule: bool = True) -> Mapping[str, float]:
    """Learning rates by optimizer that suit the data set and what is trained; else an optimizer's own counts.

    Args:
        facts: What is known of the federation.
        by_rule: Whether the rule of `first_choice` counts, and whether adapters are trained, as in a run; a tuning
            tries the rates around those of a whole model.
    """
    data, model = (
        facts.data_name,
        "" if "model" in facts.passed else str(facts.tables["model"].get("name", "")),
    )
    is_published = getattr(facts.passed.get("data"), "name", "") in datasets.DATASETS
    is_whole = pretrained.is_pretrained(model) and not facts.is_adapted
    if is_published or (data not in SMALL_SETS and (is_whole or data in datasets.DATASETS)):
        return {}
    if by_rule and "lr" not in facts.tables["optimizer"] and facts.follows_rule:
        return {**OWN_RATES, **dict.fromkeys(ADAPTIVE, training_of(facts.known).lr)}
    return ADAPTER_RATES if by_rule and facts.is_adapted and data not in SMALL_SETS else OWN_RATES
