"""The models of the rivals: settings for small data, and images with more numbers than rows."""

from __future__ import annotations

import numpy as np
import pytest

from copfl.measures.metrics import surprises
from copfl.rivals import estimators
from copfl.rivals.estimators import Problem, boosted, constant


def rare(seed: int = 0, rows: int = 230) -> Problem:
    """A class of one row in ten, that the columns hardly tell."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6))
    y = (rng.random(rows) < 1 / (1 + np.exp(2.4 - 0.4 * x[:, 0]))).astype(np.int64)
    return Problem(x, y, 2, seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_boosted_trees_do_not_lose_to_the_constant_answer_on_a_rare_class(seed: int) -> None:
    problem = rare(seed)
    with estimators.quietly():
        ours, usual = (
            float(surprises(found.validated, problem.y).mean())
            for found in (boosted(problem, 100), constant(problem))
        )
    assert ours < 1.05 * usual


def test_where_columns_tell_the_target_there_are_boosted_trees() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    problem = Problem(x, np.where(x[:, 0] * x[:, 1] > 0, 3.0, 0.0) + 0.1 * rng.normal(size=200), 0, 0)
    with estimators.quietly():
        found, usual = boosted(problem, 100), constant(problem)
    assert found.fitted.model is not None
    assert ((found.validated - problem.y) ** 2).mean() < 0.5 * ((usual.validated - problem.y) ** 2).mean()


def test_a_linear_model_in_the_space_of_its_rows_is_the_same_model() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    x, y, new = rng.normal(size=(20, 300)), rng.integers(0, 3, 20), rng.normal(size=(5, 300))
    plain = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=5000, tol=1e-8)).fit(x, y)
    ours = estimators._logistic(x, y, 0.1)
    assert ours[-1].coef_.shape == (3, 300)
    assert ours.predict_proba(new) == pytest.approx(plain.predict_proba(new), abs=1e-3)
