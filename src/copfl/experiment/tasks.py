"""The objective and the metrics of a run, copfl's or the user's own.

`prepare` makes the task of a run with it, and a bundle again when it is loaded.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from copfl.core import tree
from copfl.core.criteria import CRITERIA, LOSSES, Criterion, with_losses
from copfl.core.evaluation import collected, on_host_arrays
from copfl.core.task import Data, Task, task_of
from copfl.data.samples import SURVIVAL, Dataset
from copfl.errors import UsageError
from copfl.measures.metrics import Metric, metric, usual_metrics
from copfl.settings import schema, user_code
from copfl.settings.checking import SettingError
from copfl.settings.user_code import calling


def build_task(
    task: schema.Task, kind: str, scale: tuple[Sequence[float], Sequence[float]] = ((), ())
) -> tuple[Criterion, tuple[Metric, ...]]:
    """The objective and the metrics.

    Args:
        task: The settings.
        kind: Of the targets, such as "classification".
        scale: Of numbers to predict, their means and deviations.
    """
    options, allowed = task.options, inspect.signature(CRITERIA[kind]).parameters
    if kind == "multilabel" and "class_weights" in options:
        options["label_weights"] = options.pop("class_weights")
    if wrong := sorted(options.keys() - set(allowed)):
        raise SettingError(
            f"task.{wrong[0]}", options[wrong[0]], f"is no option of a {kind} task; leave it out"
        )
    loss, code = task.loss or "", task.code
    if kind == "regression":
        options |= {"mean": scale[0], "std": scale[1]}
    if loss and not user_code.is_reference(loss):
        if loss not in LOSSES[kind]:
            known = ", ".join(LOSSES[kind])
            raise SettingError(
                "task.loss", loss, f"is not defined for {kind}; defined are {known} and mymodule:myfunction"
            )
        options |= {"loss": loss} if kind in ("regression", "survival") else {}
    criterion = CRITERIA[kind](**options)
    if user_code.is_reference(loss):
        criterion = with_losses(criterion, _function(loss, code))
    named = [metric_of(name, kind, code) for name in task.metrics]
    if twice := [m.name for m in named if [other.name for other in named].count(m.name) > 1]:
        raise UsageError(f'the metric "{twice[0]}" is named twice; name each metric once')
    return criterion, tuple(named) or usual_metrics(kind)


def with_intervals(dataset: Dataset, task: schema.Task) -> Dataset:
    """The data set with an output for each interval of discrete time, named by its end; any other one unchanged."""
    if dataset.kind != SURVIVAL or not task.cuts:
        return dataset
    return dataclasses.replace(dataset, classes=tuple(f"{cut:g}" for cut in task.cuts))


def learned_task(
    run: schema.Run,
    module: nn.Module,
    kind: str,
    outputs: int,
    channels: tuple[Sequence[float], Sequence[float]],
    scale: tuple[Sequence[float], Sequence[float]],
    device: torch.device | str = "cpu",
) -> Task:
    """What every client learns, in a simulation as in a federation.

    Args:
        run: The settings.
        module: The model.
        kind: Of the targets.
        outputs: Number of classes, labels, targets or tokens.
        channels: Means and deviations of the channels of images, which a pretrained model's own replace.
        scale: Of numbers to predict.
        device: Where the model is.
    """
    mean, std = getattr(module, "normalization", None) or channels
    criterion, metrics = build_task(run.task, kind, scale)
    if kind == SURVIVAL and outputs != (needed := len(criterion.cuts) or 1):
        raise SettingError(
            "samples.classes", outputs, f"must be {needed}, the outputs of this objective of survival"
        )
    return task_of(
        module,
        outputs,
        criterion=criterion,
        metrics=metrics,
        mean=mean if channels[0] else (),
        std=std if channels[1] else (),
        head=run.model.head,
        buffers=run.run.buffers,
        device=device,
        dtype=torch.float64 if run.run.precision == "fp64" else torch.float32,
    )


def metric_of(name: str, kind: str, code: str | None = None) -> Metric:
    """A metric by its name, or the user's function of predictions and targets, with its attributes.

    Args:
        name: Of copfl, or "module:attribute".
        kind: Of the targets.
        code: The hash of the module in training, see `named_code.digests`.
    """
    if not user_code.is_reference(name):
        return metric(name, kind)
    function = _function(name, code)
    return Metric(
        name.rpartition(":")[2].rpartition(".")[2],
        higher_is_better=bool(getattr(function, "higher_is_better", True)),
        fraction=bool(getattr(function, "fraction", False)),
        function=function,
    )


def _function(name: str, code: str | None) -> Callable[..., Any]:
    function = user_code.attribute("task", name, code)
    if not callable(function):
        raise UsageError(f'"{name}" is {type(function).__name__}; an objective or a metric is a function')
    return function  # type: ignore[no-any-return]


def check_task(settings: schema.Task, task: Task, data: Data) -> None:
    """The objective and the metrics on two samples, so that what does not fit fails before the run.

    Args:
        settings: The table [task].
        task: With the model.
        data: Of one client.
    """
    if not settings or not int(data.size):
        return
    two = Data(*tree.each(lambda t: t[:2], (data.x, data.y)), data.size.clamp(max=2))
    count, x = len(two.y), task.numbers(two.x)
    loss = settings.loss or task.criterion.kind

    def losses(w: Tensor) -> Tensor:
        outputs = task.forward(w, x)[0]
        found = task.criterion.losses(outputs, two.y)
        if not isinstance(found, Tensor) or found.shape != (count,) or not found.is_floating_point():
            shown = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(
                f'the objective "{loss}" returned {shown} for {count} samples; it must return one loss for '
                f"each, a float tensor [{count}]"
            )
        return found

    with torch.no_grad(), calling("objective", loss, "computing it for two samples of two clients"):
        found = torch.func.vmap(losses)(torch.stack([task.initial, task.initial]))
    if not torch.isfinite(found).all():
        raise UsageError(f'the objective "{loss}" is not finite for the initial weights: {found[0].tolist()}')
    with torch.no_grad():
        predictions = collected(task, task.scores(task.initial, two).predictions, two.y)
    for own in [one for one in task.metrics if not one.kinds]:
        with calling("metric", own.name, "computing it for two samples"):
            value = _number(own, *on_host_arrays(task, predictions, two.y))
        if not isinstance(value, float | int | np.number):
            raise UsageError(
                f'the metric "{own.name}" returned {type(value).__name__}; it must return a number for '
                "predictions and targets"
            )


def _number(own: Metric, predictions: Any, targets: Any) -> object:
    """The metric, or nan where it raises a ValueError, which means that these samples do not define it."""
    try:
        return own.function(predictions, targets)
    except ValueError:
        return math.nan
