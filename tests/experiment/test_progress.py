"""The lines of a run whose output is no terminal, the time left, and the bar of several runs.

The bar of one run is in tests/cli/test_main.py.
"""

from __future__ import annotations

import io
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from copfl.cli import options
from copfl.errors import on_command_line
from copfl.experiment import progress, training
from copfl.measures.metrics import ACCURACY
from copfl.telling import heard


def round_(number: int) -> Any:
    return SimpleNamespace(
        number=number, clients={"accuracy": np.array([0.5, 0.7])}, federation={"shared": 0.25}
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_first_line_comes_after_seconds_and_then_one_at_most_every_interval(clock: list[float]) -> None:
    printed = list[str]()
    listener = progress.lines(10, ACCURACY)
    with heard(printed.append):
        for number in range(10):
            clock[0] += 20
            listener.on_round(round_(number), 20.0)
    assert printed[0] == "round 1/10: accuracy 60.0 %, shared 25 %, at most 3:00 left"
    assert printed[1] == "round 3/10: accuracy 60.0 %, shared 25 %, 2:20 left"
    assert [line.split(":")[0] for line in printed] == [f"round {n}/10" for n in (1, 3, 5, 7, 9)]


def test_work_of_many_rounds_says_what_is_done_and_how_long_the_rest_takes(clock: list[float]) -> None:
    printed = list[str]()
    with heard(printed.append):
        advance = progress.counted("audit", "round", 1200, progress.logger.debug)
        for rounds in (1, 99, 100):
            clock[0] += rounds * 0.5
            advance(rounds)
    assert printed == ["audit, round 100/1,200: 9:10 left", "audit, round 200/1,200: 8:20 left"]


def test_a_short_run_prints_no_line(clock: list[float]) -> None:
    printed = list[str]()
    listener = progress.lines(4, ACCURACY)
    with heard(printed.append):
        for number in range(4):
            clock[0] += 1
            listener.on_round(round_(number), 1.0)
    assert printed == []


def test_the_time_left_has_the_training_alone_and_what_is_saved() -> None:
    """Ten rounds of two seconds, and ten of training alone, which turn out to take one second each."""
    left = progress.TimeLeft(rounds=10, alone=10)
    assert left.after(1, 5.0) == 5.0 * (9 + 1 + 10)
    assert left.after(2, 2.0) == 2.0 * (8 + 1 + 10)  # the first round also prepared
    for done in range(3, 10):
        left.after(done, 2.0)
    assert left.after(10, 2.0) == 2.0 * (0 + 1 + 10)
    assert left.after(1, 1.0, is_alone=True) == 9.0
    assert left.after(10, 1.0, is_alone=True) == 0.0


def test_the_first_round_alone_prepares_too() -> None:
    left = progress.TimeLeft(rounds=2, alone=10)
    left.after(1, 30.0)
    left.after(2, 15.0)
    assert left.after(1, 35.0, is_alone=True) <= 9 * 22.5
    assert left.after(2, 20.0, is_alone=True) == 8 * 20.0


def test_without_training_alone_the_last_round_is_the_end() -> None:
    left = progress.TimeLeft(rounds=2)
    assert left.after(1, 3.0) == 3.0
    assert left.after(2, 3.0) == 0.0


def test_all_stages_of_a_run_are_shown(clock: list[float]) -> None:
    printed = list[str]()
    listener = progress.lines(1, ACCURACY, alone=1)
    with heard(printed.append):
        clock[0] = 40
        listener.on_round(round_(0), 40.0)
        clock[0] = 80
        training.logger.debug("saving 2 models ...")
        clock[0] = 120
        listener.on_round_alone(round_(0), 10.0)
    assert printed == [
        "round 1/1: accuracy 60.0 %, shared 25 %, at most 1:20 left",
        "saving 2 models ...",
        "training alone, round 1/1: accuracy 60.0 %, shared 25 %, 0:00 left",
    ]


def test_the_expected_time_of_a_long_run() -> None:
    assert progress.expected(50.0, rounds=10, processes=1, baseline=True) == ""
    assert progress.expected(100.0, rounds=10, processes=1, baseline=True).startswith(
        "10 rounds will take about 3:20 or more with 1 process, half of it for the training alone"
    )
    assert progress.expected(4000.0, rounds=10, processes=2, baseline=False) == (
        "10 rounds will take about 1:06:40 or more with 2 processes; rounds= makes it shorter"
    )
    with on_command_line():
        assert progress.expected(4000.0, rounds=10, processes=2, baseline=False).endswith(
            "2 processes; --rounds and --epochs make it shorter"
        )


class Terminal(io.StringIO):
    """What rich takes for a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_bar_of_runs_has_the_time_that_is_left_and_lines_stand_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, left = Terminal(), [math.inf]
    with progress.bar_of_runs(out, lambda: left[0]) as log:
        log("1 of 3 runs [done]")
        left[0] = 80.0
        log("2 of 3 runs")
        left[0] = 0.0
        log("the choice is trained")
    shown = out.getvalue()
    for text in (
        "known after the first round",
        "0:00 of 1:20, 1:20 left",
        "1 of 3 runs [done]",
        "the choice is trained",
    ):
        assert text in shown
    assert "\u2501" not in shown.rpartition("1:20 left")[2]  # after the runs there is no bar


def test_a_bar_of_counted_work_moves_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich puts itself in the place of stderr, which is no terminal then."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with options.counted("validation", "training", hidden=False) as start:
        start(3)(2)
    assert "validation, training" in terminal.getvalue()
    assert "2/3" in re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
