"""What a federation runs, out of Flower's flat run config: the same on the server and on every node."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from copfl.errors import DataError, UsageError, unknown

if TYPE_CHECKING:  # torch is slow to import, and a node that only says who it is does not need it
    from torch import Tensor

    from copfl.core.algorithm import AnyAlgorithm
    from copfl.core.task import Task

Config = Mapping[str, Any]

# Every key of the run config with its default. Tables: [algorithm.*] options, [optimizer.*], [model.*] options.
DEFAULTS: dict[str, Any] = {
    "run": "",  # the run's name; empty: the server makes one up
    "resume": False,  # go on from the run's last checkpoint
    "runs": "runs",  # the server's folder of runs
    "rounds": 20,
    "clients": 3,  # how many clients the federation has, connected or not
    "participation": 1.0,  # the share of them that each round asks
    "min-replies": 0,  # a round waits until it has so many; 0: half of those it asked
    "deadline": 600,  # seconds that a round waits for more than that
    "wire": "fp32",  # numbers on the wire: fp32, fp16 or bf16
    "seed": 0,
    "batch": 32,
    "algorithm": "copfl",
    "model": "cnn",  # a model of copfl's, or your own: "module:function" of (shape, classes)
    "shape": "1,8,8",  # of one sample
    "classes": "10",  # how many, or their names with commas between
    "mean": "",  # of pixels in 0..1, a number per channel; empty: 0.5
    "std": "",
    "augment": False,  # random crops and flips in training
    "buffers": "local",  # batch-norm statistics: local or average
    "robust": "",  # against hostile clients: clip, trimmed_mean or median; see the table robust-options
    "privacy": 0.0,  # noise on uploads, in the simulation only
    "public": "",  # a .npz file with x, samples that everybody may see: the same on every machine; only ktpfl needs it
    "join": 0,  # above 0: no training, but so many local turns for every newcomer
}
TABLES = ("options", "optimizer", "model-options", "robust-options")


@dataclass(frozen=True, eq=False)
class Settings:
    """A federation's settings, checked."""

    run: str
    resume: bool
    runs: str
    rounds: int
    clients: int
    participation: float
    min_replies: int
    deadline: float
    wire: str
    seed: int
    batch: int
    augment: bool
    join: int
    algorithm: AnyAlgorithm
    task: Task
    layout: str  # the hash that both sides compare, of the model and of the public samples
    classes: tuple[str, ...]  # names; empty where only their number is known
    shape: tuple[int, ...]

    @property
    def asked(self) -> int:
        """How many clients a round asks."""
        return max(1, math.ceil(self.participation * self.clients - 1e-9))

    @property
    def minimum(self) -> int:
        """How many replies a round needs."""
        return self.min_replies or (self.asked + 1) // 2


def settings_of(config: Config) -> Settings:
    """The settings that a run config describes; UsageError names what does not fit."""
    from copfl import wire
    from copfl.core.task import task_of

    flat, tables = _checked(config)
    shape = tuple(_whole("shape", part) for part in str(flat["shape"]).split(","))
    names = (
        tuple(part.strip() for part in str(flat["classes"]).split(",")) if "," in str(flat["classes"]) else ()
    )
    classes = len(names) or _whole("classes", str(flat["classes"]))
    channels = shape[0] if len(shape) == 3 else 0
    mean, std = (_channels(key, str(flat[key]), channels) for key in ("mean", "std"))
    if flat["wire"] not in wire.WIRES:
        raise unknown("wire", str(flat["wire"]), wire.WIRES)
    public = _public(flat["public"], shape) if flat["public"] else None
    task = task_of(
        _model(flat, tables["model-options"], shape, classes), classes,
        mean=mean, std=std, buffers=flat["buffers"], public=public,
    )  # fmt: skip
    layout = wire.layout_hash(task.layout) + ("" if public is None else "-" + wire.fingerprint(public))
    settings = Settings(
        run=flat["run"], resume=flat["resume"], runs=flat["runs"], rounds=flat["rounds"], clients=flat["clients"],
        participation=flat["participation"], min_replies=flat["min-replies"], deadline=flat["deadline"],
        wire=flat["wire"], seed=flat["seed"], batch=flat["batch"], augment=flat["augment"], join=flat["join"],
        algorithm=_algorithm(str(flat["algorithm"]), str(flat["robust"]), tables), task=task, layout=layout,
        classes=names, shape=shape,
    )  # fmt: skip
    if not 0 < settings.participation <= 1:
        raise UsageError(f"participation={settings.participation} must be above 0 and at most 1")
    if not 0 <= settings.min_replies <= settings.asked:
        raise UsageError(f"min-replies={settings.min_replies}, but a round asks {settings.asked} clients")
    return settings


def _checked(config: Config) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The flat keys with their defaults, and the tables; every value of its default's type."""
    flat, tables = dict(DEFAULTS), {table: dict[str, Any]() for table in TABLES}
    for key, value in config.items():
        table, dot, name = key.partition(".")
        if dot and table in tables:
            tables[table][name] = value
        elif key not in DEFAULTS:
            raise unknown("run config key", key, DEFAULTS)
        else:
            kind = type(DEFAULTS[key])
            if kind is float and type(value) is int and value.bit_length() < 1024:
                value = float(value)
            if kind is str and type(value) is int:
                value = str(value)
            if type(value) is not kind and not (key == "deadline" and type(value) is float):
                raise UsageError(
                    f"{key}={value!r} must be of type {kind.__name__}, such as {DEFAULTS[key]!r}"
                )
            flat[key] = value
    for key, low in (
        ("rounds", 1),
        ("clients", 1),
        ("batch", 1),
        ("join", 0),
        ("min-replies", 0),
        ("seed", 0),
    ):
        if flat[key] < low:
            raise UsageError(f"{key} must be at least {low}")
        if flat[key] >= 2**62:
            raise UsageError(f"{key} must be below 2^62; so many there will never be")
    if flat["privacy"]:
        raise UsageError(
            f"privacy={flat['privacy']}: noised uploads are simulated only. Over a network the noise would have to "
            "come from a secret of each node's, and the epsilon to count the nodes that did not answer; leave it out"
        )
    if not flat["deadline"] > 0:
        raise UsageError(f"deadline={flat['deadline']} must be a number of seconds above 0")
    if not all(c.isalnum() or c in "-_." for c in flat["run"]) or flat["run"].startswith("."):
        raise UsageError(f'run="{flat["run"]}" must be a plain name: letters, digits, "-", "_" and "."')
    return flat, tables


def _algorithm(name: str, robust: str, tables: dict[str, dict[str, Any]]) -> AnyAlgorithm:
    from copfl.algorithms import ALGORITHMS
    from copfl.experiment.config import algorithm_of, with_robust_rule

    result: AnyAlgorithm = algorithm_of(ALGORITHMS, name, tables["options"], tables["optimizer"])
    return with_robust_rule(robust, result, tables["robust-options"]) if robust else result


def _model(flat: dict[str, Any], options: dict[str, Any], shape: tuple[int, ...], classes: int) -> Any:
    import torch

    from copfl import models
    from copfl.experiment.config import checked

    if ":" not in flat["model"]:
        if (factory := models.MODELS.get(flat["model"])) is not None:
            options = checked(flat["model"], factory, options, ("shape", "classes"))
        return models.build(flat["model"], shape, classes, flat["seed"], **options)
    make = own_function("model", flat["model"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(flat["seed"])  # every node starts from the same weights
        return make(shape, classes, **options)


def _public(path: str, shape: tuple[int, ...]) -> Tensor:
    """The samples that everybody may see."""
    import torch

    from copfl.data.reading import npz_arrays

    arrays = npz_arrays(Path(path).expanduser())
    if "x" not in arrays or tuple(arrays["x"].shape[1:]) != shape:
        raise DataError(f"public={path} must hold an array x of samples {list(shape)}")
    return torch.from_numpy(arrays["x"])


def own_function(what: str, reference: str) -> Callable[..., Any]:
    """The user's own function that "module:function" names."""
    module, _, name = reference.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f'{what}="{reference}": there is no such function ({error}); name it as "module:function"'
        ) from error
    if not callable(function):
        raise UsageError(f'{what}="{reference}" is not a function')
    result: Callable[..., Any] = function
    return result


def _whole(key: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f'{key}: "{text}" must be a whole number above 0')
    return number


def _channels(key: str, text: str, channels: int) -> tuple[float, ...]:
    """A number per channel. Never worked out from a node's own samples: all nodes must see the same numbers."""
    if not channels:
        return ()
    try:
        numbers = tuple(float(part) for part in text.split(",")) if text else (0.5,) * channels
    except ValueError as error:
        raise UsageError(f'{key}="{text}" must be numbers with commas between') from error
    if len(numbers) != channels:
        raise UsageError(f'{key}="{text}" has {len(numbers)} numbers, but samples have {channels} channels')
    return numbers
