"""Regret, rank and clients above training alone, by hand; the page is that of the stored rows."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

from copfl.bench import rows as records
from copfl.bench.protocol import SEEDS, SUITES, BenchJob, MeasuredRun, Suite
from copfl.bench.rows import BenchRow
from copfl.bench.standings import comparison, settings_table, standings

ROOT = Path(__file__).parents[2]


def row(name: str, **accuracy: list[float | None]) -> BenchRow:
    """A row whose clients have these accuracies in a setting, in every seed."""
    runs = [
        MeasuredRun(BenchJob(name, setting, "mean", 0.1, seed, False), values, 100.0, 2.0, "", "")
        for setting, values in accuracy.items()
        for seed in SEEDS
    ]
    return BenchRow(name, "quick", "1", "", "", {"torch": "1"}, {}, [], runs)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[BenchRow]:
    monkeypatch.setitem(SUITES, "quick", Suite("quick", ("a", "b")))
    return [
        row("local", a=[0.5, 0.7, None], b=[0.4, 0.4]),
        row("good", a=[0.6, 0.8, None], b=[0.3, 0.5]),
        row("bad", a=[0.5, 0.1, None], b=[0.4, 0.4]),
    ]


def test_the_standing_of_a_row_by_hand(three: list[BenchRow]) -> None:
    """In a: 60, 70 and 30 %; in b all have 40 %, and so the mean of the ranks 1 to 3."""
    good, local, bad = standings(three)
    assert [one.row.algorithm for one in (good, local, bad)] == ["good", "local", "bad"]
    assert [one.regret for one in (good, local, bad)] == pytest.approx([0, 5, 20])
    assert [one.rank for one in (good, local, bad)] == [1.5, 2.0, 2.5]
    assert good.above_alone == (1.0 + 0.5) / 2
    assert bad.above_alone == 0.0
    assert math.isnan(local.above_alone)
    assert (good.bytes, good.seconds) == (100.0, 2.0)
    assert good.ranks.low < 1.5 < good.ranks.high
    assert local.ranks == (2.0, 2.0)


def test_a_new_row_is_shown_beside_the_stored_ones(
    three: list[BenchRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("copfl.bench.standings.code_hash", lambda name: "x" if name == "bad" else "")
    local, good, bad = three
    text = comparison(good, [local, bad])
    assert text.startswith("good: place 1 of 3 by mean regret; suite quick, version 1")
    assert "The code of these has changed since their rows were made: bad." in text
    elsewhere = dataclasses.replace(bad, environment={"torch": "2"})
    assert "Stored and new rows differ in: torch 2 and 1." in comparison(good, [local, elsewhere])


def test_federations_are_lines_where_there_are_more_of_them_than_rows(three: list[BenchRow]) -> None:
    found = standings(three)
    assert settings_table(found).head == ("", "a", "b")
    assert settings_table(found).rows[0] == ("`good`", "70.0", "40.0")
    few = settings_table(found[:1])
    assert few.head == ("", "`good`")
    assert few.rows == [("a", "70.0"), ("b", "40.0")]


def script(name: str) -> ModuleType:
    """A script of studies/bench."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"studies/bench/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_stored_rows() -> None:
    leaderboard = script("leaderboard")
    text = leaderboard.PAGE.read_text("utf-8")
    assert leaderboard.page(text) == text, "run python studies/bench/leaderboard.py"


def test_rows_of_some_algorithms_leave_those_of_the_others(three: list[BenchRow]) -> None:
    """`rows.py OUT --algorithms good` removed the stored rows of all others."""
    local, good, bad = three
    again, another = dataclasses.replace(good, code="new"), dataclasses.replace(good, algorithm="another")
    assert script("rows").replaced([local, good, bad], [another, again]) == [local, again, bad, another]


def test_how_a_row_changes_on_another_device_by_hand(three: list[BenchRow]) -> None:
    """In a from 70 to 75 % with another rate, in b from 40 to 39 % with the same."""
    local, good, _ = three
    elsewhere = row("good", a=[0.7, 0.8, None], b=[0.3, 0.48])
    runs = [run._replace(job=run.job._replace(lr=0.2)) for run in elsewhere.of("a")]
    elsewhere = dataclasses.replace(elsewhere, runs=[*runs, *elsewhere.of("b")])
    text = script("leaderboard").two_devices([local, good], [elsewhere])
    assert "| `good` | +2.00 | +5.0 | 1 of 2 |" in text
    assert "(1 of 2 federations), the accuracy changes by 1.0 points on average and by at most 1.0" in text
    assert "elsewhere by 5.0 and at most 5.0" in text


def test_a_row_of_the_full_suite_is_shown_beside_stored_ones() -> None:
    stored = records.stored(SUITES["full"])
    (new,) = [row for row in stored if row.algorithm == "fedpac"]
    text = comparison(new, [row for row in stored if row is not new])
    assert text.startswith(f"fedpac: place 1 of {len(stored)} by mean regret; suite full, version 1")
    assert "cifar-dirichlet" in text
