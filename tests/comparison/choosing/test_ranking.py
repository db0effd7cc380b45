"""What a choice prints: the answer first, then the ranking, then what it rests on."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from copfl.comparison.choosing.ranking import (
    ALIKE,
    CHOSEN,
    SHOWN,
    WIDTH,
    WORSE,
    Choice,
    Ranked,
    Row,
    ranked,
    write,
)
from copfl.experiment.choice import Choice as ChoiceOfRun
from copfl.experiment.choice import Validated
from copfl.report import choice_page
from copfl.report.document import render
from copfl.settings.complete import complete
from copfl.stats import Interval
from copfl.verdict.verdict import BETTER, Estimate, SiteGain, Verdict

NAN = math.nan
SITE = SiteGain(0.04, 0.01, 0.07, 0.05, 60, "fedper", "linear alone", BETTER)
VERDICT = Verdict(
    False,
    Estimate(0.04, 0.02, 0.06),
    0.01,
    Interval(0.0, 0.08),
    Estimate(NAN, NAN, NAN),
    Interval(NAN, NAN),
    0.51,
    0.55,
    (SITE, SITE),
)
CHOICE = Choice(
    title="visits.csv, 2 clients",
    chosen="fedper",
    ranking=[
        Ranked("fedper", 5, 2, 12, 0.51, NAN, Interval(NAN, NAN), CHOSEN),
        Ranked("levels", 5, 1, 0, 0.52, 0.01, Interval(-0.01, 0.03), ALIKE),
        Ranked("ditto", 1, 1, 9, NAN, 0.2, Interval(0.1, 0.3), "worse than the best, after 1 fold of 5"),
    ],
    found=ChoiceOfRun(
        "fedper", ("fedper", "fedper"), Validated({"fedper": np.array([0.5, 0.52])}, {}, False, 5)
    ),
    verdict=VERDICT,
    sites=["north", "south"],
    spent=60,
    left_out={"ktpfl": "it needs classes"},
    notes=["Clients: 2 clients."],
    folder=Path("runs/choose"),
    tested="fedper on visits: accuracy 73.1 %",
)


def test_it_begins_with_the_answer() -> None:
    text = str(CHOICE)
    question, chosen, pays, tested, gap, head, rule, first = text.splitlines()[:8]
    assert question == "Which method for visits.csv, 2 clients?"
    assert chosen == "fedper is chosen. It is not shown to be better than levels."
    assert pays == (
        "Does it pay to federate? Training together gains. All 2 sites are clearly better off. Of what each site has"
    )
    assert tested == "alone, a linear model is the best."
    assert gap == "Tested: fedper on visits: accuracy 73.1 %"
    assert not head
    assert rule.split()[:3] == ["folds", "seeds", "rounds"]
    assert set(first) == {"-"}
    assert max(map(len, text.splitlines())) <= WIDTH


def test_reasons_and_what_was_not_tried_are_below() -> None:
    text = " ".join(str(CHOICE).split())
    assert "worse than the best, after 1 fold of 5: ditto." in text
    assert "Not tried: ktpfl (it needs classes)." in text
    assert "These sites: the loss falls by +0.040 on average" in text


def test_without_a_side_nothing_is_said_of_the_other() -> None:
    assert "Nothing is known" in dataclasses.replace(CHOICE, verdict=None).answer[1]


def test_the_ranking_by_hand() -> None:
    """Against losses of 1 on four rows: 2 lower and 2 higher without spread, alike on average, and given up."""
    ones, rows = np.ones(4), np.array([0.5, 1.5, 0.5, 1.7])
    found = ranked(
        [
            Row("far", [ones + 2], 5, 1, 3),
            Row("near", [rows], 5, 1, 3),
            Row("best", [ones], 5, 1, 3),
            Row("early", [np.array([1.1, NAN, NAN, NAN])], 1, 1, 3, "worse than the best, after 1 fold of 5"),
            Row("linear alone", [ones - 0.5], 5, 1, 0),
        ],
        "best",
        False,
        {"far": 3.0, "near": 1.05, "best": 1.0, "linear alone": 0.5},
    )
    assert [(row.label, row.status) for row in found] == [
        ("best", CHOSEN),
        ("linear alone", SHOWN),
        ("near", ALIKE),
        ("far", WORSE),
        ("early", "worse than the best, after 1 fold of 5"),
    ]
    assert [row.gap for row in found[1:]] == pytest.approx([-0.5, 0.05, 2.0, 0.1])
    half = 1.959964 * (rows - 1).std(ddof=1) / 2
    assert found[2].bounds == pytest.approx((0.05 - half, 0.05 + half), rel=1e-4)


def test_the_folder_has_a_page(tmp_path: Path) -> None:
    write(dataclasses.replace(CHOICE, folder=tmp_path), complete({"algorithm": {"name": "fedper"}}))
    assert choice_page.is_choice(tmp_path)
    page = choice_page.document_of(tmp_path)
    assert page.title == "Which method for visits.csv, 2 clients?"
    assert list(page.conclusion) == CHOICE.answer
    assert page.answer is not None
    assert page.answer.name == "verdict"
    assert "north" in render(page)
    content = json.loads((tmp_path / "ranking.json").read_text())
    assert (content["chosen"], content["loss"], content["rival"]) == ("fedper", "log loss", "")
    assert (tmp_path / "run.toml").is_file()
