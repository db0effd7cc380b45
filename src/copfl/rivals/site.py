"""The rivals of one site, from its own rows alone.

`experiment.rivals` calls it for each site.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from copfl.data.samples import CLASSIFICATION, MULTILABEL, NEXT_TOKEN, SURVIVAL
from copfl.measures.losses import row_losses
from copfl.measures.metrics import METRICS, Metric
from copfl.rivals import estimators
from copfl.rivals.effort import Effort
from copfl.rivals.estimators import Answers, Problem
from copfl.rivals.records import BOOSTED, CONSTANT, FOREST, LINEAR, Array, Rival, SiteRows
from copfl.rivals.survival import survival_rivals
from copfl.stats import mean_of_known


def judged_by(kind: str, metrics: tuple[Metric, ...]) -> tuple[Metric, ...]:
    """The metrics of rivals: the run's and, where there are classes, log loss and AUC."""
    more = (METRICS["log_loss"], METRICS["auc"])
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
        seed: Of the run, see `estimators.seed_of_site`.
    """
    if kind == NEXT_TOKEN:
        raise ValueError("there are no rivals for the next token")
    seed = estimators.seed_of_site(seed, rows.y)
    if kind == SURVIVAL:
        return survival_rivals(rows, metric, effort.penalties, seed)
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
                answers = [model(problem) for problem in _problems(rows, kind, classes, seed)]
                validated = _joined([of_column.validated for of_column in answers], rows.y, kind)
                tested = _joined([of_column.fitted(rows.x_test) for of_column in answers], rows.y, kind)
                fitted = tuple(of_column.fitted for of_column in answers)
                loss = float(mean_of_known(row_losses(validated, rows.y, kind)))
                rivals[name] = Rival(_validated(metric, validated, rows.y), tested, validated, fitted, loss)
    return rivals


def _problems(rows: SiteRows, kind: str, classes: int, seed: int) -> list[Problem]:
    """One for each column of targets: a label has two classes, 0 and 1."""
    unit = rows.unit
    if unit is not None and len(np.unique(unit)) == len(unit):
        unit = None
    if kind == CLASSIFICATION:
        return [Problem(rows.x, rows.y, classes, seed, unit)]
    columns = np.asarray(rows.y, np.float64).reshape(len(rows.y), -1).T
    if kind == MULTILABEL:
        return [Problem(rows.x, (y > 0.5).astype(np.int64), 2, seed, unit) for y in columns]
    return [Problem(rows.x, y, 0, seed, unit) for y in columns]


def _joined(columns: list[Array], y: Array, kind: str) -> Array:
    """The answers of all columns of targets, in the shape of the targets; of classes the probabilities."""
    if kind == CLASSIFICATION:
        return columns[0]
    of_rows = np.stack([column[:, 1] if kind == MULTILABEL else column for column in columns], axis=-1)
    return np.asarray(of_rows.reshape(len(of_rows), *y.shape[1:]))


def _validated(metric: Metric, answers: Array, y: Array) -> float:
    """The metric of the answers to the training rows that have one."""
    known = ~np.isnan(answers).reshape(len(y), -1).any(1)
    return metric.of(answers[known], y[known]) if known.any() else math.nan


def values_on(rivals: Mapping[str, Rival], metric: Metric, y_test: Array) -> dict[str, float]:
    """The metric of each rival on the test rows."""
    return {name: metric.of(rival.answers, y_test) for name, rival in rivals.items()}
