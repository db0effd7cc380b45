"""The same `copfl.run` twice is the same byte for byte, and every engine gives the same, whatever the options."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import copfl
from copfl.algorithms import ALGORITHMS, FedAvg
from copfl.core import tree
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.experiment.result import Result
from copfl.models import SmallCNN
from copfl.parts.mamo import CHANGES
from copfl.settings import presets
from copfl.testing import TOLERANCE, add_lora
from copfl.wrappers.attacks import ATTACKS
from copfl.wrappers.robust import ROBUST_RULES
from tests.kinds import quick
from tests.options import shown, variants
from tests.slow import SLOW, slow
from tests.toys import only_model

SIZES = (5, 7, 6)  # of the clients: unequal, so that some steps have padding
ROUNDS = 2


def network(needs: tuple[str, ...], shape: tuple[int, ...], classes: int) -> nn.Module:
    """A tiny CNN with batch norm and dropout, and an adapter for the algorithms that need one."""
    model = SmallCNN(shape, classes, width=1, hidden=4, norm="batch")
    body = cast(nn.Sequential, model.body)
    if needs:
        add_lora(body, needs)
    body.insert(3, nn.Dropout2d(0.2))
    body.append(nn.Dropout(0.3))
    return model


def data() -> tuple[Dataset, Partition]:
    """Random images of three classes; the last four are no client's: KT-pFL needs public samples."""
    rng, count = np.random.default_rng(0), sum(SIZES)
    samples = Samples(rng.integers(0, 256, (count + 4, 1, 4, 4), dtype=np.uint8), np.arange(count + 4) % 3)
    parts = tuple(np.split(np.arange(count), np.cumsum(SIZES)[:-1]))
    dataset = Dataset("random", samples, samples, ("a", "b", "c"), augment=True)
    return dataset, Partition(parts, parts, "by hand")


def result_of(name: str, engine: str, settings: dict[str, Any], rounds: int = ROUNDS) -> Result:
    model = functools.partial(network, getattr(ALGORITHMS[name], "needs", ()))
    how: dict[str, Any] = {"engine": engine, "precision": "fp64", "rounds": rounds, "batch": 4, "workers": 1}
    how["eval_every"] = rounds
    dataset, partition = data()
    return copfl.run(name, dataset, model=model, partition=partition, clients=len(SIZES), **how, **settings)


def ends_of(*results: Result) -> Iterator[tuple[tuple[str, torch.Tensor], ...]]:
    """The tensors at the end of each run, side by side."""
    ids = torch.arange(len(SIZES))
    ends = [(result.state.server, result.state.clients.rows(ids)) for result in results]
    return zip(*map(tree.named, ends), strict=True)


def check(run: Callable[[str], Result]) -> Result:
    """Two engines give the same up to rounding, so nothing is drawn that is no function of the seed."""
    first, other = run("vmap"), run("sequential")
    assert first.experiment.task.random, "the model draws no random numbers: nothing is tested"
    for (path, one), (_, elsewhere) in ends_of(first, other):
        difference = float((one.double() - elsewhere.double()).abs().max()) if one.numel() else 0.0
        assert difference <= TOLERANCE, f"vmap and sequential differ by {difference:.3g} in {path}"
    return first


def check_bytes(run: Callable[[str], Result]) -> None:
    """And two runs of one engine give the same bytes."""
    first, second = check(run), run("vmap")
    assert json.dumps(first.records) == json.dumps(second.records)
    for (path, one), (_, again) in ends_of(first, second):
        assert torch.equal(one, again), f"two runs differ in {path}"


VARIANTS = {name: variants(name) for name in ALGORITHMS}


def is_tried(name: str, options: dict[str, Any]) -> bool:
    """Whether the quick suite tries them.

    With its defaults every algorithm is repeated by test_testing.py, but for KT-pFL, which has public samples
    here. An option is one function that several algorithms call: it is tried with the first that has it, at the
    last of its values. That no value of CO-PFL has a side effect, test_testing.py has.
    """
    if not options:
        return name == "ktpfl"
    option = next(iter(options))
    every = [(other, one) for other, own in VARIANTS.items() for one in own if next(iter(one), "") == option]
    first, _ = every[0]
    return (name, options) == [(other, one) for other, one in every if other == first][-1]


# A number that is drawn without the seed shows between the engines, too. COPFL_SLOW=1: everything, byte for
# byte.
CASES = [
    (name, options)
    for name, algorithm in ALGORITHMS.items()
    if not only_model(algorithm)  # which draws nothing: algorithms/test_levels.py, test_trees.py
    for options in VARIANTS[name]
    if SLOW or is_tried(name, options)
]


@pytest.mark.job
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{shown(o)}" for name, o in CASES])
def test_every_algorithm_with_every_option(name: str, options: dict[str, Any]) -> None:
    how = check if options and not SLOW else check_bytes
    how(lambda engine: result_of(name, engine, {"algorithm_options": options}))


# That none of them has a side effect, tests/test_testing.py has.
@pytest.mark.parametrize("preset", quick(presets.names(), presets.names()[:1]))
def test_every_preset(preset: str) -> None:
    tables = presets.preset(preset, [{"run": {"rounds": 3}}])  # but for its data
    settings = {"algorithm_options": {key: v for key, v in tables["algorithm"].items() if key != "name"}}
    settings |= {kind: tables[kind] for kind in ("optimizer", "addons") if kind in tables}
    how = check_bytes if SLOW else check
    how(lambda engine: result_of("copfl", engine, settings, rounds=3))


SETTINGS: list[dict[str, Any]] = [
    *({"optimizer": {"name": "mamo", "change": change}} for change in CHANGES),
    {"optimizer": {"name": "mamo", "keep": False}, "algorithm_options": {"state_per_phase": True}},
    {"optimizer": {"name": "adam", "keep": True}},
    {"optimizer": {"name": "sgd", "keep": True}},
    {"server": {"name": "momentum"}, "addons": {"ema": 0.9}},
    *({"addons": {"lr_schedule": schedule}} for schedule in ("cosine", "linear")),
    *({"robust": {"name": rule}} for rule in ROBUST_RULES if rule != "evidence"),  # which needs four clients
    *({"attack": {"name": attack, "fraction": 0.34}} for attack in ATTACKS),
    {"privacy": {"noise": 1.0, "clip": 1.0}},
    {"participation": 0.5},
    {"buffers": "average"},
]


# Quick: what draws by itself, and one of each kind that changes how steps are taken or uploads are added up.
USUAL: list[dict[str, Any]] = [
    *(one for one in SETTINGS if {"privacy", "attack", "participation", "buffers", "server"} & one.keys()),
    {"optimizer": {"name": "mamo", "change": CHANGES[-1]}},
    {"optimizer": {"name": "adam", "keep": True}},
    {"addons": {"lr_schedule": "cosine"}},
    {"robust": {"name": "median"}},
]


@pytest.mark.job
@pytest.mark.parametrize(
    "settings", [pytest.param(one, id=str(one), marks=[] if one in USUAL else slow) for one in SETTINGS]
)
def test_every_optimizer_and_wrapper(settings: dict[str, Any]) -> None:
    draws = {"privacy", "attack", "participation"} & settings.keys()  # besides what the model draws
    how = check_bytes if draws or SLOW else check
    how(lambda engine: result_of("copfl", engine, settings))


# Mixtures, and no weights at the server.
@pytest.mark.job
@pytest.mark.parametrize("name", quick(["apfl", "fedpac", "fedpoe", "ktpfl"], ["apfl", "ktpfl"]))
def test_local_statistics_of_other_models(name: str) -> None:
    check(lambda engine: result_of(name, engine, {"addons": {"bn_stats": "local", "ema": 0.9}}))


@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg under another name."""


def test_an_algorithm_as_a_value_trains_as_by_its_name() -> None:
    by_name, mine, of_class = (
        copfl.run(algorithm, "digits", rounds=2, engine="vmap") for algorithm in ("fedavg", Mine(), Mine)
    )
    for result in (mine, of_class):
        assert json.dumps(result.records) == json.dumps(by_name.records)
        assert torch.equal(result.state.server.w, by_name.state.server.w)
