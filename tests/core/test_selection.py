"""The best round of each client, by hand."""

from __future__ import annotations

import math

import numpy as np

from copfl.core.selection import BestRounds, has_ended
from copfl.engine.rounds import Values
from copfl.measures.metrics import ACCURACY, METRICS, MetricInfo


def values(*numbers: float) -> Values:
    return np.array(numbers, np.float64)


def rounds_of(
    evaluations: list[tuple[list[int], list[float]]], metric: MetricInfo = ACCURACY, clients: int = 2
) -> BestRounds:
    """After these rounds: the clients that took part, and their validation values."""
    best = BestRounds.none_of(metric, clients)
    for number, (ids, found) in enumerate(evaluations, 1):
        ones = np.ones(len(ids))
        metrics = {"healthy": ones, "test_loss": ones, "validation_loss": ones}
        best.add(number, np.array(ids), metrics | {f"{metric.name}_validation": values(*found)})
    return best


def test_each_client_has_its_own_best_round() -> None:
    best = rounds_of([([0, 1], [0.5, 0.9]), ([0, 1], [0.7, 0.8]), ([0, 1], [0.6, 0.7])])
    assert best.rounds.tolist() == [2, 1]
    assert best.values.tolist() == [0.7, 0.9]


def test_of_equal_values_the_later_round_counts_but_is_no_improvement() -> None:
    best = rounds_of([([0, 1], [0.5, 0.9]), ([0, 1], [0.5, 0.8]), ([0, 1], [0.5, 0.9])])
    assert best.rounds.tolist() == [3, 3]
    assert best.unimproved == 2


def test_a_value_of_zero_is_a_value() -> None:
    assert rounds_of([([0], [0.0]), ([0], [math.nan])], clients=1).rounds.tolist() == [1]


def test_a_metric_that_is_better_when_low() -> None:
    best = rounds_of([([0, 1], [3.0, 1.0]), ([0, 1], [2.0, 2.0])], METRICS["rmse"])
    assert best.rounds.tolist() == [2, 1]


def test_one_client_that_improves_is_enough_to_go_on() -> None:
    assert rounds_of([([0, 1], [0.5, 0.5]), ([0, 1], [0.4, 0.4]), ([0, 1], [0.3, 0.6])]).unimproved == 0
    assert (
        rounds_of([([0], [0.5]), ([1], [0.1]), ([0], [0.5])]).unimproved == 1
    )  # the first value is an improvement


def test_without_a_validation_value_the_last_evaluation_counts() -> None:
    best = rounds_of([([0, 1], [math.nan, 0.5]), ([0, 1], [math.nan, 0.4])])
    assert best.rounds.tolist() == [2, 1]
    assert math.isnan(best.values[0])


def test_a_round_that_is_not_finite_never_counts() -> None:
    best = BestRounds.none_of(ACCURACY, 3)
    fine = {"healthy": np.ones(3), "test_loss": np.ones(3), "validation_loss": np.ones(3)}
    best.add(1, np.arange(3), fine | {"accuracy_validation": values(0.5, 0.5, math.nan)})
    diverged = {
        "healthy": values(0, 1, 1),
        "test_loss": values(1, math.nan, math.nan),
        "validation_loss": values(1, math.nan, math.nan),
    }
    best.add(2, np.arange(3), diverged | {"accuracy_validation": values(0.9, 0.9, math.nan)})
    assert best.rounds.tolist() == [1, 1, 1]


def test_a_round_without_an_evaluation_changes_nothing() -> None:
    best = BestRounds.none_of(ACCURACY, 1)
    best.add(1, np.arange(1), {"healthy": np.ones(1)})
    assert best.rounds.tolist() == [0]
    assert best.unimproved == 0


def test_a_run_ends_with_its_rounds_or_where_nobody_improved_for_long_enough() -> None:
    best = rounds_of([([0, 1], [0.5, 0.5]), ([0, 1], [0.4, 0.4]), ([0, 1], [0.4, 0.4])])
    assert best.unimproved == 2
    assert [has_ended(3, 9, best, patience) for patience in (0, 1, 2, 3)] == [False, True, True, False]
    assert has_ended(9, 9, best, 0)
    assert not has_ended(8, 9, None, 1)
