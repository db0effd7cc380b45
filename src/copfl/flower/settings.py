"""The settings of a federation, from Flower's flat run config: the same on the server and on every node."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from copfl import wire
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.task import Task, task_of
from copfl.data.reading import npz_arrays
from copfl.errors import DataError, UsageError, above, unknown
from copfl.experiment import migration
from copfl.experiment.components import (
    ROBUST,
    build_algorithm,
    build_model,
    resolve_algorithm,
    resolve_model,
    without,
)
from copfl.experiment.config import Tables, checked


@dataclass(frozen=True)
class RunConfig:
    """The keys of the run config, with "-" for "_", and their defaults. `TABLES` lists those with a dot."""

    run: str = ""  # the run's name; empty: the server chooses one
    resume: bool = False  # continue from the run's last checkpoint
    runs: str = "runs"  # the server's folder of runs
    rounds: int = 20
    clients: int = 3  # number of clients in the federation, connected or not
    participation: float = 1.0  # fraction of the clients that each round selects
    min_replies: int = 0  # replies that a round waits for; 0: half of the selected clients
    deadline: float = 600  # seconds that a round waits for more than these
    wire: str = "fp32"  # numbers in messages: fp32, fp16 or bf16
    seed: int = 0
    batch: int = 32
    algorithm: str = "copfl"
    model: str = "cnn"  # a model of copfl, or "module:function" of (shape, classes)
    shape: str = "1,8,8"  # of one sample
    classes: str = "10"  # their number, or their names separated by commas
    mean: str = ""  # of pixels in 0..1, a number per channel; empty: 0.5
    std: str = ""
    augment: bool = False  # random crops and flips in training
    buffers: str = "local"  # batch-norm statistics: local or average
    robust: str = ""  # robust aggregation: clip, trimmed_mean or median; options in robust-options
    privacy: float = 0.0  # noise on uploads: only in simulation
    public: str = ""  # an .npz file with public samples x, the same on every machine; only for ktpfl
    join: int = 0  # above 0: no training, but so many local updates for every new client

    def __post_init__(self) -> None:
        lowest = {"rounds": 1, "clients": 1, "batch": 1, "join": 0, "min_replies": 0, "seed": 0}
        for name, low in lowest.items():
            if not low <= getattr(self, name) < 2**62:
                raise UsageError(f"{name.replace('_', '-')} must be at least {low} and below 2^62")
        above(0, deadline=self.deadline)
        if not 0 < self.participation <= 1:
            raise UsageError(f"participation={self.participation} must be above 0 and at most 1")
        if self.wire not in wire.WIRES:
            raise unknown("wire", self.wire, wire.WIRES)
        if self.privacy:
            raise UsageError(
                f"privacy={self.privacy}: noised uploads are simulated only. Over a network the noise would have to "
                "come from a secret of each node, and the epsilon to count the nodes that did not answer; leave it out"
            )
        if not all(c.isalnum() or c in "-_." for c in self.run) or self.run.startswith("."):
            raise UsageError(f'run="{self.run}" must be a plain name: letters, digits, "-", "_" and "."')


DEFAULTS = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(RunConfig)}
TABLES = {  # prefixes of keys with a dot, and the tables of run.toml that they are
    "options": "algorithm",
    "optimizer": "optimizer",
    "model-options": "model",
    "robust-options": "robust",
    "guard-options": "robust",  # version 0.1
}


@dataclass(frozen=True, eq=False)
class Settings:
    """A federation's settings as values."""

    config: RunConfig
    algorithm: AnyAlgorithm
    task: Task
    layout: str  # hash of the model and of the public samples, which both sides compare
    classes: tuple[str, ...]  # names; empty if only their number is given
    shape: tuple[int, ...]

    @property
    def selected(self) -> int:
        """Number of clients that a round selects."""
        return max(1, math.ceil(self.config.participation * self.config.clients - 1e-9))

    @property
    def minimum(self) -> int:
        """Number of replies that a round needs."""
        return self.config.min_replies or (self.selected + 1) // 2


def settings_of(run_config: Mapping[str, Any]) -> Settings:
    """The settings that a run config describes; UsageError names the key that is invalid."""
    flat, tables = tables_of(run_config)
    lists = ("shape", "classes", "mean", "std")  # a list of one may be written as a number
    texts = {key: str(flat[key]) for key in lists if type(flat.get(key)) in (int, float)}
    given = {key.replace("-", "_"): value for key, value in (flat | texts).items()}
    config = RunConfig(**checked("run config", RunConfig, given))
    shape = tuple(_positive("shape", part) for part in config.shape.split(","))
    names = tuple(part.strip() for part in config.classes.split(",")) if "," in config.classes else ()
    classes = len(names) or _positive("classes", config.classes)
    channels = shape[0] if len(shape) == 3 else 0
    public = _public(config.public, shape) if config.public else None
    task = task_of(
        _model(config, tables["model"], shape, classes),
        classes,
        mean=_channels("mean", config.mean, channels),
        std=_channels("std", config.std, channels),
        buffers=config.buffers,
        public=public,
    )
    layout = wire.layout_hash(task.layout) + ("" if public is None else "-" + wire.fingerprint(public))
    settings = Settings(config, _algorithm(config, tables), task, layout, names, shape)
    if config.min_replies > settings.selected:
        raise UsageError(f"min-replies={config.min_replies}, but a round selects {settings.selected} clients")
    return settings


def tables_of(run_config: Mapping[str, Any]) -> tuple[dict[str, Any], Tables]:
    """The keys without a dot, and the others as tables of run.toml; names of version 0.1 are renamed."""
    flat: dict[str, Any] = {}
    tables: Tables = {title: {} for title in TABLES.values()}
    for key, value in run_config.items():
        prefix, _, name = key.partition(".")
        if name and prefix in TABLES:
            tables[TABLES[prefix]][name] = value
        else:
            flat[migration.TABLES.get(key, key)] = value
    tables["algorithm"]["name"] = flat.get("algorithm", RunConfig.algorithm)
    tables = migration.migrated(tables)
    del tables["algorithm"]["name"]
    return flat, tables


def _algorithm(config: RunConfig, tables: Tables) -> AnyAlgorithm:
    options = {"name": config.algorithm, **tables["algorithm"]}
    algorithm: AnyAlgorithm = build_algorithm(resolve_algorithm(options, tables["optimizer"]))
    if not config.robust:
        return algorithm
    rule = ROBUST.resolve({"name": config.robust, **tables["robust"]})
    wrapped: AnyAlgorithm = ROBUST.build(rule, algorithm=algorithm)
    return wrapped


def all_options(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the algorithm and of its optimizer with their defaults, as keys of the run config."""
    flat, tables = tables_of(run_config)
    name = flat.get("algorithm", RunConfig.algorithm)
    resolved = resolve_algorithm({"name": name, **tables["algorithm"]}, tables["optimizer"])
    options = {f"options.{key}": value for key, value in without(resolved["algorithm"], "name").items()}
    options |= {f"optimizer.{key}": value for key, value in resolved["optimizer"].items()}
    return {key: value for key, value in options.items() if isinstance(value, bool | int | float | str)}


def _model(config: RunConfig, options: dict[str, Any], shape: tuple[int, ...], classes: int) -> nn.Module:
    return build_model(resolve_model({"name": config.model, **options}), shape, classes, config.seed)


def _public(path: str, shape: tuple[int, ...]) -> Tensor:
    """The public samples."""
    arrays = npz_arrays(Path(path).expanduser())
    if "x" not in arrays or tuple(arrays["x"].shape[1:]) != shape:
        raise DataError(f"public={path} must hold an array x of samples {list(shape)}")
    return torch.from_numpy(arrays["x"])


def _positive(key: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f'{key}: "{text}" must be a whole number above 0')
    return int(text)


def _channels(key: str, text: str, channels: int) -> tuple[float, ...]:
    """A number per channel. Never computed from a node's samples: all nodes must use the same numbers."""
    try:
        numbers = tuple(float(part) for part in text.split(",")) if text else (0.5,) * channels
    except ValueError as error:
        raise UsageError(f'{key}="{text}" must be numbers separated by commas') from error
    if channels and len(numbers) != channels:
        raise UsageError(f'{key}="{text}" has {len(numbers)} numbers, but samples have {channels} channels')
    return numbers if channels else ()
