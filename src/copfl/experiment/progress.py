"""The progress bar of a run on a terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import IO, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from copfl.engine.rounds import Round

RECENT = 20  # rounds from which the time left is estimated
BAR_WIDTH, TEXT_WIDTH = 76, 54  # columns of a terminal that has space for the bar, and for the long text


class Bar:
    """Round, mean personal accuracy, shared fraction, time left; called with each round as it ends."""

    def __init__(self, rounds: int, out: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=out)
        self.rounds, self.recent, self.long = rounds, list[float](), console.width >= TEXT_WIDTH
        columns = (TextColumn("{task.fields[place]}"), BarColumn(20), TextColumn("{task.description}"))
        shown = columns if console.width >= BAR_WIDTH else columns[::2]
        self.progress = Progress(*shown, console=console)
        self.job = self.progress.add_task("first round ...", total=rounds, place="")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.live.transient = not self.recent  # without a round, the bar disappears
        self.progress.stop()

    def __call__(self, round: Round, seconds: float) -> None:
        self.recent = [*self.recent, seconds][-RECENT:]
        done, parts = round.number + 1, []
        accuracy = round.clients.get("accuracy", np.array(np.nan))
        if not np.isnan(accuracy).all():
            parts.append(f"{'accuracy ' if self.long else ''}{100 * np.nanmean(accuracy):.1f} %")
        if "shared" in round.federation and self.long:
            parts.append(f"shared {100 * round.federation['shared']:.0f} %")
        parts.append(f"{span((self.rounds - done) * sum(self.recent) / len(self.recent))} left")
        place = f"round {done}/{self.rounds}"
        self.progress.update(self.job, completed=done, place=place, description=", ".join(parts))


def span(seconds: float) -> str:
    """Such as 0:42 or 3:05:10."""
    hours, rest = divmod(round(seconds), 3600)
    return time.strftime(f"{hours}:%M:%S" if hours else "%M:%S", time.gmtime(rest)).removeprefix("0")
