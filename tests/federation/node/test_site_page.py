"""The page of a site's owner says what is known, and what is not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from copfl.charts import GainChart
from copfl.federation.node import site_page
from copfl.federation.node.site import Measurement
from copfl.report import document
from copfl.stats import Interval
from tests.report.hostile import NAME, assert_harmless
from tests.report.sites import DESCRIPTION, LOG, SITE, changed, gain


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            (0.05, 0.01, 0.09),
            "The model is 5.0 points better than training alone (70.0 %); gain +5.0 [+1.0, +9.0].",
        ),
        ((-0.05, -0.09, -0.01), "The model is 5.0 points worse than training alone (70.0 %); gain -5.0"),
        (
            (0.02, -0.03, 0.07),
            "The model cannot be distinguished from training alone (70.0 %): +2.0 points [-3.0, +7.0]",
        ),
        ((0.02, -math.inf, math.inf), "With 80 test samples there is no interval."),
        ((math.nan, -math.inf, math.inf), "so they cannot be compared"),
    ],
)
def test_the_gain_is_what_the_interval_allows(found: tuple[float, float, float], said: str) -> None:
    assert said in words(site_page.text_of(changed(gain=gain(*found))))


def test_a_gain_is_no_use_where_a_constant_answer_is_as_good() -> None:
    found = gain(0.05, 0.01, 0.09)._replace(constant=0.74, over_constant=Interval(-0.02, 0.04))
    said = words(site_page.text_of(changed(gain=found)))
    assert "No useful gain is shown: always answering the most frequent class, or mean value, of the" in said
    assert "gives 74.0 %, and the model is not shown to be better: [-2.0, +4.0] points. Its gain over" in said
    better = found._replace(over_constant=Interval(0.001, 0.04))
    assert "The model is 5.0 points better" in words(site_page.text_of(changed(gain=better)))


def test_a_site_has_the_name_of_its_invitation_and_else_its_number() -> None:
    assert site_page.document_of(changed(name="north")).title == f"north: {DESCRIPTION.origin.title}"
    assert site_page.document_of(SITE).title == f"Site 1: {DESCRIPTION.origin.title}"


def test_the_round_the_log_and_the_commands_are_stated() -> None:
    text = words(site_page.text_of(SITE))
    for said in (
        "the model of round 4 of 5, the best on this site's validation samples",
        "10 messages of this run left this site",
        "epsilon 1.25 in all answers together; no sample did",
        "1 requests of this run were refused; 3 messages of other runs left",
        "no line changed or removed",
        "copfl predict /var/lib/copfl/20261117-101500-ab12cd/model --data FILE",
        "copfl predict /var/lib/copfl/20261117-101500-ab12cd/alone --data FILE",
    ):
        assert said in text, said


def test_a_damaged_log_is_named() -> None:
    text = words(site_page.text_of(changed(log=LOG._replace(problem="line 3: it was changed"))))
    assert "The audit log is damaged: line 3: it was changed" in text


def test_the_chart_has_the_rounds_that_were_evaluated() -> None:
    rounds = [
        Measurement(1, {}),
        Measurement(2, {"accuracy": 0.5, "accuracy_global": math.nan}),
        Measurement(3, {"accuracy": 0.6}),
    ]
    page = site_page.document_of(changed(rounds=rounds, alone=[]))
    (chart,) = page.sections[0].charts
    table = document.table_of(chart)
    assert [row[0] for row in table.rows] == ["2", "3"]
    assert list(table.head) == ["round", "this site's model, after training"]
    assert "<svg" in document.render(page) or "report-data" in document.render(page)


def test_names_do_not_become_markup() -> None:
    """Of the federation, its classes, the data with their columns, what left, and why nothing is known."""
    origin = dataclasses.replace(DESCRIPTION.origin, title=NAME, data=NAME, note=NAME)
    described = dataclasses.replace(
        DESCRIPTION,
        model={"name": NAME},
        output=dataclasses.replace(DESCRIPTION.output, names=(NAME, "yes")),
        origin=origin,
    )
    log = LOG._replace(left=[LOG.left[0]._replace(kind=NAME)], problem=NAME, last_hash=NAME)
    site = changed(
        description=described, run=NAME, model=Path(NAME), log=log, spent=NAME, gain=None, no_gain=NAME
    )
    page = assert_harmless(document.render(site_page.document_of(site)))
    assert NAME[:5] in page.text


def test_the_page_says_first_whether_it_pays_for_the_site_over_the_best_that_it_has_alone() -> None:
    answer = site_page.document_of(SITE).answer
    assert answer is not None
    assert answer.title == "Training together gains."
    (chart,) = answer.charts
    assert isinstance(chart, GainChart)
    (row,) = chart.rows
    assert (row.label, row.words, row.mark) == ("this site", "better together", "▲")
    assert row[1:4] == pytest.approx((5, 1, 9))
    unknown = changed(gain=None, no_gain="it was not trained alone")
    assert site_page.document_of(unknown).answer is None
