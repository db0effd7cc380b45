"""The models of the rivals: each answers any row, and its own training rows without having seen them.

Answers are probabilities [n, classes], or values [n]. scikit-learn is imported by the functions, as that takes
a second.
"""

import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from copfl.measures.calibration import frequencies
from copfl.measures.metrics import surprises
from copfl.rivals.effort import BAG, FOLDS, LEAF, VALIDATED_ROWS
from copfl.rivals.records import Array

RIDGE = tuple(
    np.logspace(-2, 4, 7).tolist()
)  # penalties of a ridge regression, chosen by leaving one row out
STEPS = 1_000  # of the solver of a logistic regression at most
PARTS = (0.05, 0.1, 0.2, 0.4, 1.0)  # of the boosted trees, among which the cross-validation chooses, and none
STEP = 10.0  # learning rate of boosted trees times their number: scikit-learn's 0.1 of 100 trees


class Problem(NamedTuple):
    """One column of targets, and what answers it."""

    x: Any
    y: Array  # [n], classes as whole numbers or values
    classes: int  # 0: values
    seed: int
    unit: Array | None = None  # of the training rows, as of `SiteRows`


class Fitted(NamedTuple):
    """A trained model, as a function from x to answers."""

    constant: Array  # [classes], their frequencies; or the mean []
    model: Any = None  # of scikit-learn; None: it answers with the constant
    # Trees of a random forest of classes, to which the frequencies are added as one more; 0: of no forest.
    votes: int = 0

    def __call__(self, x: Any) -> Array:
        if self.model is None or not x.shape[0]:
            return np.repeat(self.constant[None], x.shape[0], axis=0)
        if not self.constant.ndim:
            return np.asarray(self.model.predict(x), np.float64)
        return self.completed(self.model.predict_proba(x))

    def completed(self, probabilities: Array) -> Array:
        """With classes that are not in the training rows; a forest's are never 0 by chance."""
        answers = np.zeros((len(probabilities), len(self.constant)))
        answers[:, self.model.classes_] = probabilities
        if self.votes:
            return np.asarray((self.votes * answers + self.constant) / (self.votes + 1))
        absent = np.setdiff1d(np.arange(len(self.constant)), self.model.classes_)
        answers *= 1 - self.constant[absent].sum()
        answers[:, absent] = self.constant[absent]
        return answers


class Answers(NamedTuple):
    validated: Array  # of the training rows, by models that did not see them; nan: there is none
    fitted: Fitted  # on all training rows


def load() -> None:
    """Imports what the models are made of, so that they can be read from another process."""
    import sklearn.ensemble
    import sklearn.linear_model
    import sklearn.pipeline  # noqa: F401


Fit = Callable[[Any, Array], Fitted]  # of training x and y


def constant(problem: Problem) -> Answers:
    """The frequency of each class, or the mean."""
    return _cross_validated(problem, lambda x, y: Fitted(_constant(y, problem.classes)))


def linear(problem: Problem, penalties: Sequence[float]) -> Answers:
    """A logistic regression whose penalty the cross-validation chooses by log loss, or a ridge regression."""
    from sklearn.linear_model import RidgeCV

    if not problem.classes:
        return _cross_validated(
            problem, _fit_of(lambda x, y: _scaled(x, RidgeCV(RIDGE)).fit(x, y), 0), VALIDATED_ROWS
        )
    if not penalties:
        raise ValueError("there is no penalty")
    fits = [_fit_of(partial(_logistic, penalty=penalty), problem.classes) for penalty in penalties]
    answers = np.stack([_out_of_fold(problem, fit, VALIDATED_ROWS) for fit in fits])
    known = np.flatnonzero(~np.isnan(answers[0]).any(1))
    losses = np.stack([surprises(answer[known], problem.y[known]) for answer in answers])
    unit = None if problem.unit is None else problem.unit[known]
    validated, best = _by_other_folds(answers, losses, known, folds_of(len(known), problem.seed, unit))
    return Answers(validated, fits[best](problem.x, problem.y))


def _by_other_folds(answers: Array, losses: Array, known: Array, folds: Array) -> tuple[Array, int]:
    """The answers of the setting that the other folds choose, so that a row's own target has no say; and the best one.

    Args:
        answers: [settings, n, ...], of models that did not see the row.
        losses: [settings, known].
        known: The rows that have answers.
        folds: [known].
    """
    validated = answers[0].copy()
    for fold in np.unique(folds).tolist():
        others = losses[:, folds != fold]
        best = int(others.mean(1).argmin()) if others.size else 0
        validated[known[folds == fold]] = answers[best][known[folds == fold]]
    return validated, int(losses.mean(1).argmin()) if len(known) else 0


def _logistic(x: Any, y: Array, penalty: float) -> Any:
    """A logistic regression behind a scaling, in the space of its rows where these are fewer than its columns.

    Its coefficients are sums of rows, so nothing else could lower its loss; images have more numbers than a site has
    rows.
    """
    from scipy.sparse import issparse
    from sklearn.linear_model import LogisticRegression

    pipeline = _scaled(x, LogisticRegression(C=penalty, max_iter=STEPS))
    if issparse(x) or x.shape[1] <= x.shape[0]:
        return pipeline.fit(x, y)
    scaler, model = (step for _, step in pipeline.steps)
    scaled = scaler.fit_transform(x)
    basis = np.linalg.svd(scaled, full_matrices=False)[2]  # [rows, columns]
    model.fit(scaled @ basis.T, y)
    model.coef_, model.n_features_in_ = model.coef_ @ basis, x.shape[1]
    return pipeline


def forest(problem: Problem, trees: int) -> Answers:
    """A random forest; its rows out of the bag are the cross-validation.

    Args:
        problem: The rows of a site.
        trees: How many it has.
    """
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    if _is_constant(problem.y):
        return constant(problem)
    if problem.unit is not None:  # rows out of the bag belong together with rows in it
        kind = RandomForestClassifier if problem.classes else RandomForestRegressor
        settled = {"random_state": problem.seed % 2**32, "n_jobs": 1}
        votes = trees if problem.classes else 0
        return _cross_validated(
            problem, _fit_of(lambda x, y: kind(trees, **settled).fit(x, y), problem.classes, votes)
        )
    how: dict[str, Any] = {"oob_score": True, "random_state": problem.seed % 2**32, "n_jobs": 1}
    how["max_samples"] = BAG if len(problem.y) > BAG else None
    usual = _constant(problem.y, problem.classes)
    if not problem.classes:
        # So that 0 is no answer, but that of a row which is in every bag.
        shift = problem.y.min() - 1
        model = RandomForestRegressor(trees, **how).fit(problem.x, problem.y - shift)
        out_of_bag = np.where(model.oob_prediction_ > 0, model.oob_prediction_ + shift, np.nan)
        return Answers(out_of_bag, Fitted(usual, Shifted(model, shift)))
    model = RandomForestClassifier(trees, **how).fit(problem.x, problem.y)
    fitted = Fitted(usual, model, trees)
    decided = model.oob_decision_function_  # nan of a row that is in every bag
    return Answers(fitted.completed(decided), fitted)


class Shifted(NamedTuple):
    """A regression of values minus a shift."""

    model: Any
    shift: float

    def predict(self, x: Any) -> Array:
        return np.asarray(self.model.predict(x) + self.shift)


def boosted(problem: Problem, trees: int) -> Answers:
    """Boosted trees by histograms, as many as the cross-validation rewards: often none, which is the constant answer.

    Of fewer rows than two leaves have, that is all that there is.

    Args:
        problem: The rows of a site.
        trees: The most that it has.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if len(problem.y) < 2 * LEAF:
        return constant(problem)
    kind = HistGradientBoostingClassifier if problem.classes else HistGradientBoostingRegressor
    how = {"learning_rate": STEP / trees, "early_stopping": False, "random_state": problem.seed % 2**32}
    x, y, folds = problem.x, problem.y, folds_of(len(problem.y), problem.seed, problem.unit)
    numbers = [0, *(count for part in PARTS if (count := round(part * trees)))]
    answers = np.full((len(numbers), len(y), *([problem.classes] if problem.classes else [])), np.nan)
    for fold in np.unique(folds).tolist():
        inside, outside = folds != fold, folds == fold
        usual = Fitted(_constant(y[inside], problem.classes))
        answers[:, outside] = usual(x[outside])
        if _is_constant(y[inside]):
            continue
        model = kind(max_iter=numbers[-1], **how).fit(x[inside], y[inside])
        stages = model.staged_predict_proba if problem.classes else model.staged_predict
        for count, answer in enumerate(stages(x[outside]), 1):
            if count in numbers:
                found = usual._replace(model=model).completed(answer) if problem.classes else answer
                answers[numbers.index(count), outside] = found
    losses = np.stack([surprises(a, y) if problem.classes else (a - y) ** 2 for a in answers])
    validated, best = _by_other_folds(answers, losses, np.arange(len(y)), folds)
    usual = Fitted(_constant(y, problem.classes))
    if not numbers[best] or _is_constant(y):
        return Answers(validated, usual)
    return Answers(validated, usual._replace(model=kind(max_iter=numbers[best], **how).fit(x, y)))


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


def folds_of(count: int, seed: int, unit: Array | None = None) -> Array:
    """The fold of each row, from 0, by chance.

    Classes are not spread evenly over the folds. With a few rows of a site that would tell the constant answer what
    it is tested on, and it would seem better than it is.

    Args:
        count: Of the rows.
        seed: Of the order.
        unit: Rows with the same number are in one fold. None: each is alone.
    """
    if unit is not None:
        kinds, member = np.unique(unit, return_inverse=True)
        return folds_of(len(kinds), seed)[member]
    folds = np.empty(count, np.int64)
    folds[np.random.default_rng(seed % 2**32).permutation(count)] = np.arange(count) % FOLDS
    return folds


def seed_of_site(seed: int, y: Array) -> int:
    """The seed of a site's folds and trees, which follows from its targets.

    With one seed, sites with as many rows would hold out the same places of their tables at once. Where rows are in
    order of time those are the same weeks everywhere, and no site would have the others' rows of them to learn from.

    Args:
        seed: Of the run.
        y: The targets of the site's training rows.
    """
    return zlib.crc32(np.ascontiguousarray(y, np.float64).tobytes(), seed % 2**32)


def _cross_validated(problem: Problem, fit: Fit, most: int | None = None) -> Answers:
    return Answers(_out_of_fold(problem, fit, most), fit(problem.x, problem.y))


def _out_of_fold(problem: Problem, fit: Fit, most: int | None = None) -> Array:
    """The answer to each training row of a model that was trained on the other folds; nan: it has none.

    Args:
        problem: The rows.
        fit: Trains.
        most: Rows that are used, evenly spaced; None: all.
    """
    x, y, classes = problem.x, problem.y, problem.classes
    answers = np.full((len(y), classes) if classes else (len(y),), np.nan)
    used = np.arange(len(y))
    if most is not None and len(y) > most:
        used = np.linspace(0, len(y) - 1, most).astype(np.int64)
    folds = folds_of(len(used), problem.seed, None if problem.unit is None else problem.unit[used])
    for fold in np.unique(folds).tolist() if len(used) > 1 else ():
        inside, outside = used[folds != fold], used[folds == fold]
        answers[outside] = fit(x[inside], y[inside])(x[outside])
    return answers


def _fit_of(fitted: Callable[[Any, Array], Any], classes: int, votes: int = 0) -> Fit:
    """Trains by `fitted`; of targets that do not differ, the constant answer."""

    def fit(x: Any, y: Array) -> Fitted:
        usual = _constant(y, classes)
        return Fitted(usual) if _is_constant(y) else Fitted(usual, fitted(x, y), votes)

    return fit


def _is_constant(y: Array) -> bool:
    return len(y) < 3 or bool((y == y[0]).all())


def _constant(y: Array, classes: int) -> Array:
    """The frequencies of the classes, or the mean."""
    return frequencies(y, classes) if classes else np.asarray(np.mean(y, dtype=np.float64))


def _scaled(x: Any, model: Any) -> Any:
    """The model behind a scaling of its columns; of words, TF-IDF."""
    from scipy.sparse import issparse
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(TfidfTransformer() if issparse(x) else StandardScaler(), model)
