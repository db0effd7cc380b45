"""The progress bar of a run on a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from copfl.core.metrics import MetricInfo
from copfl.engine.rounds import Round

RECENT = 20  # rounds from which the time left is estimated
BAR_WIDTH, TEXT_WIDTH = 76, 54  # columns of a terminal that has space for the bar, and for the long text


@contextlib.contextmanager
def bar(rounds: int, out: IO[str], metric: MetricInfo) -> Iterator[Callable[[Round, float], None]]:
    """A function that shows a round as it ends: mean primary metric, shared fraction, time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console, recent = Console(file=out), list[float]()
    long = console.width >= TEXT_WIDTH
    columns = (TextColumn("{task.fields[place]}"), BarColumn(20), TextColumn("{task.description}"))
    progress = Progress(*(columns if console.width >= BAR_WIDTH else columns[::2]), console=console)
    job = progress.add_task("first round ...", total=rounds, place="")

    def on_round(round: Round, seconds: float) -> None:
        recent[:] = [*recent, seconds][-RECENT:]
        done, parts = round.number + 1, []
        values = round.clients.get(metric.name, np.array(np.nan))
        if not np.isnan(values).all():
            shown = f"{metric.text(float(np.nanmean(values)))}{metric.unit}"
            parts.append(f"{metric.title} {shown}" if long else shown)
        if "shared" in round.federation and long:
            parts.append(f"shared {100 * round.federation['shared']:.0f} %")
        parts.append(f"{span((rounds - done) * sum(recent) / len(recent))} left")
        progress.update(job, completed=done, place=f"round {done}/{rounds}", description=", ".join(parts))

    progress.start()
    try:
        yield on_round
    finally:
        progress.live.transient = not recent  # without a round, the bar disappears
        progress.stop()


def span(seconds: float) -> str:
    """Such as 0:42 or 3:05:10."""
    hours, rest = divmod(round(seconds), 3600)
    return time.strftime(f"{hours}:%M:%S" if hours else "%M:%S", time.gmtime(rest)).removeprefix("0")
