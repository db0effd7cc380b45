"""What a node measures of its models on its own samples. What the validation samples give never leaves it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.core.algorithm import AnyAlgorithm
from copfl.core.evaluation import EVAL_MODELS, VALIDATED, VALIDATION_LOSS, EvalModels, evaluate, measured
from copfl.core.metrics import MetricInfo
from copfl.core.selection import BestRounds
from copfl.core.task import Data, Personal, Task
from copfl.experiment.bundle.description import TEST, VALIDATION, Score


class MeasuredModels(NamedTuple):
    """The metrics of a client's models; empty where a round is not evaluated."""

    tested: dict[str, Tensor]
    validated: dict[str, Tensor]  # of the model after training, under the same names as in a simulation


def measure(
    algorithm: AnyAlgorithm,
    task: Task,
    client: Any,
    down: Any,
    after: Any,
    trained: Personal,
    test: Data,
    validation: Data | None,
    models: EvalModels = EVAL_MODELS["all"],
) -> MeasuredModels:
    """The metrics of a client's models, see `core.evaluation.evaluate`."""
    found = evaluate(algorithm, task, client, down, after, trained, test, models, validation)
    rows = {name: value.unsqueeze(0) for name, value in found.items()}
    targets = [[split.y[: int(split.size)]] for split in (test, validation) if split is not None]
    values = measured(task, rows, *targets)
    validated = {name for name in values if name.endswith(VALIDATED) or name == VALIDATION_LOSS}
    return MeasuredModels(
        {name: value for name, value in values.items() if name not in validated},
        {name: values[name] for name in validated},
    )


def validation_score(metric: MetricInfo, found: MeasuredModels | None) -> float:
    """The metric of a model on the validation samples; nan where there is none."""
    value = None if found is None else found.validated.get(f"{metric.name}{VALIDATED}")
    return math.nan if value is None else float(value)


def is_best(metric: MetricInfo, found: MeasuredModels, kept: float) -> bool:
    """Whether a round is the best so far, by the rule of the simulation.

    Args:
        metric: The primary one.
        found: Of this round.
        kept: The metric of the best round before it on the validation samples; nan: there is none.
    """
    unknown = {f"{metric.name}{VALIDATED}": math.nan, VALIDATION_LOSS: math.nan, "healthy": 1.0}
    values = unknown | {name: float(value) for name, value in (found.tested | found.validated).items()}
    best, client = BestRounds.none_of(metric, 1), np.zeros(1, np.int64)
    best.values[client] = kept
    return bool(best.replaced(client, {name: np.array([value]) for name, value in values.items()})[0])


def scores_of(
    metrics: Sequence[MetricInfo], found: MeasuredModels, test: Data, validation: Data | None = None
) -> list[Score]:
    """The metrics of the model after training, as its bundle has them."""
    splits = [(TEST, "", found.tested, test)]
    splits += [] if validation is None else [(VALIDATION, VALIDATED, found.validated, validation)]
    return [
        Score(metric.name, split, float(values[f"{metric.name}{suffix}"]), int(samples.size))
        for split, suffix, values, samples in splits
        for metric in metrics
        if torch.isfinite(values.get(f"{metric.name}{suffix}", torch.tensor(math.nan))).all()
    ]
