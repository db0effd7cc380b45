"""The choice among candidates by hand: the lowest mean over sites, and each site's exception."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from copfl.choosing.choice import choose, difference, is_worse, on_common_rows, site_losses
from copfl.experiment.choice import CHOICE

NAN = np.nan
ALONE = ("constant", "alone", "forest alone")


def test_the_lowest_mean_over_sites_is_chosen_and_of_equals_the_first() -> None:
    losses = {
        "constant": [np.array([1.0, 1.0]), np.array([1.0])],
        "levels": [np.array([0.2, 0.6]), np.array([0.8])],
        "alone": [np.array([0.4, 0.4]), np.array([0.8])],
    }
    choice = choose(losses, is_rmse=False, folds=5, alone=ALONE)
    assert choice.federation == "levels"
    assert choice.validated.means == pytest.approx({"constant": 1.0, "levels": 0.6, "alone": 0.6})
    assert choice.sites == ("levels", "levels")


def test_the_loss_of_a_site_is_a_mean_or_the_root_of_one_over_its_held_out_rows() -> None:
    rows = [np.array([9.0, 16.0, NAN]), np.array([NAN])]
    assert np.array_equal(site_losses(rows, is_rmse=False), [12.5, NAN], equal_nan=True)
    assert np.array_equal(site_losses(rows, is_rmse=True), [12.5**0.5, NAN], equal_nan=True)


def test_a_site_that_some_candidate_does_not_know_does_not_count() -> None:
    losses = {
        "constant": [np.array([1.0]), np.array([NAN])],
        "levels": [np.array([2.0]), np.array([0.0])],
    }
    assert choose(losses, is_rmse=False, folds=5, alone=ALONE).federation == "constant"


def test_a_site_departs_where_another_candidate_is_better_on_its_own_rows() -> None:
    rng = np.random.default_rng(0)
    good, bad = rng.uniform(0, 0.2, 50), rng.uniform(0.9, 1.1, 50)
    losses = {"levels": [good, good, good, bad], "forest alone": [bad, bad, bad, good]}
    choice = choose(losses, is_rmse=False, folds=5, alone=ALONE)
    assert choice.federation == "levels"
    assert choice.exceptions == {3: "forest alone"}


def test_a_site_departs_to_what_it_trains_alone_and_to_no_other_method() -> None:
    rng = np.random.default_rng(0)
    good, bad = rng.uniform(0, 0.2, 50), rng.uniform(0.9, 1.1, 50)
    losses = {"levels": [good, good, bad], "slopes": [bad, bad, good], "forest alone": [bad, bad, bad + 0.1]}
    assert choose(losses, is_rmse=False, folds=5, alone=ALONE).exceptions == {}
    losses["forest alone"] = [bad, bad, good]
    assert choose(losses, is_rmse=False, folds=5, alone=ALONE).exceptions == {2: "forest alone"}
    fixed = choose(losses, is_rmse=False, folds=5, alone=ALONE, without_exceptions=["levels"])
    assert fixed.exceptions == {}


def test_what_sites_train_alone_is_taken_only_if_it_is_better_by_a_standard_error() -> None:
    """One site, gains of .1 and .3 of each pair of losses: mean .2, standard error .1."""
    levels, alone = np.array([0.55, 0.65]), np.array([0.45, 0.35])
    assert choose({"levels": [levels], "alone": [alone]}, False, 5, alone=ALONE).federation == "alone"
    # Gains of -.3 and .5: mean .1, standard error .4.
    unlike = np.array([0.65, 0.25]), np.array([0.35, 0.75])
    losses = {"constant": [levels + 1], "levels": [unlike[1]], "slopes": [levels], "alone": [unlike[0]]}
    choice = choose(losses, False, 5, alone=ALONE)
    assert min(choice.validated.means, key=choice.validated.means.get) == "alone"  # type: ignore[arg-type]
    assert choice.federation == "levels"


def test_what_cannot_be_trained_is_compared_and_not_chosen() -> None:
    rng = np.random.default_rng(0)
    good, bad = rng.uniform(0, 0.2, 50), rng.uniform(0.9, 1.1, 50)
    losses = {"network": [bad, bad], "network alone": [bad, bad], "forest alone": [good, good]}
    choice = choose(losses, False, 3, alone=["network alone", "forest alone"], only_shown=["forest alone"])
    assert choice.federation == "network"
    assert choice.exceptions == {}
    assert choice.validated.means["forest alone"] < choice.validated.means["network"]


def test_candidates_are_compared_on_the_rows_that_all_were_tried_on() -> None:
    losses = {"levels": [np.array([1.0, 9.0])], "trees": [np.array([2.0, NAN])]}
    assert [rows[0].tolist()[:1] for rows in on_common_rows(losses).values()] == [[1.0], [2.0]]
    assert choose(losses, False, 5, alone=()).federation == "levels"


def test_a_candidate_is_given_up_only_where_its_rows_say_so() -> None:
    rng = np.random.default_rng(0)
    usual = rng.normal(1, 0.3, 100)
    losses = {"levels": [usual], "near": [usual + rng.normal(0.01, 0.3, 100)], "far": [usual + 0.2]}
    assert [name for name in losses if is_worse(name, losses, False)] == ["far"]
    assert not is_worse("levels", {**losses, "near": [np.full(100, NAN)]} | {"near": [usual + 1]}, False)
    assert not is_worse("levels", {"levels": losses["levels"]}, False)


def test_what_is_equal_to_the_best_is_not_given_up_where_another_is_lucky_on_its_rows() -> None:
    """Trees know two rows: there the forest is lucky by 0.5 ± 0, and over all rows the worst."""
    losses = {
        "levels": [np.array([1.0, 1.2, 1.0, 1.2])],
        "forest alone": [np.array([0.6, 0.6, 3.0, 3.0])],
        "trees": [np.array([1.1, 1.1, NAN, NAN])],
    }
    assert not is_worse("trees", losses, False)
    assert is_worse("trees", losses | {"levels": [np.array([0.9, 1.0, 1.0, 1.2])]}, False)


def test_the_standard_error_of_a_difference_is_over_rows_or_sites_by_hand() -> None:
    """Two sites whose rows differ by 0 and 2, and by 2 and 4: means 1 and 3."""
    ours, theirs = [np.array([1.0, 3.0]), np.array([3.0, 5.0])], [np.ones(2), np.ones(2)]
    mean, error = difference(ours, theirs, False)
    assert (mean, error) == pytest.approx((2.0, 2**0.5 / 2**0.5))  # over the sites
    alike = [np.array([1.0, 3.0]), np.array([1.0, 3.0])]
    # A row has the variance 2, a site's mean 1, and the mean of both sites 1 / 2.
    assert difference(alike, theirs, False) == pytest.approx((1.0, 0.5**0.5))
    assert difference([np.array([4.0, 4.0])], [np.array([1.0, 1.0])], True) == pytest.approx((1.0, 0.0))


def test_the_file_gives_back_the_record(tmp_path: Path) -> None:
    losses = {"constant": [np.array([1.0]), np.array([NAN])], "levels": [np.array([0.5]), np.array([0.5])]}
    choice = choose(losses, is_rmse=True, folds=5, left_out={"trees": "it is slow"}, alone=ALONE)
    CHOICE.write(choice, tmp_path)
    found = CHOICE.read(tmp_path)
    assert found is not None
    assert found._replace(validated=choice.validated) == choice
    assert found.validated._replace(by_site={}) == choice.validated._replace(by_site={})
    for name, values in choice.validated.by_site.items():
        assert np.array_equal(found.validated.by_site[name], values, equal_nan=True)
