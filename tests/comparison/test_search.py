"""The search for settings: what is drawn, who is promoted, and that an interrupted search goes on."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from copfl.comparison.compare import compare, sweep
from copfl.comparison.halving import SEARCH, halving
from copfl.comparison.results.results import Tuned
from copfl.comparison.rows.spaces import Range, cells, space_of, tried_values
from copfl.comparison.search import Attempt, Measure, SharedSearch, drawn
from copfl.comparison.tuning import tried
from copfl.errors import UsageError
from copfl.measures.metrics import ACCURACY, METRICS, MetricInfo
from tests.commands import called
from tests.comparison.small import base, clouds, line

LR = {("optimizer", "lr"): Range(1e-4, 1.0, log=True, whole=False)}
RMSE = METRICS["rmse"]


# Ranges


@pytest.mark.parametrize(
    ("text", "found", "ends"),
    [
        ("log:1e-4..1e-1", Range(1e-4, 1e-1, True, False), [1e-4, 1e-1]),
        ("0.1..0.9", Range(0.1, 0.9, False, False), [0.1, 0.9]),
        ("1..5", Range(1, 5, False, True), [1, 5]),
        ("log:1..64", Range(1, 64, True, True), [1, 64]),
        ("-1.5..2", Range(-1.5, 2, False, False), [-1.5, 2.0]),
        ("1e1..1e2", Range(10, 100, False, False), [10.0, 100.0]),
    ],
)
def test_a_range(text: str, found: Range, ends: list[float]) -> None:
    (value,) = space_of(tried_values([f"lr={text}"], "--tune"), "--tune").values()
    assert value == found
    assert space_of({"lr": text}, "--tune") == {("optimizer", "lr"): found}
    assert repr([cell["optimizer"]["lr"] for cell in cells({("optimizer", "lr"): found})]) == repr(ends)


@pytest.mark.parametrize(
    "text", ["1..1", "5..1", "log:0..1", "log:-1..1", "1..x", "..", "1..inf", "lin:1..2", "1..2..3"]
)
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(UsageError, match=r"--tune lr: the range .* must be LOW\.\.HIGH with LOW < HIGH"):
        space_of({"lr": text}, "--tune")


def test_the_ends_of_a_range() -> None:
    log, plain = Range(1e-4, 1.0, True, False), Range(0.0, 1.0, False, False)
    assert [log.at_an_end(v) for v in (1e-4, 1.2e-4, 1e-3, 0.5, 0.9)] == [True, True, False, False, True]
    assert [plain.at_an_end(v) for v in (0.04, 0.06, 0.94, 0.96)] == [True, False, False, True]


# Successive halving


def test_the_best_third_is_promoted_twice() -> None:
    measured = list[tuple[float, list[float]]]()

    def measure(some: list[float], fraction: float) -> list[float]:
        measured.append((fraction, list(some)))
        return [one + fraction / 100 for one in some]

    first, second = [0.1 * n for n in range(9)], [0.5, 0.9, 0.5, 0.2]
    found = halving([first, second, []], measure, ACCURACY)
    assert [(fraction, len(some)) for fraction, some in measured] == [(1 / 9, 13), (1 / 3, 5), (1.0, 2)]
    assert measured[1][1] == [*first[6:], second[0], second[1]]  # of equals, the first
    assert measured[2][1] == [first[8], 0.9]
    assert [len(own) for own in found] == [9, 4, 0]
    assert found[1][1] == pytest.approx((0.9, 0.91, 1.0))
    assert found[1][3] == pytest.approx((0.2, 0.2 + 1 / 900, 1 / 9))


def test_where_less_is_better_the_lowest_is_promoted_and_what_is_not_defined_is_not() -> None:
    found = halving([[3.0, math.nan, 1.0, math.inf]], lambda some, fraction: list(some), RMSE)
    assert {value: fraction for _, value, fraction in found[0] if not math.isnan(value)} == {
        3.0: 1 / 3, 1.0: 1.0, math.inf: 1 / 9,
    }  # fmt: skip


# The search, with a known function in place of runs


Log = list[tuple[Attempt, float]]


def parabola(log: Log, metric: MetricInfo, stop_after: float) -> Measure:
    """The best learning rate is 0.01."""

    def measure(attempts: Sequence[Attempt], fraction: float) -> list[float]:
        if len(log) >= stop_after:
            raise KeyboardInterrupt
        log.extend((attempt, fraction) for attempt in attempts)
        errors = [(math.log10(a.settings["optimizer"]["lr"]) + 2) ** 2 for a in attempts]
        return [metric.score(1.0) - metric.score(error) for error in errors]

    return measure


def found_in(
    folder: Path,
    log: Log,
    *,
    trials: int = 20,
    rows: int = 1,
    metric: MetricInfo = ACCURACY,
    stop_after: float = math.inf,
) -> list[Tuned]:
    return searched(SharedSearch(trials, folder, 0, metric, parabola(log, metric, stop_after)), rows)


def searched(one: SharedSearch, rows: int = 1) -> list[Tuned]:
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'copfl[search]'")
    attempts = drawn(one, [LR] * rows, [f"row {n}" for n in range(rows)])
    return tried(attempts, [LR] * rows, one.measure, one.metric, is_search=True)


@pytest.mark.job
def test_a_search_finds_the_best_rate_with_the_same_budget_for_every_row(tmp_path: Path) -> None:
    log: Log = []
    found = found_in(tmp_path, log, rows=2)
    for tuned in found:
        assert len(tuned.trials) == 20
        assert 0.005 < tuned.chosen["optimizer"]["lr"] < 0.02
        assert tuned.space == "lr=log:0.0001..1"
    assert found[0].trials != found[1].trials  # each row has draws of its own
    distinct = Counter((c.row, fraction) for c, fraction in {(repr(c), f): (c, f) for c, f in log}.values())
    assert distinct == {(row, f): n for row in (0, 1) for f, n in zip(SEARCH, (20, 7, 3), strict=True)}
    again: Log = []
    assert found_in(tmp_path / "again", again, rows=2) == found
    assert again == log


@pytest.mark.job
@pytest.mark.parametrize("stop_after", [0, 10, 40])
def test_an_interrupted_search_goes_on_to_the_same_result(tmp_path: Path, stop_after: int) -> None:
    whole, part, rest = list[tuple[Attempt, float]](), Log(), Log()
    expected = found_in(tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        found_in(tmp_path / "part", part, stop_after=stop_after)
    assert found_in(tmp_path / "part", rest) == expected
    first = [candidate for candidate, fraction in rest if fraction == SEARCH[0]]
    assert len(first) == 20 + max(
        0, 20 - stop_after
    )  # those with a value are read, once, and not drawn again


def test_more_trials_go_on_from_those_that_are_there(tmp_path: Path) -> None:
    first = found_in(tmp_path, [], trials=10)[0]
    more = found_in(tmp_path, [], trials=15)[0]
    assert [t.settings for t in more.trials[:10]] == [t.settings for t in first.trials]
    assert more == found_in(tmp_path / "at-once", [], trials=15)[0]
    fewer = found_in(tmp_path, [], trials=10)[0]
    assert fewer == first


def test_several_processes_search_together(tmp_path: Path) -> None:
    expected, found = found_in(tmp_path / "alone", []), list[list[Tuned]]()
    threads = [
        threading.Thread(target=lambda: found.append(found_in(tmp_path / "shared", []))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected, expected]


def test_a_metric_that_is_better_when_low_and_trials_without_a_value(tmp_path: Path) -> None:
    (found,) = found_in(tmp_path, [], metric=RMSE)
    assert 0.005 < found.chosen["optimizer"]["lr"] < 0.02
    nothing_defined = SharedSearch(
        6, tmp_path / "nan", 0, ACCURACY, lambda some, fraction: [math.nan] * len(some)
    )
    (undefined,) = searched(nothing_defined)
    assert undefined.chosen == undefined.trials[0].settings


# A comparison


@pytest.mark.job
def test_a_comparison_with_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'copfl[search]'")
    data = clouds(tmp_path / "clouds.npz")
    tune = "--tune", "lr=log:1e-9..1", "--tune", "optimizer=sgd,adam", "--trials", "4", "--rounds", "9"
    words = line(data, tmp_path / "a", "-a", "local", "--seeds", "0", "--jobs", "1", *tune)
    answer = called(capsys, *words)
    assert answer.code == 0, answer.err
    content = json.loads((tmp_path / "a" / "table.json").read_text())["rows"][0]
    fractions = Counter(trial["fraction_of_rounds"] for trial in content["trials"])
    assert fractions == {1 / 9: 2, 1 / 3: 1, 1.0: 1}
    lr = content["chosen"]["optimizer"]["lr"]
    text = " ".join(answer.out.split())
    assert f" tried chosen validation accuracy in % {'-' * 10}" in text
    assert f" local 4 lr={lr:g} name=" in text
    assert "tried: settings drawn from lr=log:1e-09..1 name=['sgd', 'adam']" in text
    assert len(list((tmp_path / "a" / "tuning").glob("*/run.toml"))) == 4 + 2 + 1
    again = called(capsys, *words)
    assert again.out == answer.out
    assert "done" not in again.err  # nothing was trained
    assert content["optimizer"]["lr"] == lr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tune": {"lr": [0.1, 0.01]}, "trials": 5}, "trials are those of a search; name a range"),
        ({"tune": {"lr": "log:1e-4..1e-1"}, "trials": 0}, "trials=0 must be a number of at least 1"),
        ({"tune": {"lr": "log:1e-1..1e-4"}}, "must be LOW..HIGH"),
        ({"tune": {"copfl.rate": "0.1..2.5"}}, "rate"),
        ({"tune": {"copfl.raet": "0.1..0.2"}}, 'did you mean "rate"'),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_a_run(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    data = clouds(tmp_path / "clouds.npz")
    with pytest.raises(UsageError, match=message):
        compare(["copfl"], seeds=[0], base_tables=base(data), out=tmp_path / "a", **given)
    with pytest.raises(UsageError, match="is a range, which only tuning searches"):
        sweep({"lr": ["log:1e-4..1e-1"]}, seeds=[0], base_tables=base(data), out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'copfl\[search\]'"):
        compare(["copfl"], seeds=[0], base_tables={}, out=tmp_path / "a", tune={"lr": "log:1e-4..1e-1"})
    assert not (tmp_path / "a").exists()
