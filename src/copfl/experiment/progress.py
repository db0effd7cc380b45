"""The progress of a run: a bar on a terminal, and elsewhere a line from time to time.

`copfl run` shows it, and every longer command its lines.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from copfl.errors import in_words
from copfl.telling import heard

if TYPE_CHECKING:
    from copfl.engine.rounds import Round
    from copfl.measures.metrics import MetricInfo

logger = logging.getLogger(__name__)
RECENT = 20  # rounds from which the time left is estimated
LONG_RUN = 120  # seconds from which the expected time is printed
BAR_WIDTH, TEXT_WIDTH = 76, 54  # columns of a terminal that has space for the bar, and for the long text


class Listener(NamedTuple):
    """What shows the rounds of a run: functions that are called as it goes on."""

    on_round: Callable[[Round, float], None]
    on_round_alone: Callable[[Round, float], None]  # of the training alone, which follows


@contextlib.contextmanager
def bar(rounds: int, out: IO[str], metric: MetricInfo, alone: int = 0) -> Iterator[Listener]:
    """A bar of the whole run, which also shows what else the run tells.

    Args:
        rounds: Of the run.
        out: The terminal.
        metric: The one that is shown.
        alone: Rounds of the training alone that follows.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=out)
    described = _described(rounds, metric, alone, long=console.width >= TEXT_WIDTH)
    columns = (TextColumn("{task.fields[place]}"), BarColumn(20), TextColumn("{task.description}"))
    progress = Progress(*(columns if console.width >= BAR_WIDTH else columns[::2]), console=console)
    job = progress.add_task("first round ...", total=rounds + alone, place="")

    def on_round(round: Round, seconds: float, is_alone: bool = False) -> None:
        done, text = round.number + 1, described(round, seconds, is_alone)
        position = f"alone {done}/{alone}" if is_alone else f"round {done}/{rounds}"
        progress.update(job, completed=rounds * is_alone + done, place=position, description=text)

    def show(line: str) -> None:
        progress.update(job, place="", description=line)

    progress.start()
    try:
        with heard(
            show, but_of=(__name__,), at_any_pace=True
        ):  # not of the rounds, which the bar shows better
            yield Listener(on_round, lambda round, seconds: on_round(round, seconds, True))
    finally:
        progress.live.transient = not progress.tasks[job].completed  # without a round, the bar disappears
        progress.stop()


@contextlib.contextmanager
def bar_of_runs(out: IO[str], left: Callable[[], float]) -> Iterator[Callable[[str], None]]:
    """A bar of all runs of a command, with the time that is left, below the lines that are printed.

    Args:
        out: The terminal.
        left: The seconds that are left; infinite as long as nothing is known.

    Yields:
        A function that prints a line above the bar.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    console, begin = Console(file=out), time.monotonic()

    def shown() -> Table | Text:
        past, rest = time.monotonic() - begin, left()
        if math.isinf(rest):
            return Text("the time that is left is known after the first round ...")
        if not rest:  # what follows the runs
            return Text()
        row = Table.grid(padding=(0, 1))
        row.add_row(
            ProgressBar(past + rest, past, width=20),
            Text(f"{span(past)} of {span(past + rest)}, {span(rest)} left"),
        )
        return row

    with Live(console=console, get_renderable=shown, refresh_per_second=1, transient=True) as live:

        def log(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            live.refresh()

        yield log


def lines(rounds: int, metric: MetricInfo, alone: int = 0) -> Listener:
    """Tells how each round went.

    Args:
        rounds: Of the run.
        metric: The primary one.
        alone: Rounds of training alone that follow; 0: none.
    """
    described = _described(rounds, metric, alone, long=True)

    def on_round(round: Round, seconds: float, is_alone: bool = False) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            title, count = ("training alone, round", alone) if is_alone else ("round", rounds)
            logger.debug(f"{title} {round.number + 1}/{count}: {described(round, seconds, is_alone)}")

    return Listener(on_round, lambda round, seconds: on_round(round, seconds, True))


def counted(title: str, unit: str, total: int, tell: Callable[[str], None]) -> Callable[[int], None]:
    """A function that takes the number of further rounds that are done, and tells how long the others take.

    Args:
        title: Of the work.
        unit: What is counted, such as "round".
        total: Its rounds.
        tell: As `logger.debug`.
    """
    begin, done = time.monotonic(), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        each = (time.monotonic() - begin) / done
        tell(f"{title}, {unit} {done:,}/{total:,}: {span(each * (total - done))} left")

    return advance


class TimeLeft:
    """The seconds that are left of a run: its rounds, what is computed after them, the training alone.

    A round of the training alone is taken for one of the run until it begins, and what is saved for one more.
    """

    def __init__(self, rounds: int, alone: int = 0) -> None:
        self.rounds, self.alone = rounds, alone
        self.seconds: dict[bool, list[float]] = {False: [], True: []}  # of the latest rounds; True: alone

    def after(self, done: int, seconds: float, is_alone: bool = False) -> float:
        """The estimate after a round; after the first one of a run, the most that it may be.

        Args:
            done: The rounds that are done, of the run or of the training alone.
            seconds: What the last one took.
            is_alone: Whether it is one of the training alone.
        """
        recent = self.seconds[is_alone]
        recent[:] = [*recent, seconds][-RECENT:]
        still = self.alone - done if is_alone else self.rounds - done + self.alone + bool(self.alone)
        # The first round also prepares: it is an upper bound, and of the training alone the others are another guess.
        usual = recent[1:] if 1 < len(recent) < RECENT else recent
        each = sum(usual) / len(usual)
        if is_alone and len(recent) == 1 and (shared := self.seconds[False]):
            each = min(each, sum(shared) / len(shared))
        return still * each


def expected(seconds: float, rounds: int, processes: int, baseline: bool) -> str:
    """A line about the time that a long run will take on a CPU; empty for a short one.

    Args:
        seconds: What the rounds take.
        rounds: Of the run.
        processes: That train them.
        baseline: Whether as many rounds of training alone follow.
    """
    whole = seconds * (1 + baseline)
    if whole < LONG_RUN:
        return ""
    without = in_words("--no-local-baseline", "local_baseline=False")
    alone = f", half of it for the training alone ({without})" * baseline
    return (
        f"{rounds} rounds will take about {span(whole)} or more with {processes} process"
        f"{'es' * (processes > 1)}{alone}; {in_words('--rounds and --epochs make', 'rounds= makes')} it shorter"
    )


def _described(
    rounds: int, metric: MetricInfo, alone: int, long: bool
) -> Callable[[Round, float, bool], str]:
    """A function that describes a round: mean primary metric, shared fraction, time left."""
    left = TimeLeft(rounds, alone)

    def text(round: Round, seconds: float, is_alone: bool) -> str:
        words = []
        values = round.clients.get(metric.name, np.array(np.nan))
        if not np.isnan(values).all():
            shown = f"{metric.text(float(np.nanmean(values)))}{metric.unit}"
            words.append(f"{metric.title} {shown}" if long else shown)
        if round.federation.get("shared") and long:  # of training alone it is 0, and says nothing
            words.append(f"shared {100 * round.federation['shared']:.0f} %")
        rest = left.after(round.number + 1, seconds, is_alone)
        is_bound = rest > 0 and not is_alone and len(left.seconds[False]) == 1
        words.append(f"{'at most ' * is_bound}{span(rest)} left")
        return ", ".join(words)

    return text


def span(seconds: float) -> str:
    """Such as 0:42 or 3:05:10."""
    hours, rest = divmod(round(seconds), 3600)
    return time.strftime(f"{hours}:%M:%S" if hours else "%M:%S", time.gmtime(rest)).removeprefix("0")
