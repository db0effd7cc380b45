"""What is shown of a run that goes on by itself: the log may be lost, and the run with it or not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.errors import RunError
from copfl.flower.trial import LOST, Trial, follow


class Ended:
    """A process that is over."""

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode

    def wait(self, seconds: float) -> int:
        return self.returncode


class Processes:
    """Answers to `flwr list`, one after the other, and what happens when a log is followed again."""

    def __init__(self, answers: list[Any], followed: Any) -> None:
        self.answers, self.followed, self.started = answers, followed, list[list[str]]()

    def call(self, name: str, command: list[str]) -> str:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return json.dumps({"runs": [{"run-id": "7", "status": answer}]})

    def start(self, name: str, command: list[str]) -> Ended:
        self.started.append(command)
        return Ended(self.followed())

    def tail(self, name: str) -> str:
        return "its log"


class Folder:
    def __init__(self) -> None:
        self.there = list[dict[str, Any]]()

    def rounds(self) -> list[dict[str, Any]]:
        return self.there


def seen(
    answers: list[Any], rounds_then: int, code: int = 1, code_then: int = 0
) -> tuple[list[Any], Processes]:
    folder, trial = Folder(), Trial.__new__(Trial)

    def followed() -> int:
        folder.there += [{"round": n} for n in range(rounds_then)]
        return code_then

    processes = Processes(answers, followed)
    trial.processes = processes  # type: ignore[assignment]
    return list(follow(trial, Ended(code), folder, 2, pause=0)), processes  # type: ignore[arg-type]


LATE = subprocess.TimeoutExpired("flwr", 120)


@pytest.mark.parametrize(
    "answers", [["running"], [RunError("away"), LATE, ValueError("no json"), "starting"]]
)
def test_a_lost_log_is_followed_again(answers: list[Any]) -> None:
    records, processes = seen(answers, rounds_then=2)
    assert [r["round"] for r in records] == [0, 1]
    assert processes.started == [["flwr", "log", "7", "copfl", "--stream"]]


@pytest.mark.parametrize("answers", [["finished:failed"], [RunError("gone")]])
def test_a_run_that_is_over_is_told(answers: list[Any]) -> None:
    with pytest.raises(RunError, match="the run ended after round 0 of 2: its log"):
        seen(answers, rounds_then=2)


def test_a_log_is_not_followed_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the run ended after round 0 of 2"):
        seen(["running"], rounds_then=0, code_then=1)
    assert LOST < 100


def test_a_run_that_ended_well_too_early_is_told() -> None:
    with pytest.raises(RunError, match="the run ended"):
        seen(["running"], rounds_then=2, code=0)
