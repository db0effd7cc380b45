"""The settings of a federation, from Flower's flat run config: the same on the server and on every node."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from copfl import wire
from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import AnyAlgorithm, blank_samples, example_output
from copfl.core.task import Task, task_of
from copfl.data.reading import npz_arrays
from copfl.data.samples import CLASSIFICATION, KINDS, Shape
from copfl.errors import DataError, UsageError, above, at_least, one_of, raised_as
from copfl.experiment.models import build_model
from copfl.experiment.tasks import build_task
from copfl.flower import secure_total
from copfl.flower.model_size import require_size
from copfl.flower.private_node import SecretNoise
from copfl.flower.run_config import is_plain_name, tables_of
from copfl.flower.secure_sum import Rules
from copfl.settings import complete, schema
from copfl.settings.checking import checked
from copfl.settings.components import algorithm_of, wrapped
from copfl.settings.schema import Run, RunSettings
from copfl.wrappers.privacy import check_sums


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys of the run config, with "-" for "_", and their defaults; those with a dot are in `run_config.TABLES`."""

    run: str = ""  # the run's name; empty: the server chooses one
    resume: bool = False  # continue from the run's last checkpoint
    rollback: bool = False  # set nodes back that are ahead of the server, which lost checkpoints
    rounds: int = 20
    clients: int = 3  # number of clients in the federation, connected or not
    participation: float = 1.0  # fraction of the clients that each round selects
    min_replies: int = 0  # replies that a round waits for; 0: half of the selected; in secure sums all
    deadline: float = 600  # seconds that a round waits for more than these
    wire: str = "fp32"  # numbers in messages: fp32, fp16 or bf16
    seed: int = 0
    batch: int = 32
    algorithm: str = "copfl"
    model: str = "cnn"  # a model of copfl, hf:NAME and so on, or "module:function" of (shape, classes)
    adapter: str = ""  # such as lora:r=8; options also in adapter-options
    shape: str = "1,8,8"  # of one sample; "text" for sentences, which a node tokenises
    classes: str = "10"  # their number, or their names separated by commas
    mean: str = ""  # of pixels in 0..1, a number per channel; empty: 0.5
    std: str = ""
    kind: str = CLASSIFICATION  # of the targets: classification, multilabel, regression or next_token
    target_mean: str = ""  # of numbers to predict, one for each: they are standardised in training
    target_std: str = ""
    augment: bool = False  # random crops and flips in training
    buffers: str = "local"  # batch-norm statistics: local or average
    server: str = ""  # the server's step: mean, momentum, adam, ...; options in server-options
    robust: str = ""  # robust aggregation: clip, trimmed_mean or median; options in robust-options
    privacy: float = 0.0  # noise on uploads, in multiples of privacy-clip; 0: none
    privacy_clip: float = 1.0  # the largest norm of an update
    privacy_delta: float = 1e-5  # of the epsilon in the record
    secure_aggregation: bool = False  # the server receives only the sum of the uploads
    secure_threshold: int = 0  # clients that must stay until the end of a sum; 0: the smallest secure number
    secure_range: float = 65536.0  # the largest absolute value of an entry of the sum, of one client
    secure_bits: int = 36  # of such an entry, with its sign
    secure_neighbours: int = 0  # clients with which each client shares its secrets; 0: all
    public: str = ""  # an .npz file with public samples x, the same on every machine; only for ktpfl
    join: int = 0  # above 0: no training, but so many local updates for every new client

    def __post_init__(self) -> None:
        if not 0 <= self.min_replies <= self.selected:
            raise UsageError(f"min-replies={self.min_replies}, but a round selects {self.selected} clients")
        at_least(0, join=self.join)
        one_of(KINDS, kind=self.kind)
        above(0, deadline=self.deadline)
        one_of(wire.WIRES, wire=self.wire)
        at_least(0, privacy=self.privacy)
        if self.secure_aggregation and self.robust:
            raise UsageError(
                f'robust="{self.robust}" compares single uploads, and with secure-aggregation the server '
                "sees only their sum; leave one of them out"
            )
        if self.secure_aggregation:
            _ = self.rules  # its numbers are checked
        if self.run and not is_plain_name(self.run):
            raise UsageError(f'run="{self.run}" must be a plain name: letters, digits, "-" and "_"')

    @property
    def selected(self) -> int:
        """Number of clients that a round selects."""
        names = ("clients", "rounds", "seed", "batch", "participation")
        return RunSettings(**{name: getattr(self, name) for name in names}).participants

    @property
    def minimum(self) -> int:
        """Number of replies that a round needs."""
        return self.min_replies or (self.selected if self.secure_aggregation else (self.selected + 1) // 2)

    @property
    def rules(self) -> Rules:
        """The rules of secure aggregation."""
        keys = ("threshold", "range", "bits", "neighbours")
        return Rules(self.selected, **{key: getattr(self, f"secure_{key}") for key in keys})


DEFAULTS = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(RunConfig)}


@dataclass(frozen=True, eq=False)
class Settings:
    """A federation's settings as values."""

    config: RunConfig
    run: Run  # the algorithm, its optimizer, the model, the robust rule and the task, with every default
    algorithm: AnyAlgorithm
    task: Task
    layout: str  # hash of the model, of its base and of the public samples, which both sides compare
    classes: tuple[str, ...]  # names; empty if only their number is given
    shape: Shape


TEXT: Shape = {"input_ids": (2,), "attention_mask": (2,)}  # of a sentence; its length is the node's own


def settings_of(run_config: Mapping[str, Any], most_parameters: int | None = None) -> Settings:
    """The settings that a run config describes; UsageError names the key that is invalid.

    Args:
        run_config: keys of `RunConfig`, and those of `run_config.TABLES`.
        most_parameters: of a model of copfl's, as the machine's owner allows; None: any number.
    """
    flat, given = tables_of(run_config)
    config = RunConfig(**checked("run config", RunConfig, flat))
    options = given["algorithm"]
    if config.secure_aggregation and (known := ALGORITHMS.get(str(options["name"]))):
        options = {**secure_total.summable(known), **options}
    chosen = complete.component("algorithm", options)
    adapter = {**given["adapter"], "name": config.adapter} if config.adapter else {}
    robust = {**given["robust"], "name": config.robust} if config.robust else {}
    server = {**given["server"], "name": config.server} if config.server else {}
    run = Run(
        algorithm=chosen,
        optimizer=complete.optimizer(chosen, given["optimizer"], {}),
        model=complete.model({**given["model"], "name": config.model}, bool(adapter)),
        adapter=complete.adapter(adapter) if adapter else schema.Adapter(),
        server=complete.component("server", server) if server else schema.Server(),
        robust=complete.component("robust", robust) if robust else schema.Robust(),
        task=complete.task(given["task"]),
    )
    algorithm = algorithm_of(run)
    if run.server:
        algorithm = wrapped("server", run.server, algorithm)
    if run.robust:
        algorithm = wrapped("robust", run.robust, algorithm)
    is_text = config.shape == "text"
    shape = () if is_text else _numbers("shape", config.shape, int)
    names = tuple(part.strip() for part in config.classes.split(",")) if "," in config.classes else ()
    classes = len(names) or _numbers("classes", config.classes, int)[0]
    at_least(1, classes=classes, shape=min(shape, default=1))
    public = _public(config.public, shape) if config.public else None
    if most_parameters is not None:
        require_size(most_parameters, run.model, run.adapter, shape, classes)
    model = build_model(run.model, run.adapter, shape, classes, config.seed)
    mean, std = (_channels(key, text, shape) for key, text in (("mean", config.mean), ("std", config.std)))
    if mean and std:
        mean, std = getattr(model, "normalization", None) or (mean, std)
    criterion, metrics = build_task(run.task, config.kind, _scale(config, classes))
    task = task_of(
        model,
        classes,
        criterion=criterion,
        metrics=metrics,
        mean=mean,
        std=std,
        buffers=config.buffers,
        public=public,
    )
    layout = wire.layout_hash(task.layout) + ("" if public is None else "-" + wire.fingerprint(public))
    layout += "-" + base[:16] if (base := run.model.sha256) else ""
    settings = Settings(config, run, algorithm, task, layout, names, TEXT if is_text else shape)
    if config.privacy:
        settings = _private(settings)
    if config.secure_aggregation:
        impossible = f'secure-aggregation is not possible with "{config.algorithm}": {{}}'
        with raised_as(UsageError, impossible, UsageError):
            secure_total.check(settings.algorithm, task, settings.shape, config.clients, config.augment)
    return settings


def _private(settings: Settings) -> Settings:
    """The settings with clipped and noised uploads; UsageError if no epsilon would hold."""
    config, task, algorithm = settings.config, settings.task, settings.algorithm
    blank = blank_samples(task, settings.shape)
    check_sums(algorithm, task, example_output(algorithm, task, blank, config.augment, 2).upload)
    private = SecretNoise(
        algorithm,
        clients=config.clients,
        taking_part=config.selected,
        clip=config.privacy_clip,
        noise=config.privacy,
        delta=config.privacy_delta,
    )
    with torch.no_grad():  # it refuses algorithms that send more than weights
        example_output(private, task, blank, config.augment, config.clients)
    return dataclasses.replace(settings, algorithm=private)


def _scale(config: RunConfig, targets: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each target. As those of channels, never computed from a node's samples."""
    given = {"target-mean": config.target_mean, "target-std": config.target_std}
    mean, std = (_numbers(key, text, float) if text else () for key, text in given.items())
    if len(mean) != len(std) or len(mean) not in (0, targets):
        raise UsageError(f"target-mean and target-std must have a number for each of {targets} targets")
    return mean, std


def _public(path: str, shape: tuple[int, ...]) -> Tensor:
    arrays = npz_arrays(Path(path).expanduser())
    if "x" not in arrays or tuple(arrays["x"].shape[1:]) != shape:
        raise DataError(f"public={path} must hold an array x of samples {list(shape)}")
    return torch.from_numpy(arrays["x"])


def _numbers(key: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        whole = "whole " if kind is int else ""
        raise UsageError(f'{key}="{text}" must be {whole}numbers separated by commas') from error


def _channels(key: str, text: str, shape: tuple[int, ...]) -> tuple[float, ...]:
    """A number per channel. Never computed from a node's samples: all nodes must use the same numbers."""
    channels = shape[0] if len(shape) == 3 else 0
    numbers = _numbers(key, text, float) if text else (0.5,) * channels
    if channels and len(numbers) != channels:
        raise UsageError(f'{key}="{text}" has {len(numbers)} numbers, but samples have {channels} channels')
    return numbers if channels else ()
