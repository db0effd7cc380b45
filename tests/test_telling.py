"""Who hears what copfl tells: a program, a terminal or notebook, a program's own logging, or nobody."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.experiment import rivals
from copfl.experiment.analysis.against_rivals import RIVALS
from copfl.telling import OF_ONE_RUN, heard, logger, to_somebody

run, comparison = logging.getLogger("copfl.experiment.training"), logging.getLogger("copfl.comparison")


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_what_happens_is_told_at_once_and_how_far_it_is_now_and_then(clock: list[float]) -> None:
    said: list[str] = []
    with heard(said.append):
        run.info("it begins")
        for second in range(0, 40, 4):
            clock[0] = second
            run.debug(f"after {second} s")
    assert said == ["it begins", "after 8 s"]
    run.info("nobody hears it")
    assert len(said) == 2


def test_a_comparison_is_heard_without_its_single_runs() -> None:
    said: list[str] = []
    with heard(said.append, but_of=OF_ONE_RUN):
        run.info("a round")
        comparison.info("a row")
    assert said == ["a row"]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a program's own handler of all loggers gets; the program listens from INFO on."""
    lines: list[str] = []

    class Own(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    own, level = Own(), logging.root.level
    logging.root.addHandler(own)
    logging.root.setLevel(logging.INFO)
    yield lines
    logging.root.removeHandler(own)
    logging.root.setLevel(level)


def test_logging_that_a_program_sets_up_hears_it_once_and_at_its_own_level(written: list[str]) -> None:
    said: list[str] = []
    run.info("without log=")
    with heard(said.append, at_any_pace=True), heard(None), heard(said.append, at_any_pace=True):
        run.info("with it")
        run.debug("a detail")
    assert written == ["without log=", "with it"]
    assert said == ["with it", "with it", "a detail", "a detail"]
    assert (logger.level, logger.propagate, logger.handlers) == (logging.NOTSET, True, [])


def test_by_default_somebody_hears_it_in_a_notebook_or_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with heard(to_somebody):
        run.info("of a script whose output is a file")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)  # as a notebook has it
    with heard(to_somebody):
        run.info("of a notebook")
    assert capsys.readouterr().err == "of a notebook\n"


@pytest.mark.job
def test_a_run_tells_of_the_rivals_before_it_trains_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rivals, "SAID", 0.0)
    monkeypatch.setattr("copfl.telling.FIRST", 0)
    monkeypatch.setattr("copfl.telling.INTERVAL", 0)
    said: list[str] = []
    how: dict[str, Any] = {"clients": 2, "rounds": 1, "out": tmp_path / "run", "log": said.append}
    copfl.run("fedavg", data(), **how)
    trained = said.index("rivals at 2 sites alone, about 1 s (rivals=False leaves them out)")
    assert said[0].startswith("after the rounds, rivals at 2 sites alone")
    assert any(line.startswith("round 1/1: accuracy ") for line in said[:trained])
    assert [line.split(":")[0] for line in said[trained + 1 :]] == [
        "rivals, client 1/2",
        "rivals, client 2/2",
    ]
    del said[:]
    copfl.resume(tmp_path / "run", dataset=data(), log=said.append)
    assert not any("rivals" in line for line in said)  # they are there
    (tmp_path / "run" / RIVALS.file).unlink()
    rivals._trained.clear()  # as in another process
    copfl.resume(tmp_path / "run", dataset=data(), log=said.append)
    assert any(line.startswith("rivals at 2 sites alone") for line in said)
    del said[:]
    rivals._trained.clear()
    copfl.compare(["fedavg"], data(), clients=2, rounds=1, seeds=(0,), tune={}, out=tmp_path, log=said.append)
    assert any(line.startswith("rivals at 2 sites alone") for line in said)
    assert not any(line.startswith("round ") for line in said)
