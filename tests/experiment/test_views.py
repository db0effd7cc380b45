"""Results in Python: a few lines, tables, data frames, pictures, and answers to new samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import copfl
from copfl.errors import UsageError
from copfl.experiment.analysis.gains import GAINS
from copfl.experiment.answer import answer_of, cells_of
from copfl.experiment.result import Result
from copfl.tables import plain

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(RNG.normal(size=(80, 3)), columns=["a", "b", "c"])
FRAME["y"] = np.where(FRAME["a"] + RNG.normal(size=80) > 0, "yes", "no")
FRAME["site"] = np.where(np.arange(80) % 2, "north", "south")


@pytest.fixture(scope="module")
def result() -> Result:
    how: dict[str, Any] = {"target": "y", "client": "site", "rounds": 2, "local_baseline": True}
    return copfl.run("fedper", FRAME, **how, model_options={"width": 4}, model="mlp", rivals=False)


def test_a_few_lines_say_what_decides(result: Result) -> None:
    lines = repr(result).splitlines()
    assert lines[0] == str(result)
    assert 1 <= len(lines) <= 6
    assert lines[2].strip() == answer_of(result).headline  # type: ignore[union-attr]
    assert max(map(len, lines)) < 120
    assert "of 2 sites gain" in repr(result)
    for value in (result.experiment, result.experiment.federation.dataset, result.bundle(0), result.models):
        assert len(repr(value)) < 200


def test_what_a_result_holds_is_shown_in_words() -> None:
    how: dict[str, Any] = {"target": "y", "client": "site", "rounds": 1}
    levels = copfl.run("levels", FRAME, **how)
    assert repr(levels.rivals).startswith(
        "scikit-learn's models at each site alone, accuracy: the constant answer"
    )
    assert repr(levels.rivals).count("(chosen)") == 1
    assert "standard error" in repr(levels.coefficients)
    times = RNG.exponential(size=80) + 0.01
    cohort = FRAME.assign(y=times.round(3), died=np.arange(80) % 3 > 0)
    survival = copfl.run("fedavg", cohort, task="survival", event="died", rivals=False, **how)
    assert repr(survival.survival).startswith("integrated Brier score 0.")
    expected = survival.bundle("north").predict_survival(cohort[:5], [0.5, 1.0])
    np.testing.assert_array_equal(survival.predict_survival(cohort[:5], [0.5, 1.0], "north"), expected)
    with pytest.raises(UsageError, match="no baseline hazard"):
        survival.predict_survival(cohort[:5], [0.5])


def test_each_site_has_an_interval_of_its_gain_over_training_alone(result: Result) -> None:
    """It contains the gain, and is kept."""
    found, gains = result.analysis, result.gains
    assert found is not None
    assert gains is not None
    for bounds, gain in zip(found.intervals, gains.gain, strict=True):
        assert bounds.low <= gain <= bounds.high
    read = GAINS.parse(json.loads(json.dumps(plain(GAINS.as_json(found)))))
    assert list(read.intervals) == list(found.intervals)


def test_frames_have_the_numbers_of_the_arrays(result: Result) -> None:
    clients, rounds = result.to_pandas(), result.to_pandas("rounds")
    assert clients["client"].tolist() == ["north", "south"]
    np.testing.assert_array_equal(clients["accuracy"], result.final("accuracy"))
    np.testing.assert_array_equal(rounds["accuracy"].to_numpy().reshape(2, 2), result.accuracy)
    assert result.gains is not None
    np.testing.assert_array_equal(clients["gain"], result.gains.gain)
    assert len(FRAME) == int(clients["train"].sum() + clients["test"].sum())
    with pytest.raises(UsageError, match='no data frame "client"; did you mean "clients"'):
        result.to_pandas("client")


def test_a_notebook_has_a_table_without_code_of_names(result: Result) -> None:
    html = result._repr_html_()
    assert html.count("<tr>") == 3
    answer = answer_of(result)
    assert answer is not None
    assert f"<caption>{answer.headline}</caption>" in html
    assert "<th>gain</th><th>95 % interval</th><th>verdict</th>" in html
    for n in range(2):
        assert "".join(f"<td>{cell}</td>" for cell in cells_of(answer, n)) in html
    named = copfl.run("fedavg", {"<b>": (np.eye(20, dtype="f"), np.arange(20) % 2)}, rounds=1, rivals=False)
    assert "<td>&lt;b&gt;</td>" in named._repr_html_()


def test_a_model_answers_by_number_and_by_name(result: Result) -> None:
    new = FRAME[["c", "a", "b"]].head(6)  # in any order
    answers = result.predict(new, client="south")
    assert set(answers) <= {"yes", "no"}
    np.testing.assert_array_equal(answers, result.predict(new, client=1))
    np.testing.assert_allclose(result.predict_proba(new).sum(1), 1, rtol=1e-6)
    assert [type(net) for net in result.models[:1]] == [type(result.model("north"))]
    for one, other in zip(result.models[-1].parameters(), result.model("south").parameters(), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(UsageError, match='no client "west"'):
        result.model("west")
    with pytest.raises(IndexError):
        result.models[2]
    assert len(list(result.models)) == 2


def test_pictures_and_frames_name_what_is_missing(
    result: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (axes,) = result.plot(tmp_path / "run.svg").axes
    assert {"north", "south", "All sites (mean)"} <= {text.get_text() for text in axes.texts}
    assert "<svg" in (tmp_path / "run.svg").read_text()
    (curves,) = result.plot(of="rounds").axes
    assert curves.get_xlabel() == "round"
    with pytest.raises(UsageError, match='no picture "curves"'):
        result.plot(of="curves")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pip install 'copfl\[pandas\]'"):
        result.to_pandas()
    monkeypatch.setattr("copfl.charts.available", lambda: False)
    with pytest.raises(UsageError, match=r"pip install 'copfl\[plots\]'"):
        result.plot()
