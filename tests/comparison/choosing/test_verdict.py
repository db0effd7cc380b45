"""Verdicts by hand: what a race shows, what it does not, and what to run next."""

from __future__ import annotations

import math

import numpy as np
import pytest

from copfl.comparison.choosing.verdict import (
    FEDERATE,
    NO_GAIN,
    STAY_ALONE,
    UNDECIDED,
    Against,
    Verdict,
    against_rivals,
    verdict,
)
from copfl.experiment.analysis.convergence import common_value, gained, rises, rounds_to, still_rises
from copfl.experiment.analysis.gains import Gains, constant_text
from copfl.measures.metrics import ACCURACY, MetricInfo, metric
from copfl.rivals.records import FOREST, Rivals, RivalValues
from copfl.stats import Difference, Interval

RMSE = MetricInfo("rmse", higher_is_better=False, fraction=False)
RATES = {"fedavg": [0.1, 0.01]}


def against(
    mean: float, low: float, high: float, rounds: int = 40, seeds: int = 2, rising: float = 0.0
) -> Against:
    bounds = Interval(low, high)
    return Against("fedavg", Difference(mean, bounds, bounds, bounds, 0.5), rounds, seeds, rising)


def judged(
    method: Against, rates: dict[str, list[float]] = RATES, metric: MetricInfo = ACCURACY, alone: float = 0.8
) -> Verdict:
    return verdict([method], alone, 0.0, metric, 40, rates)


def test_nothing_is_concluded_from_six_untuned_rounds() -> None:
    """No difference is distinguishable: that is not the same as "do not federate"."""
    found = judged(against(-0.01, -0.08, 0.06, rounds=6, seeds=1, rising=0.04), {"fedavg": [0.01]})
    assert found.kind == UNDECIDED
    for part in (
        "fedavg -1.0 points [-8.0, +6.0]",
        "after 6 of 40 rounds, 1 seed, learning rate 0.01, not tuned",
        "a gain of 1.0 points is not excluded",
        "more rounds (in the last third of the evaluations fedavg still gained 4.0 points)",
        "several learning rates for each method",
        "2 seeds or more",
    ):
        assert part in found.text


def test_no_relevant_gain_needs_an_interval_that_excludes_one() -> None:
    found = judged(against(-0.01, -0.02, 0.005))
    assert found.kind == NO_GAIN
    assert "a gain of 1.0 points over training alone is excluded" in found.text
    assert "[-2.0, +0.5]" in found.text
    assert "after 40 of 40 rounds, 2 seeds, learning rates 0.01, 0.1" in found.text
    wider = judged(against(-0.01, -0.04, 0.02))
    assert (wider.kind, "What to run next: more sites, more seeds" in wider.text) == (UNDECIDED, True)


@pytest.mark.parametrize(
    ("method", "rates", "missing"),
    [
        (against(-0.01, -0.02, 0.005), {"fedavg": [0.01]}, "several learning rates"),
        (against(-0.01, -0.02, 0.005, rising=0.03), RATES, "more rounds"),
        (against(-0.01, -0.02, 0.005, rounds=9), RATES, "all 40 rounds"),
        (against(-0.01, -0.02, 0.005, seeds=1), RATES, "2 seeds or more"),
    ],
)
def test_no_gain_so_far_is_not_enough(method: Against, rates: dict[str, list[float]], missing: str) -> None:
    found = judged(method, rates)
    assert found.kind == UNDECIDED
    assert missing in found.text.partition("What to run next: ")[2]


def test_to_federate_pays_where_training_alone_cannot_catch_up() -> None:
    better = against(0.05, 0.02, 0.08)
    assert judged(better).kind == FEDERATE
    assert verdict([better], 0.8, 0.03, ACCURACY, 40, RATES).kind == UNDECIDED  # alone still gains 3 points
    assert judged(against(0.05, 0.02, 0.08, rounds=2)).kind == UNDECIDED
    assert "may change" in judged(against(0.05, 0.02, 0.08, rising=0.02)).text


def over_constant(personal: list[float], constant: list[float]) -> Gains:
    unknown = np.full(len(personal), np.nan)
    return Gains(unknown, unknown, np.array(personal), ACCURACY, np.array(constant))


def test_a_gain_is_no_use_where_a_constant_answer_is_as_good() -> None:
    gains = over_constant([0.94] * 3, [0.94] * 3)
    found = verdict([against(0.05, 0.03, 0.07)], 0.8, 0.0, ACCURACY, 40, RATES, gains)
    assert found.kind == NO_GAIN
    constant = "most frequent class, or mean value, in training gives accuracy 94.0 %"
    assert f"{constant}, and fedavg is not shown to be better ([+0.0, +0.0] points): fedavg" in found.text
    assert found.text.startswith("No useful gain: ")
    assert "fedavg +5.0 points [+3.0, +7.0] to training alone" in found.text
    of_risks = gains._replace(metric=metric("c_index", "survival"), constant=np.full(3, 0.5))
    assert (
        constant_text(of_risks._replace(personal=np.full(3, 0.5)))
        == "the same risk for all gives C-index 50.0 %"
    )


def test_few_clients_do_not_exclude_a_gain_over_a_constant_answer() -> None:
    """Two clients gain 25 and 35 points: with one degree of freedom, the interval has zero in it."""
    gains = over_constant([0.85, 0.95], [0.6, 0.6])
    found = verdict([against(0.05, 0.03, 0.07)], 0.8, 0.0, ACCURACY, 40, RATES, gains)
    assert found.kind == UNDECIDED
    assert "not shown to be better ([-33.5, +93.5] points): fedavg +5.0" in found.text
    better = over_constant([0.85, 0.9, 0.95], [0.6, 0.65, 0.7])
    found = verdict([against(0.05, 0.03, 0.07)], 0.8, 0.0, ACCURACY, 40, RATES, better)
    assert found.kind == FEDERATE


def test_of_a_metric_that_is_better_when_low_the_signs_are_exchanged() -> None:
    assert judged(against(-5.0, -8.0, -2.0), metric=RMSE, alone=50.0).kind == FEDERATE
    assert judged(against(0.1, -0.4, 3.0), metric=RMSE, alone=50.0).kind == NO_GAIN  # a percent of 50
    assert judged(against(0.1, -0.6, 3.0), metric=RMSE, alone=50.0).kind == UNDECIDED


def test_without_training_alone_there_is_no_verdict() -> None:
    assert verdict([], 0.0, 0.0, ACCURACY, 40, {}).kind == UNDECIDED


def test_what_the_last_third_gained_by_hand() -> None:
    assert gained([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], ACCURACY) == pytest.approx(0.2)  # 5, 6 against 3, 4
    assert gained([0.1, 0.4], ACCURACY) == pytest.approx(0.3)
    assert gained([9.0, 7.0, 4.0], RMSE) == pytest.approx(3.0)
    assert gained([0.5], ACCURACY) != gained([0.5], ACCURACY)  # nan
    assert rises([[0.1, 0.2, 0.3], [0.1, 0.3, 0.2]], ACCURACY) == 0
    assert rises([[0.1, 0.2, 0.3], [0.1, 0.2, 0.25]], ACCURACY) == pytest.approx(0.075)


def test_rounds_to_a_common_value_by_hand() -> None:
    fast, slow = [0.2, 0.7, 0.8], [0.1, 0.3, 0.6]
    assert common_value([fast, slow], ACCURACY) == 0.6
    assert (rounds_to(0.6, [2, 4, 6], fast, ACCURACY), rounds_to(0.6, [2, 4, 6], slow, ACCURACY)) == (4, 6)
    assert rounds_to(0.9, [2, 4, 6], fast, ACCURACY) is None
    assert common_value([[9.0, 4.0], [8.0, 5.0]], RMSE) == 5.0
    assert rounds_to(5.0, [1, 2], [9.0, 4.0], RMSE) == 2


def test_a_run_says_that_it_still_rises() -> None:
    table = np.array([[0.1, 0.3], [np.nan, np.nan], [0.4, 0.6], [0.5, 0.7]])  # three evaluations
    falling = np.array([[1.0, 1.0], [np.nan, np.nan], [0.8, 0.81], [0.6, 0.61]])
    assert still_rises(table, falling, ACCURACY) == (
        "in the last third of the evaluations the mean over sites still gained 10.0 points, so more rounds "
        "may do better"
    )
    assert still_rises(table, falling[::-1], ACCURACY) == ""  # accuracy rises, and the loss does too
    assert (
        still_rises(table, np.array([[1.0, 1.0], [1.0, 1.0], [0.8, 0.8], [0.4, 0.9]]), ACCURACY) == ""
    )  # noise
    for part in (slice(2, 3), slice(1, 2)):
        assert still_rises(table[part], falling[part], ACCURACY) == ""


def alone(best: list[float], metric: MetricInfo = ACCURACY) -> Rivals:
    """A forest with these values at the clients."""
    values = RivalValues(np.array(best), {metric.name: np.array(best)})
    return Rivals((metric,), {FOREST: values}, FOREST, (FOREST,) * len(best))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ([0.6, 0.7, 0.8], STAY_ALONE),  # distinguishably worse than 0.8, 0.85 and 1.0
        ([0.8, 0.85, 1.0], STAY_ALONE),  # as good: what needs no federation is the answer
        ([0.7, 0.9, 1.15], UNDECIDED),  # better on average, and not distinguishably
        ([0.9, 0.95, 1.1], FEDERATE),  # by ten points everywhere
    ],
)
def test_the_answer_may_be_to_stay_alone(method: list[float], kind: str) -> None:
    pays = judged(against(0.05, 0.02, 0.08))
    found = against_rivals(pays, "fedavg", np.array(method), alone([0.8, 0.85, 1.0]))
    assert found.kind == kind
    assert "to a random forest that each site trains alone (88.3 %)" in found.text
    assert pays.text in found.text
    if kind == STAY_ALONE:
        assert found.text.startswith("Stay alone, take a random forest: fedavg ")


def test_rivals_of_errors_are_better_when_low() -> None:
    pays = judged(against(-5.0, -8.0, -2.0), metric=RMSE, alone=50.0)
    worse = against_rivals(pays, "ditto", np.array([3.0, 4.0]), alone([2.0, 3.0], RMSE))
    assert worse.kind == STAY_ALONE
    better = against_rivals(pays, "ditto", np.array([1.0, 2.0]), alone([2.0, 3.0], RMSE))
    assert better.kind == FEDERATE


def test_without_values_the_verdict_of_the_race_stays() -> None:
    pays = judged(against(0.05, 0.02, 0.08))
    found = against_rivals(pays, "fedavg", np.array([np.nan]), alone([0.8]))
    assert found.kind == FEDERATE
    assert "not compared with a random forest" in found.text


def test_with_one_seed_a_verdict_is_about_these_clients_and_this_seed() -> None:
    def of(both: Interval, seeds: int) -> str:
        found = Difference(0.05, Interval(0.01, 0.09), Interval(0.02, 0.08), both, 0.01)
        judgement = judged(Against("fedavg", found, 40, seeds, 0.0))
        assert judgement.kind == FEDERATE
        return judgement.text

    nothing = Interval(-math.inf, math.inf)
    one = of(nothing, 1)
    assert one.startswith("To federate pays for these sites and this seed: fedavg +5.0 points [+2.0, +8.0]")
    assert "nothing is known of another seed" in one
    assert of(Interval(-0.01, 0.11), 3).startswith(
        "To federate pays for these sites and these 3 seeds: fedavg"
    )
    assert "not shown for others: [-1.0, +11.0] over sites and seeds" in of(Interval(-0.01, 0.11), 3)
    assert of(Interval(0.01, 0.09), 3).startswith("To federate pays: fedavg +5.0 points")
