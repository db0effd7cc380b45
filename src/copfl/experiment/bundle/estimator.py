"""A bundle as an estimator of scikit-learn, already fitted.

`Bundle.estimator` returns it.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

from copfl.data.samples import REGRESSION, SURVIVAL
from copfl.errors import UsageError
from copfl.experiment.bundle.bundle import Bundle, read_bundle


class BundleEstimator(BaseEstimator):  # type: ignore[misc]
    """The model of a bundle in a pipeline, a grid or a plot of scikit-learn; `fit` leaves it as it is.

    bundle   a Bundle, or the path of one
    missing  "fill": missing values of a table count as the column's mean, or as no category
    """

    def __init__(self, bundle: Any, missing: str | None = None) -> None:
        self.bundle = bundle
        self.missing = missing

    @property
    def _loaded(self) -> Bundle:
        if not isinstance(self.bundle, Bundle):
            self.bundle = read_bundle(self.bundle)
        return self.bundle

    def fit(self, X: Any = None, y: Any = None) -> Self:
        """Nothing: the model is trained, as with sklearn.frozen.FrozenEstimator."""
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    @property
    def n_features_in_(self) -> int:
        given = self._loaded.description.input
        return len(given.columns) or int(np.prod(next(iter(given.arrays.values())).shape))

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        columns = self._loaded.description.input.columns
        if not columns:
            raise AttributeError("feature_names_in_: the model does not take the columns of a table")
        return np.array([column.name for column in columns], dtype=object)

    def predict(self, X: Any) -> NDArray[Any]:
        """See Bundle.predict."""
        return self._loaded.predict(X, missing=self.missing)


class BundleClassifier(ClassifierMixin, BundleEstimator):  # type: ignore[misc]
    """The estimator of a model that predicts classes."""

    @property
    def classes_(self) -> NDArray[Any]:
        return self._loaded.classes

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """See Bundle.predict_proba."""
        return self._loaded.predict_proba(X, missing=self.missing)


class BundleRegressor(RegressorMixin, BundleEstimator):  # type: ignore[misc]
    """The estimator of a model that predicts values."""


def estimator_of(bundle: Bundle) -> BundleEstimator:
    """The estimator for the model's kind of predictions."""
    kind = bundle.description.output.kind
    if kind == "next_token":
        raise UsageError("scikit-learn has no estimator of a model that predicts the next token")
    if kind == SURVIVAL:
        raise UsageError(
            "scikit-learn has no estimator of survival; use predict, predict_survival and predict_median"
        )
    return BundleRegressor(bundle) if kind == REGRESSION else BundleClassifier(bundle)
