"""The lines of a run whose output is no terminal; tests/cli/test_main.py has the bar."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from copfl.core.metrics import ACCURACY
from copfl.experiment import progress


def test_a_line_at_most_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = [0.0], io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    on_round = progress.lines(10, out, ACCURACY)
    for number in range(10):
        clock[0] += 20
        round: Any = SimpleNamespace(
            number=number, clients={"accuracy": np.array([0.5, 0.7])}, federation={"shared": 0.25}
        )
        on_round(round, 20.0)
    printed = out.getvalue().splitlines()
    assert printed[0] == "round 2/10: accuracy 60.0 %, shared 25 %, 2:40 left"
    assert [line.split(":")[0] for line in printed] == [f"round {n}/10" for n in (2, 4, 6, 8, 10)]


def test_the_expected_time_of_a_long_run() -> None:
    assert progress.expected(100.0, rounds=10, processes=1, baseline=True) == ""
    line = progress.expected(4000.0, rounds=10, processes=2, baseline=True)
    assert line.startswith(
        "10 rounds will take about 1:06:40 or more with 2 processes, and about as long again"
    )
