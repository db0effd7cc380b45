"""The verdict of a run: from the table of losses to its folder, its first line and its section."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest

import copfl
from copfl.charts import GainChart
from copfl.choosing import candidates as trying
from copfl.experiment.answer import answer_of, of_verdict, section_of
from copfl.experiment.result import Result
from copfl.experiment.verdict import CHECK, VERDICT
from copfl.report import summary
from copfl.verdict.headline import Check
from copfl.verdict.verdict import Estimate
from tests.choosing.test_first_run import sites, without


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    with pytest.MonkeyPatch.context() as monkeypatch:
        without(monkeypatch, trying.SLOPES, trying.TREES)
        return copfl.run(dataset=sites("class", count=6, rows=30), out=tmp_path_factory.mktemp("v") / "run")


def test_it_is_of_the_same_table_as_the_choice(result: Result) -> None:
    assert result.verdict is not None
    assert result.choice is not None
    means = result.choice.validated.means
    assert result.verdict.loss_together == pytest.approx(means["levels"], rel=0.2)
    assert {site.together for site in result.verdict.sites} <= set(means)
    assert {site.alone for site in result.verdict.sites} <= {
        "constant",
        "linear alone",
        "forest alone",
        "boosted alone",
    }


def test_it_is_in_the_folder_and_read_again(result: Result) -> None:
    assert result.folder is not None
    read = VERDICT.read(result.folder)
    assert read is not None
    assert result.verdict is not None
    assert read.these == pytest.approx(result.verdict.these)
    check = CHECK.read(result.folder)
    assert check == result.check
    assert copfl.resume(result.folder, dataset=sites("class", count=6, rows=30)).verdict is not None


def test_the_output_begins_with_it(result: Result) -> None:
    out = io.StringIO()
    summary.show(result, out)
    assert result.verdict is not None
    answer = answer_of(result)
    assert answer is not None
    assert out.getvalue().startswith(answer.headline[:60])
    assert "not distinguishable" not in out.getvalue()


def test_its_section_has_a_row_for_each_site_and_the_mean(result: Result) -> None:
    answer = answer_of(result)
    assert answer is not None
    section = section_of(answer)
    (chart,) = section.charts
    assert isinstance(chart, GainChart)
    assert len(chart.shown) == 1 + 6
    assert section.title == answer.headline


def test_test_rows_that_disagree_are_said(result: Result) -> None:
    assert result.verdict is not None
    against = Check(Estimate(-9.0, -10.0, -8.0), agrees=False)
    assert "The test rows disagree" in of_verdict(result.verdict, result.site_names, against).headline


def test_a_named_method_has_a_verdict_too_and_named_rounds_have_none() -> None:
    data = sites("class", count=3, rows=30)
    named = copfl.run("levels", data, find_rounds="first")
    assert named.choice is None
    assert named.verdict is not None
    assert math.isfinite(named.verdict.these.gain)
    assert {site.together for site in named.verdict.sites} <= {
        "levels",
        "linear alone",
        "forest alone",
        "constant",
    }
    assert copfl.run("levels", data, rounds=2).verdict is None


def test_the_same_command_twice_has_the_same_verdict(result: Result, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        without(monkeypatch, trying.SLOPES, trying.TREES)
        again = copfl.run(dataset=sites("class", count=6, rows=30), out=tmp_path / "run")
    assert again.folder is not None
    assert result.folder is not None
    for name in ("choice.json", "verdict.json", "verdict-check.json"):
        assert (again.folder / name).read_bytes() == (result.folder / name).read_bytes()
    assert np.array_equal(again.final("accuracy"), result.final("accuracy"))
