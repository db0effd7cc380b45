"""The progress of a run: a bar on a terminal, and elsewhere a line from time to time."""

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
LONG_RUN = 120  # seconds from which the expected time is printed
INTERVAL = 30  # seconds between two lines, so that a short run prints none
BAR_WIDTH, TEXT_WIDTH = 76, 54  # columns of a terminal that has space for the bar, and for the long text


@contextlib.contextmanager
def bar(rounds: int, out: IO[str], metric: MetricInfo) -> Iterator[Callable[[Round, float], None]]:
    """A function that shows a round as it ends."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=out)
    described = _described(rounds, metric, long=console.width >= TEXT_WIDTH)
    columns = (TextColumn("{task.fields[place]}"), BarColumn(20), TextColumn("{task.description}"))
    progress = Progress(*(columns if console.width >= BAR_WIDTH else columns[::2]), console=console)
    job = progress.add_task("first round ...", total=rounds, place="")

    def on_round(round: Round, seconds: float) -> None:
        done, text = round.number + 1, described(round, seconds)
        progress.update(job, completed=done, place=f"round {done}/{rounds}", description=text)

    progress.start()
    try:
        yield on_round
    finally:
        progress.live.transient = not progress.tasks[job].completed  # without a round, the bar disappears
        progress.stop()


def lines(
    rounds: int, out: IO[str], metric: MetricInfo, title: str = "round"
) -> Callable[[Round, float], None]:
    """A function that prints a line for a round that ends at least INTERVAL seconds after the last line."""
    described, printed = _described(rounds, metric, long=True), time.monotonic()

    def on_round(round: Round, seconds: float) -> None:
        nonlocal printed
        text, now = described(round, seconds), time.monotonic()
        if now - printed >= INTERVAL:
            printed = now
            print(f"{title} {round.number + 1}/{rounds}: {text}", file=out, flush=True)

    return on_round


def expected(seconds: float, rounds: int, processes: int, baseline: bool) -> str:
    """A line about the time that a long run will take on a CPU; empty for a short one."""
    if seconds < LONG_RUN:
        return ""
    alone = ", and about as long again for the training alone (--no-local-baseline)" * baseline
    return (
        f"{rounds} rounds will take about {span(seconds)} or more with {processes} process"
        f"{'es' * (processes > 1)}{alone}; --rounds and --epochs make it shorter"
    )


def _described(rounds: int, metric: MetricInfo, long: bool) -> Callable[[Round, float], str]:
    """A function that describes a round: mean primary metric, shared fraction, time left."""
    recent = list[float]()

    def text(round: Round, seconds: float) -> str:
        recent[:] = [*recent, seconds][-RECENT:]
        parts = []
        values = round.clients.get(metric.name, np.array(np.nan))
        if not np.isnan(values).all():
            shown = f"{metric.text(float(np.nanmean(values)))}{metric.unit}"
            parts.append(f"{metric.title} {shown}" if long else shown)
        if round.federation.get("shared") and long:  # of training alone it is 0, and says nothing
            parts.append(f"shared {100 * round.federation['shared']:.0f} %")
        parts.append(f"{span((rounds - round.number - 1) * sum(recent) / len(recent))} left")
        return ", ".join(parts)

    return text


def span(seconds: float) -> str:
    """Such as 0:42 or 3:05:10."""
    hours, rest = divmod(round(seconds), 3600)
    return time.strftime(f"{hours}:%M:%S" if hours else "%M:%S", time.gmtime(rest)).removeprefix("0")
