"""Every algorithm with each of its options at each of its values, one option at a time."""

from __future__ import annotations

import re
from typing import Any

import pytest

from copfl.algorithms import ALGORITHMS
from copfl.errors import UsageError
from copfl.settings.checking import parameters_of, with_options

# Options whose values no list has: parts of the model, and numbers that switch something on or off.
OTHERS: dict[str, tuple[Any, ...]] = {
    "alpha_rate": (0.0,),
    "clustered": (("head",),),
    "cut": ("body.0",),
    "distil_epochs": (0, 2),
    "epochs": (),  # to do it twice is to repeat it
    "holdout": (0,),
    "max_weight": (0.4,),
    "mix_epochs": (0,),
    "personal": (("norms",), ("head",)),
    "ranks": ((2, 1),),
    "state_per_phase": (),  # needs an optimizer that restarts in every round
    "starts": (("head",),),
    "tune": ("head", "body"),
    "tune_epochs": (0, 1),
    "until": (1,),
    "warmup": (1,),
}
# What goes with an option, and numbers that only one algorithm has.
BESIDE: dict[tuple[str, str, Any], dict[str, Any]] = {
    ("copfl", "candidates", "reselect"): {"criterion": "benefit"},  # as in the presets
    ("fedavg_ft", "tune", "head"): {"tune_epochs": 1},
    ("fedavg_ft", "tune", "body"): {"tune_epochs": 1},
    ("fedpoe", "holdout", 0): {"period": 1},
}
MORE: dict[str, list[dict[str, Any]]] = {
    "ktpfl": [{"epochs": 0}],
    "fedselect": [{"interval": 1}],
    "ifca": [{"clusters": 3}],
    "player_fl": [{"jump": 1.5}],
}


def variants(name: str) -> list[dict[str, Any]]:
    """The options of an algorithm: its defaults, and each option at each other value that has a name."""
    cases: list[dict[str, Any]] = [{}, *MORE.get(name, [])]
    for option, (default, _) in parameters_of(ALGORITHMS[name], ("optimizer",)).items():
        others = (value for value in _values(name, option, default) if value != default)
        cases += [{option: value, **BESIDE.get((name, option, value), {})} for value in others]
    return cases


def _values(name: str, option: str, default: Any) -> tuple[Any, ...]:
    if option in OTHERS:
        return OTHERS[option]
    if isinstance(default, bool):
        return (True, False)
    return words(name, option) if isinstance(default, str) else ()


def words(name: str, option: str) -> tuple[str, ...]:
    """The values of an option, which the message about a wrong one lists."""
    with pytest.raises(UsageError) as refused:
        with_options(ALGORITHMS[name](), {option: "?"})
    known = re.search(r"[Kk]nown: ([\w, ]+)", str(refused.value))
    assert known, f"the message about {name}.{option} lists no values: {refused.value}"
    return tuple(known[1].split(", "))


def shown(options: dict[str, Any]) -> str:
    """The options as the name of a test."""
    return ",".join(f"{key}={value}" for key, value in options.items()) or "defaults"
