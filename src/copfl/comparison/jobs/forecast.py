"""How long the runs of a command will still take.

Whatever trains jobs tells it what is planned and what has ended; lines of progress ask how much time is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from copfl.comparison.jobs.job import Job
from copfl.experiment.progress import span


@dataclass
class Forecast:
    """The time that is left of all runs of a command, by the rounds that they have trained."""

    later: float = 0.0  # rounds of runs that are not yet planned
    end: float = math.inf  # of the command, by the monotonic clock
    begin: float = field(default_factory=lambda: time.monotonic())
    trained: int = 0  # rounds of runs that have ended
    due: dict[Path, int] = field(default_factory=dict)  # rounds that a planned run has to train
    had: dict[Path, int] = field(default_factory=dict)  # rounds that it had before
    counted: dict[Path, int] = field(default_factory=dict)  # rounds of a run that `later` no longer has

    def plan(self, jobs: Sequence[Job]) -> None:
        """Runs that are about to be trained, or are finished, are no longer `later`."""
        for job in jobs:
            path = job.path.absolute()
            self.later = max(0.0, self.later - (job.rounds - self.counted.get(path, 0)))
            self.counted[path], self.had[path] = job.rounds, rounds_in(path)
            self.due[path] = max(0, job.rounds - self.had[path])

    def ended(self, job: Job) -> None:
        self.trained += self.due.pop(job.path.absolute(), 0)

    def left(self) -> float:
        """Seconds; infinite before the first round."""
        now, due = time.monotonic(), dict(self.due)
        trained_of_running = sum(
            min(rounds, rounds_in(path) - self.had[path]) for path, rounds in due.items()
        )
        trained, remaining = (
            self.trained + trained_of_running,
            sum(due.values()) - trained_of_running + self.later,
        )
        estimate = (now - self.begin) / trained * remaining if trained else math.inf
        return max(0.0, min(estimate, self.end - now))

    def text(self) -> str:
        """Such as "about 1:20 left"; "" before the first round."""
        seconds = self.left()
        return f"about {span(seconds)} left" if seconds < math.inf else ""


def rounds_in(folder: Path) -> int:
    """The rounds that a run's folder has."""
    file = folder / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0
