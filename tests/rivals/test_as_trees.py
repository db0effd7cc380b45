"""Models of scikit-learn as arrays: the same predictions, in the same vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.tree import DecisionTreeClassifier

from copfl.core import Task, task_of
from copfl.core.criteria import CRITERIA, regression
from copfl.errors import UsageError
from copfl.models.trees import Trees
from copfl.rivals.as_trees import as_trees

ROWS, COLUMNS = 200, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, COLUMNS)).round(1).astype(np.float32)  # many rows on a threshold
ASKED = RNG.normal(size=(60, COLUMNS)).round(1).astype(np.float32)
SCORE = X[:, 0] * X[:, 1] + X[:, 2] + 0.3 * RNG.normal(size=ROWS)
TWO, THREE = (SCORE > 0).astype(np.int64), np.digitize(SCORE, [-0.5, 0.5])
CLASSIFIERS = [
    DummyClassifier(),
    LogisticRegression(),
    make_pipeline(StandardScaler(), LogisticRegression(C=0.1)),
    DecisionTreeClassifier(max_depth=4),
    RandomForestClassifier(20, random_state=0),
    HistGradientBoostingClassifier(max_iter=15),
    make_pipeline(StandardScaler(), HistGradientBoostingClassifier(max_iter=5)),
]


def name_of(model: Any) -> str:
    return "-".join(type(step).__name__ for _, step in getattr(model, "steps", [("", model)]))


def answers(model: Trees, task: Task) -> np.ndarray[Any, Any]:
    """The predictions of the model as a vector, in the bare task of its shape."""
    tensors = dict(model.named_parameters())
    w = task.layout.join({name: tensors[name].detach() for name in task.layout.names})
    predicted = task.predict(w, torch.from_numpy(ASKED))
    return (predicted.exp() if task.criterion.kind == "classification" else predicted).numpy()


@pytest.mark.parametrize("y", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("model", CLASSIFIERS, ids=map(name_of, CLASSIFIERS))
def test_classes_have_its_probabilities(model: Any, y: Any) -> None:
    model.fit(X, y)
    module = as_trees(model, "classification", COLUMNS, 3)  # a class more than the rows may have
    expected = np.zeros((len(ASKED), 3))
    expected[:, model.classes_] = model.predict_proba(ASKED)
    assert answers(module, task_of(module, 3)) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    "model",
    [
        DummyRegressor(),
        Ridge(),
        make_pipeline(StandardScaler(), Ridge()),
        RandomForestRegressor(20, random_state=0),
        HistGradientBoostingRegressor(max_iter=15),
    ],
    ids=name_of,
)
def test_values_are_its_predictions(model: Any) -> None:
    model.fit(X, 50 + 10 * SCORE)
    scale = [(47.0, 9.0)]
    module = as_trees(model, "regression", COLUMNS, 1, scale=scale)
    task = task_of(module, 1, criterion=regression(mean=[47.0], std=[9.0]))
    assert answers(module, task)[:, 0] == pytest.approx(model.predict(ASKED), abs=1e-4)


@pytest.mark.parametrize("kind", [LogisticRegression, lambda: RandomForestClassifier(10, random_state=0)])
def test_labels_have_a_model_each(kind: Any) -> None:
    labels = np.stack([TWO, SCORE > 1], 1).astype(np.int64)
    models = [kind().fit(X, labels[:, n]) for n in range(2)]
    module = as_trees(models, "multilabel", COLUMNS, 2)
    expected = np.stack([model.predict_proba(ASKED)[:, 1] for model in models], 1)
    task = task_of(module, 2, criterion=CRITERIA["multilabel"]())
    assert answers(module, task) == pytest.approx(expected, abs=2e-6)


def test_a_forest_may_have_the_frequencies_as_one_more_tree() -> None:
    model = RandomForestClassifier(20, random_state=0).fit(X, TWO)
    prior = np.bincount(TWO) / ROWS
    module = as_trees(model, "classification", COLUMNS, 2, prior=prior.tolist())
    expected = (20 * model.predict_proba(ASKED) + prior) / 21
    assert answers(module, task_of(module, 2)) == pytest.approx(expected, abs=2e-6)


def test_more_room_changes_nothing() -> None:
    """So that models of several sites are vectors of one length."""
    model = RandomForestClassifier(5, random_state=0).fit(X, TWO)
    small = as_trees(model, "classification", COLUMNS, 2)
    large = small.resized(9, 300, 20)
    assert answers(large, task_of(large, 2)) == pytest.approx(answers(small, task_of(small, 2)), abs=1e-7)


def test_what_is_no_sum_of_trees_is_refused() -> None:
    model = KNeighborsClassifier().fit(X, TWO)
    with pytest.raises(UsageError, match="a KNeighborsClassifier cannot be told as trees"):
        as_trees(model, "classification", COLUMNS, 2)
    behind = make_pipeline(PolynomialFeatures(), LogisticRegression()).fit(X, TWO)
    with pytest.raises(UsageError, match="a PolynomialFeatures before a model is not known"):
        as_trees(behind, "classification", COLUMNS, 2)
