"""The rivals of one site, from its own rows alone."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from copfl.core.metrics import METRICS, Metric
from copfl.data.samples import CLASSIFICATION, MULTILABEL, NEXT_TOKEN
from copfl.rivals import estimators
from copfl.rivals.effort import Effort
from copfl.rivals.estimators import Answers, Problem
from copfl.rivals.records import BOOSTED, CONSTANT, FOREST, LINEAR, Array, Rival, SiteRows

LEAST = 1e-15  # probability of the right class that the log loss takes at least


def _log_loss(predictions: Array, targets: Array) -> float:
    """The mean negative logarithm of the probability of the right class, or of each label."""
    if targets.ndim == 1:
        right = predictions[np.arange(len(targets)), targets]
    else:
        right = np.where(targets > 0.5, predictions, 1 - predictions)
    return float(-np.log(np.clip(right, LEAST, 1)).mean())


LOG_LOSS = Metric("log_loss", False, False, (CLASSIFICATION, MULTILABEL), _log_loss)


def judged_by(kind: str, metrics: tuple[Metric, ...]) -> tuple[Metric, ...]:
    """The metrics of rivals: those of the run and, where there are classes, log loss and AUC."""
    more = (METRICS.get("log_loss", LOG_LOSS), METRICS["auc"])
    named = {metric.name for metric in metrics}
    return (*metrics, *(metric for metric in more if kind in metric.kinds and metric.name not in named))


def site_rivals(
    rows: SiteRows, kind: str, classes: int, metric: Metric, effort: Effort, seed: int
) -> dict[str, Rival]:
    """Each kind of model by its name, the simplest first, trained on the site's training rows.

    The targets of the test rows are not used.

    Args:
        rows: The site's; at least one to train on.
        kind: Of the task; not next_token.
        classes: Their number, of a classification.
        metric: The primary one.
        effort: See `effort_of`.
        seed: Of the folds and the trees.
    """
    if kind == NEXT_TOKEN:
        raise ValueError("there are no rivals for the next token")
    models: dict[str, Callable[[Problem], Answers]] = {
        CONSTANT: estimators.constant,
        LINEAR: lambda problem: estimators.linear(problem, effort.penalties),
        FOREST: lambda problem: estimators.forest(problem, effort.forest),
        BOOSTED: lambda problem: estimators.boosted(problem, effort.boosted),
    }
    wanted = {CONSTANT: 1, LINEAR: len(effort.penalties), FOREST: effort.forest, BOOSTED: effort.boosted}
    rivals = {}
    with estimators.quietly():
        for name, model in models.items():
            if wanted[name]:
                problems = _problems(rows, kind, classes, seed)
                answers = _joined([model(problem) for problem in problems], rows.y, kind)
                rivals[name] = Rival(_validated(metric, answers.validated, rows.y), answers.tested)
    return rivals


def _problems(rows: SiteRows, kind: str, classes: int, seed: int) -> list[Problem]:
    """One for each column of targets: a label has two classes, 0 and 1."""
    if kind == CLASSIFICATION:
        return [Problem(rows.x, rows.y, rows.x_test, classes, seed, rows.unit)]
    columns = np.asarray(rows.y, np.float64).reshape(len(rows.y), -1).T
    if kind == MULTILABEL:
        return [Problem(rows.x, (y > 0.5).astype(np.int64), rows.x_test, 2, seed, rows.unit) for y in columns]
    return [Problem(rows.x, y, rows.x_test, 0, seed, rows.unit) for y in columns]


def _joined(answers: list[Answers], y: Array, kind: str) -> Answers:
    """The answers of all columns of targets, in the shape of the targets; of classes the probabilities."""
    if kind == CLASSIFICATION:
        return answers[0]

    def joined(columns: list[Array]) -> Array:
        of_rows = np.stack([column[:, 1] if kind == MULTILABEL else column for column in columns], axis=-1)
        return of_rows.reshape(len(of_rows), *y.shape[1:])

    return Answers(joined([a.validated for a in answers]), joined([a.tested for a in answers]))


def _validated(metric: Metric, answers: Array, y: Array) -> float:
    """The metric of the answers to the training rows that have one."""
    known = ~np.isnan(answers).reshape(len(y), -1).any(1)
    return metric.of(answers[known], y[known]) if known.any() else math.nan


def values_on(rivals: Mapping[str, Rival], metric: Metric, y_test: Array) -> dict[str, float]:
    """The metric of each rival on the test rows."""
    return {name: metric.of(rival.answers, y_test) for name, rival in rivals.items()}
