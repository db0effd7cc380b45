"""The best rival, by hand: ties, unknown values, and metrics that are better when low."""

import numpy as np

from copfl.measures.metrics import METRICS
from copfl.rivals.choice import best_of, best_of_sites

ACCURACY, RMSE = METRICS["accuracy"], METRICS["rmse"]


def test_the_best_by_its_value() -> None:
    assert best_of({"constant": 0.5, "linear": 0.7, "forest": 0.6}, ACCURACY) == "linear"
    assert best_of({"constant": 0.5, "linear": 0.7, "forest": 0.6}, RMSE) == "constant"


def test_of_equals_the_simplest() -> None:
    assert best_of({"constant": 0.7, "linear": 0.7, "forest": 0.7}, ACCURACY) == "constant"
    assert best_of({"constant": 0.5, "linear": 0.7, "forest": 0.7 + 1e-12}, ACCURACY) == "linear"


def test_what_is_not_known_is_never_best() -> None:
    assert best_of({"constant": np.nan, "linear": 0.1}, ACCURACY) == "linear"
    assert best_of({"constant": 0.1, "linear": np.nan}, RMSE) == "constant"
    assert best_of({"constant": np.nan, "linear": np.nan}, ACCURACY) == "constant"


def test_the_best_of_sites_is_by_the_mean_over_those_that_know_all() -> None:
    values = {"linear": np.array([0.9, 0.5, np.nan]), "forest": np.array([0.6, 0.7, 1.0])}
    assert best_of_sites(values, ACCURACY) == "linear"  # 0.7 against 0.65 at the first two
    assert best_of_sites(values, RMSE) == "forest"
    assert best_of_sites({name: np.full(3, np.nan) for name in values}, ACCURACY) == "linear"
