"""What a node measures of its models on its own samples. What the validation samples give never leaves it.

`update` measures a round, `baseline` a round of training alone, with the same functions.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.core.algorithm import AnyAlgorithm
from copfl.core.evaluation import EVAL_MODELS, VALIDATED, VALIDATION_LOSS, EvalModels, evaluate, measured
from copfl.core.selection import BestRounds
from copfl.core.task import Data, Personal, Task
from copfl.experiment.bundle.description import TEST, VALIDATION, Score
from copfl.measures.metrics import MetricInfo


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
    """The metrics of a client's models, see `core.evaluation.evaluate`.

    Args:
        algorithm: The federation's.
        task: What is trained.
        client: The client's record before the round.
        down: The server's message.
        after: The client's record after the round.
        trained: The model after the training.
        test: The node's test samples.
        validation: Its samples that choose a round; None: it has none.
        models: Which models are measured.
    """
    evaluation = evaluate(algorithm, task, client, down, after, trained, test, models, validation)
    rows = {name: value.unsqueeze(0) for name, value in evaluation.items()}
    targets = [[split.y[: int(split.size)]] for split in (test, validation) if split is not None]
    values = measured(task, rows, *targets)
    validated = {name for name in values if name.endswith(VALIDATED) or name == VALIDATION_LOSS}
    return MeasuredModels(
        {name: value for name, value in values.items() if name not in validated},
        {name: values[name] for name in validated},
    )


def validation_score(metric: MetricInfo, measured: MeasuredModels | None) -> float:
    """The metric of a model on the validation samples; nan where there is none.

    Args:
        metric: The primary one.
        measured: The models of a round; None: there is no such round.
    """
    value = None if measured is None else measured.validated.get(f"{metric.name}{VALIDATED}")
    return math.nan if value is None else float(value)


def is_best(metric: MetricInfo, measured: MeasuredModels, best_before: float) -> bool:
    """Whether a round is the best so far, by the rule of the simulation.

    Args:
        metric: The primary one.
        measured: The models of this round.
        best_before: The metric of the best round before it on the validation samples; nan: there is none.
    """
    defaults = {f"{metric.name}{VALIDATED}": math.nan, VALIDATION_LOSS: math.nan, "healthy": 1.0}
    values = defaults | {name: float(value) for name, value in (measured.tested | measured.validated).items()}
    best, client = BestRounds.none_of(metric, 1), np.zeros(1, np.int64)
    best.values[client] = best_before
    return bool(best.replaced(client, {name: np.array([value]) for name, value in values.items()})[0])


def scores_of(
    metrics: Sequence[MetricInfo], measured: MeasuredModels, test: Data, validation: Data | None = None
) -> list[Score]:
    """The metrics of the model after training, as its bundle has them.

    Args:
        metrics: The federation's.
        measured: The models of a round.
        test: The node's test samples.
        validation: Its samples that choose a round; None: it has none.
    """
    splits = [(TEST, "", measured.tested, test)]
    splits += [] if validation is None else [(VALIDATION, VALIDATED, measured.validated, validation)]
    return [
        Score(metric.name, split, float(values[f"{metric.name}{suffix}"]), int(samples.size))
        for split, suffix, values, samples in splits
        for metric in metrics
        if torch.isfinite(values.get(f"{metric.name}{suffix}", torch.tensor(math.nan))).all()
    ]
