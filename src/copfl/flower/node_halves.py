"""What a node notes of the halves of each round: its losses with both models. The file never leaves the node."""

import json
import math
from pathlib import Path
from typing import NamedTuple

from copfl import wire
from copfl.errors import RunError, raised_as
from copfl.flower.state import write_json

FILE, QUESTION = "halves.json", "question.json"  # in the run's folder in the state-dir


class Losses(NamedTuple):
    """What a node found in one round; nan where it has no samples, or a loss that it sends is not finite."""

    message: str  # the SHA-256 of both models
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Positive: the first half's model is better."""
        return self.second - self.first


def read(folder: Path) -> dict[int, Losses]:
    """What this node found, by round, from 0."""
    path = folder / FILE
    damaged = f"{FILE} cannot be used: {{}}; restore the node's state-dir"
    with raised_as(RunError, damaged, OSError, ValueError, TypeError, AttributeError):
        stored = json.loads(path.read_text()) if path.exists() else {}
        return {
            int(round): Losses(str(message), *map(_number, pair))
            for round, (message, *pair) in stored.items()
        }


def answered(folder: Path) -> str:
    """The SHA-256 of the question that this node has answered; empty: none."""
    path = folder / QUESTION
    damaged = f"{QUESTION} cannot be used: {{}}; restore the node's state-dir"
    with raised_as(RunError, damaged, OSError, ValueError, TypeError, KeyError):
        return str(json.loads(path.read_text())["sha256"]) if path.exists() else ""


def answer(folder: Path, digest: str) -> None:
    """Notes the question, before its answer leaves."""
    write_json(folder / QUESTION, {"sha256": digest})


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def write(folder: Path, found: dict[int, Losses]) -> None:
    """Writes all of it."""
    content = {
        str(round): [losses.message, wire.plain(losses.first), wire.plain(losses.second)]
        for round, losses in found.items()
    }
    write_json(folder / FILE, content)


def forget(folder: Path, round: int) -> None:
    """Removes a round and those after it: the node trains in it again."""
    found = read(folder)
    if max(found, default=-1) >= round:
        write(folder, {known: losses for known, losses in found.items() if known < round})
