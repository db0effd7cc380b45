"""What a person sees while a run goes on: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import IO, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from copfl.engine.simulate import Round

RECENT = 20  # rounds that the time left is reckoned from


class Bar:
    """Round, mean personal accuracy, shared fraction, time left; to be called with each round as it ends."""

    def __init__(self, rounds: int, out: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.rounds, self.recent = rounds, list[float]()
        console = Console(file=out)
        wide, self.roomy = (
            console.width >= 76,
            console.width >= 54,
        )  # where there is no room, the bar goes first
        columns = (TextColumn("{task.fields[place]}"), BarColumn(20), TextColumn("{task.description}"))
        self.progress = Progress(*(columns if wide else columns[::2]), console=console)
        self.job = self.progress.add_task("first round ...", total=rounds, place="")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.live.transient = not self.recent  # a bar that never moved says nothing
        self.progress.stop()

    def __call__(self, round: Round, seconds: float) -> None:
        self.recent = [*self.recent, seconds][-RECENT:]
        parts = []
        if "accuracy" in round.clients and not np.isnan(round.clients["accuracy"]).all():
            parts.append(
                f"{'accuracy ' if self.roomy else ''}{100 * np.nanmean(round.clients['accuracy']):.1f} %"
            )
        if "shared" in round.federation and self.roomy:
            parts.append(f"shared {100 * round.federation['shared']:.0f} %")
        left = (self.rounds - round.number - 1) * sum(self.recent) / len(self.recent)
        parts.append(f"{span(left)} left")
        done = round.number + 1
        place = f"round {done}/{self.rounds}"
        self.progress.update(self.job, completed=done, place=place, description=", ".join(parts))


def span(seconds: float) -> str:
    """Such as 0:42 or 3:05:10."""
    hours, rest = divmod(round(seconds), 3600)
    return time.strftime(f"{hours}:%M:%S" if hours else "%M:%S", time.gmtime(rest)).removeprefix("0")
