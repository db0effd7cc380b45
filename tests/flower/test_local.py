"""Following a run: its log may end while the run continues, or with the run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.errors import RunError
from copfl.flower.local import MAX_RECONNECTS, LocalFederation, follow


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode

    def wait(self, seconds: float) -> int:
        return self.returncode


class Fake(LocalFederation):
    """Answers to `flwr list`, one after the other; a log that is opened again appends `rounds` and ends."""

    def __init__(self, answers: list[Any], rounds: int, code: int) -> None:
        self.answers, self.new_rounds, self.code = answers, rounds, code
        self.records, self.commands = list[dict[str, Any]](), list[list[str]]()

    def call(self, command: Any, seconds: float = 0) -> str:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return json.dumps({"runs": [{"run-id": "7", "status": answer}]})

    def start(self, name: str, command: Any) -> Any:
        self.commands.append(command)
        self.records += [{"round": n} for n in range(self.new_rounds)]
        return Ended(self.code)

    def tail(self, name: str, lines: int = 0) -> str:
        return "its log"

    def rounds(self) -> list[dict[str, Any]]:
        return self.records


def followed(
    answers: list[Any], rounds_then: int, code: int = 1, code_then: int = 0
) -> tuple[list[Any], Fake]:
    fake = Fake(answers, rounds_then, code_then)
    ended: Any = Ended(code)
    folder: Any = fake
    return list(follow(fake, ended, folder, 2, pause=0)), fake


LATE = subprocess.TimeoutExpired("flwr", 120)


@pytest.mark.parametrize(
    "answers", [["running"], [RunError("away"), LATE, ValueError("no json"), "starting"]]
)
def test_a_lost_log_is_opened_again(answers: list[Any]) -> None:
    records, fake = followed(answers, rounds_then=2)
    assert [r["round"] for r in records] == [0, 1]
    assert fake.commands == [["flwr", "log", "7", "copfl", "--stream"]]


@pytest.mark.parametrize("answers", [["finished:failed"], [RunError("gone")]])
def test_a_run_that_has_ended_is_reported(answers: list[Any]) -> None:
    with pytest.raises(RunError, match="the run ended after round 0 of 2: its log"):
        followed(answers, rounds_then=2)


def test_a_log_is_not_opened_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the run ended after round 0 of 2"):
        followed(["running"], rounds_then=0, code_then=1)
    assert MAX_RECONNECTS < 100


def test_a_run_that_ends_too_early_without_an_error_is_reported() -> None:
    with pytest.raises(RunError, match="the run ended"):
        followed(["running"], rounds_then=2, code=0)
