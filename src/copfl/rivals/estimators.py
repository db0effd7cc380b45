"""The models of the rivals: each answers the test rows, and its own training rows without having seen them.

Answers are probabilities [n, classes], or values [n]. scikit-learn is imported by the functions, as that takes
a second.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from copfl.rivals.effort import BAG, FOLDS, LEAF, VALIDATED_ROWS
from copfl.rivals.records import Array

RIDGE = tuple(
    np.logspace(-2, 4, 7).tolist()
)  # penalties of a ridge regression, chosen by leaving one row out
STEPS = 1_000  # of the solver of a logistic regression at most
STEP = 10.0  # learning rate of boosted trees times their number: scikit-learn's 0.1 of 100 trees


class Problem(NamedTuple):
    """One column of targets, and what answers it."""

    x: Any
    y: Array  # [n], classes as whole numbers or values
    x_test: Any
    classes: int  # 0: values
    seed: int
    unit: Array | None = None  # of the training rows, as of `SiteRows`


class Answers(NamedTuple):
    validated: Array  # of the training rows, by models that did not see them
    tested: Array


Fit = Callable[[Any, Array, Any], Array]  # training x and y, and the x that is answered


def constant(problem: Problem) -> Answers:
    """The frequency of each class, or the mean."""
    return _cross_validated(problem, lambda x, y, asked: _mean(y, problem.classes, asked.shape[0]))


def linear(problem: Problem, penalties: Sequence[float]) -> Answers:
    """A logistic regression whose penalty the cross-validation chooses by log loss, or a ridge regression."""
    from sklearn.linear_model import LogisticRegression, RidgeCV

    if not problem.classes:
        return _cross_validated(problem, _fit_of(lambda x: _scaled(x, RidgeCV(RIDGE)), 0), VALIDATED_ROWS)
    found: list[tuple[float, Answers]] = []
    for penalty in penalties:
        model = LogisticRegression(C=penalty, max_iter=STEPS)
        fit = _fit_of(partial(_scaled, model=model), problem.classes)
        validated = _out_of_fold(problem, fit, VALIDATED_ROWS)
        known = np.flatnonzero(~np.isnan(validated).any(1))
        right = validated[known, problem.y[known]]
        loss = float(-np.log(np.maximum(right, 1e-9)).mean()) if len(known) else 0.0
        if not found or loss < found[0][0]:
            found = [(loss, Answers(validated, fit(problem.x, problem.y, problem.x_test)))]
    return found[0][1]


def forest(problem: Problem, trees: int) -> Answers:
    """A random forest; its rows out of the bag are the cross-validation."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    if _is_constant(problem.y) or not problem.x_test.shape[0]:
        return constant(problem)
    if problem.unit is not None:  # rows out of the bag belong together with rows in it
        kind = RandomForestClassifier if problem.classes else RandomForestRegressor
        settled = {"random_state": problem.seed % 2**32, "n_jobs": 1}
        return _cross_validated(problem, _fit_of(lambda x: kind(trees, **settled), problem.classes))
    how: dict[str, Any] = {"oob_score": True, "random_state": problem.seed % 2**32, "n_jobs": 1}
    how["max_samples"] = BAG if len(problem.y) > BAG else None
    if not problem.classes:
        shift = problem.y.min() - 1  # so that 0 is no answer, but that of a row which is in every bag
        model = RandomForestRegressor(trees, **how).fit(problem.x, problem.y - shift)
        out_of_bag = np.where(model.oob_prediction_ > 0, model.oob_prediction_ + shift, np.nan)
        return Answers(out_of_bag, model.predict(problem.x_test) + shift)
    model = RandomForestClassifier(trees, **how).fit(problem.x, problem.y)
    prior = _mean(problem.y, problem.classes, 1)

    def smoothed(votes: Array) -> Array:
        """With the frequencies of the classes as one more tree, so that no probability is 0 by chance."""
        whole = np.zeros((len(votes), problem.classes))
        whole[:, model.classes_] = np.nan_to_num(votes)
        return np.asarray((trees * whole + prior) / (trees * whole.sum(1, keepdims=True) + 1))

    return Answers(smoothed(model.oob_decision_function_), smoothed(model.predict_proba(problem.x_test)))


def boosted(problem: Problem, trees: int) -> Answers:
    """Boosted trees by histograms; of fewer rows than two leaves have, that is the constant answer."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind = HistGradientBoostingClassifier if problem.classes else HistGradientBoostingRegressor
    if len(problem.y) < 2 * LEAF:
        return constant(problem)
    how = {"learning_rate": STEP / trees, "early_stopping": False, "random_state": problem.seed % 2**32}
    return _cross_validated(problem, _fit_of(lambda x: kind(max_iter=trees, **how), problem.classes))


def quietly() -> AbstractContextManager[None]:
    """In which scikit-learn uses one thread, and does not warn: a bad model has bad numbers."""
    from sklearn import config_context
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    stack = ExitStack()
    stack.enter_context(threadpool_limits(1))
    # Our numbers are finite and our options valid; to check them takes half of the time of a small site.
    stack.enter_context(config_context(skip_parameter_validation=True, assume_finite=True))
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    return stack  # type: ignore[return-value]


def folds_of(y: Array, classes: int, seed: int, unit: Array | None = None) -> Array:
    """The fold of each row, from 0; the rows of a class are spread over the folds.

    Args:
        y: The targets.
        classes: Their number; 0: values.
        seed: Of the order.
        unit: Rows with the same number are in one fold; its target is that of its first row. None: each is alone.
    """
    if unit is not None:
        first, member = np.unique(unit, return_index=True, return_inverse=True)[1:]
        return folds_of(y[first], classes, seed)[member]
    order = np.random.default_rng(seed % 2**32).permutation(len(y))
    if classes:
        order = order[np.argsort(y[order], kind="stable")]
    folds = np.empty(len(y), np.int64)
    folds[order] = np.arange(len(y)) % FOLDS
    return folds


def _cross_validated(problem: Problem, fit: Fit, most: int | None = None) -> Answers:
    return Answers(_out_of_fold(problem, fit, most), fit(problem.x, problem.y, problem.x_test))


def _out_of_fold(problem: Problem, fit: Fit, most: int | None = None) -> Array:
    """The answer to each training row of a model that was trained on the other folds; nan: it has none.

    Args:
        problem: The rows.
        fit: Trains and answers.
        most: Rows that are used, evenly spaced; None: all.
    """
    x, y, classes = problem.x, problem.y, problem.classes
    answers = np.full((len(y), classes) if classes else (len(y),), np.nan)
    used = np.arange(len(y))
    if most is not None and len(y) > most:
        used = np.linspace(0, len(y) - 1, most).astype(np.int64)
    folds = folds_of(y[used], classes, problem.seed, None if problem.unit is None else problem.unit[used])
    for fold in np.unique(folds).tolist() if len(used) > 1 else ():
        inside, outside = used[folds != fold], used[folds == fold]
        answers[outside] = fit(x[inside], y[inside], x[outside])
    return answers


def _fit_of(model_of: Callable[[Any], Any], classes: int) -> Fit:
    """Trains what `model_of` makes for these x; of targets that do not differ, the constant answer."""

    def fit(x: Any, y: Array, asked: Any) -> Array:
        if _is_constant(y) or not asked.shape[0]:
            return _mean(y, classes, asked.shape[0])
        model = model_of(x).fit(x, y)
        if not classes:
            return np.asarray(model.predict(asked), np.float64)
        answers = np.zeros((asked.shape[0], classes))
        answers[:, model.classes_] = model.predict_proba(asked)
        return answers

    return fit


def _is_constant(y: Array) -> bool:
    return len(y) < 3 or bool((y == y[0]).all())


def _mean(y: Array, classes: int, asked: int) -> Array:
    """The constant answer, once for each row that is asked."""
    answer = (
        np.bincount(y, minlength=classes) / len(y) if classes else np.asarray(np.mean(y, dtype=np.float64))
    )
    return np.repeat(answer[None], asked, axis=0)


def _scaled(x: Any, model: Any) -> Any:
    """The model behind a scaling of its columns; of counts of words, TF-IDF."""
    from scipy.sparse import issparse
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(TfidfTransformer(sublinear_tf=True) if issparse(x) else StandardScaler(), model)
