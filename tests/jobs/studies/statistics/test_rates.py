"""Intervals have the truth in them, and rows that are equally good are seldom called different: by simulation."""

from __future__ import annotations

import pytest

from studies.statistics.rates import CLIENTS, MODELS, OWN, SEEDS, alternative, coverage, false_positives
from tests.slow import slow

ERROR = 0.015  # three standard errors of a rate of 0.95 in 2000 draws


@pytest.mark.parametrize("model", ["clients", "seeds", "all", OWN])
def test_an_interval_covers_the_truth_in_95_of_100_comparisons(model: str) -> None:
    assert coverage(5, 3, model, 400) >= 0.95 - 0.033


def test_a_generalised_interval_is_no_narrower_where_clients_and_seeds_are_few() -> None:
    found = alternative(2, 2, "all", 300)
    assert found.covered >= 0.95 - 0.038
    assert found.width > 1.1
    alone = alternative(5, 5, "clients", 300)
    assert (alone.covered, alone.width) == pytest.approx((alone.covered_by_copfls, 1.0), abs=0.04)


@slow
@pytest.mark.parametrize("model", [*MODELS, OWN])
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("clients", CLIENTS)
def test_an_interval_covers_the_truth_however_many_clients_and_seeds(
    clients: int, seeds: int, model: str
) -> None:
    rate = coverage(clients, seeds, model)
    assert rate >= 0.95 - ERROR
    if model in ("clients", "seeds", OWN):  # else few of both make it wider than it must be
        assert rate <= 0.97


@pytest.mark.parametrize("same_clients", [True, False])
def test_of_rows_without_a_difference_none_is_called_different(same_clients: bool) -> None:
    found = false_positives(7, 5, 3, 60, same_clients)
    assert found.corrected <= min(found.by_row, 0.05 + 0.085)


@slow
@pytest.mark.parametrize("same_clients", [True, False])
@pytest.mark.parametrize(("clients", "seeds"), [(2, 2), (4, 3), (10, 5), (30, 10)])
def test_the_family_wise_error_is_5_percent_at_most(clients: int, seeds: int, same_clients: bool) -> None:
    assert false_positives(7, clients, seeds, same_clients=same_clients).corrected <= 0.05 + 0.033
