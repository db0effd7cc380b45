"""Does it pay? The answer of a run, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from copfl import charts
from copfl.charts import GainRow
from copfl.experiment.answer import ALONE, answer_of, cells_of, of_gains, of_several, of_verdict, section_of
from copfl.experiment.run_record import RunRecord
from copfl.measures.metrics import ACCURACY, MetricInfo
from copfl.stats import Interval
from copfl.verdict.headline import MEAN
from copfl.verdict.verdict import BETTER, EQUALLY, UNCLEAR, UNKNOWN, WORSE, Estimate, SiteGain, Verdict

RMSE = MetricInfo("rmse", higher_is_better=False, fraction=False)
NAMES = ["north", "south", "west"]


def verdict_of(*sites: SiteGain) -> Verdict:
    mean = Estimate(0.1, 0.02, 0.18)
    return Verdict(False, mean, 0.04, Interval(-0.1, 0.2), mean, Interval(-0.1, 0.3), 0.4, 0.5, sites)


def site(gain: float, word: str) -> SiteGain:
    return SiteGain(gain, gain - 0.05, gain + 0.05, gain, 40, "levels", "linear alone", word)


def test_a_verdict_has_a_row_per_site_their_mean_and_words_beside_marks() -> None:
    verdict = verdict_of(site(0.2, BETTER), site(-0.06, WORSE), site(0.01, UNCLEAR))
    answer = of_verdict(verdict, NAMES)
    assert answer.headline == (
        "Training together gains. Of 3 sites, 1 is clearly better off and 1 is worse off."
    )
    assert [(row.label, row.mark, row.words) for row in answer.chart.shown] == [
        ("north", "▲", "better together"),
        ("south", "▼", "better alone"),
        ("west", "=", "no clear difference"),
        (MEAN, "▲", "better together"),
    ]
    assert cells_of(answer, 0) == ("+0.20", "+0.15 to +0.25", "▲ better together")
    section = section_of(answer)
    assert (section.name, section.title, section.charts) == ("verdict", answer.headline, [answer.chart])
    one = of_verdict(verdict_of(site(0.2, BETTER)), ["north"])
    assert one.chart.mean is None  # it is the site's own
    assert [row.label for row in one.chart.shown] == ["north"]


def test_of_many_sites_the_middle_is_folded() -> None:
    sites = [site(0.01 * n, UNCLEAR) for n in range(31)]
    answer = of_verdict(verdict_of(*sites), [f"s{n}" for n in range(31)])
    labels = [row.label for row in answer.chart.rows]
    assert labels == [*(f"s{n}" for n in range(30, 20, -1)), *(f"s{n}" for n in range(9, -1, -1))]
    assert answer.chart.folded == 11
    assert len(answer.rows) == 31
    (axes,) = charts.draw([[answer.chart]]).axes
    assert "… 11 more between …" in [text.get_text() for text in axes.texts]


def test_gains_on_test_rows_are_points_with_words_that_hold_for_all_sites_together() -> None:
    """Two intervals exclude zero, and their p values 0.03 are not below 0.05 / 2."""
    gains = np.array([0.2, 0.1, 0.1, 0.0])
    half = 1.96 * 0.1 / 2.17
    bounds = [Interval(0.1, 0.3), *[Interval(0.1 - half, 0.1 + half)] * 2, Interval(0.0, 0.0)]
    answer = of_gains(ACCURACY, "a linear model alone", [*NAMES, "east"], gains, bounds)
    assert [row.words for row in answer.rows.values()] == [BETTER, UNCLEAR, UNCLEAR, EQUALLY]
    assert answer.rows[0][1:4] == pytest.approx((20, 10, 30))
    assert answer.chart.unit == " points"
    assert answer.headline == (
        "No gain shown. Of 4 sites, 1 is clearly better off and none is clearly worse off."
    )
    mean = answer.chart.mean
    assert mean is not None
    assert mean.gain == pytest.approx(10)
    assert answer.said[0].startswith(
        "+10.0 points accuracy on average over a linear model alone (95 % interval"
    )
    lower = of_gains(RMSE, ALONE, [*NAMES, "east"], gains, bounds)
    assert lower.chart.x_title.endswith(f"{ALONE} minus together (95 % interval)")


def test_a_site_without_an_interval_is_not_judged() -> None:
    none, unbounded = Interval(math.nan, math.nan), Interval(-math.inf, math.inf)
    answer = of_gains(ACCURACY, ALONE, NAMES, np.array([0.1, 0.11, 0.09]), [none, none, unbounded])
    assert [row.words for row in answer.rows.values()] == ["no interval", "no interval", UNKNOWN]
    assert answer.headline == "Training together gains."  # by the interval over sites
    assert "There is no interval of a single site" in answer.chart.about
    alone = of_gains(ACCURACY, ALONE, NAMES[:1], np.array([0.1]), [none])
    assert alone.headline == "Too few rows to tell whether training together gains."
    assert alone.chart.mean is None


def test_several_runs_have_a_row_each_where_they_measure_the_same() -> None:
    bounds = [Interval(0.1, 0.3), Interval(0.05, 0.2)]
    one = of_gains(ACCURACY, ALONE, NAMES[:2], np.array([0.2, 0.2]), bounds)
    two = of_gains(ACCURACY, "a forest alone", NAMES[:2], np.array([-0.2, 0.3]), bounds)
    section = of_several({"first": one, "second": two})
    assert section is not None
    assert section.title == "Training together gains with 1 of 2 runs: first."
    (chart,) = section.charts
    assert isinstance(chart, charts.GainChart)
    assert [row.label for row in chart.shown] == ["first", "second"]
    assert chart.x_title == "accuracy, points: gain over the best model alone (95 % interval)"
    other = of_gains(RMSE, ALONE, NAMES[:2], np.array([0.2, 0.2]), bounds)
    assert of_several({"first": one, "second": other}) is None
    assert of_several({}) is None


def test_a_picture_of_gains_names_both_sides_and_every_row() -> None:
    rows = [
        GainRow("a $x$ b", 1.0, 0.5, 1.5, BETTER, "▲"),
        GainRow("c", math.nan, math.nan, math.nan, UNKNOWN, "?"),
    ]
    chart = charts.GainChart("verdict", "Title.", "", rows, "points")
    (axes,) = charts.draw([[chart]], "Title.").axes
    words = [text.get_text() for text in axes.texts]
    assert {"◀ alone is better", "together is better ▶", "a $x$ b", "+1.0", "▲ better together"} <= set(words)
    assert "? too few rows" in words


def test_a_run_that_knows_nothing_of_the_sites_alone_has_no_answer(runs: dict[str, Path]) -> None:
    from copfl.experiment import reading

    (run,) = reading.read_all([runs["copfl"]])
    assert isinstance(run, RunRecord)
    assert answer_of(run) is None
