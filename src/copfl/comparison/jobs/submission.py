"""Jobs that an executor trains elsewhere: submitted, followed, and submitted again where a worker is lost.

Both the processes of this machine and the executors of a cluster come here: each is an executor.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch

from copfl.comparison.jobs.forecast import Forecast, rounds_in
from copfl.comparison.jobs.job import Job
from copfl.errors import CopflError, RunError
from copfl.telling import Pace

logger = logging.getLogger(__name__)
ATTEMPTS = 3  # for a job whose worker is lost
SHOWN = 8  # running jobs that a line of progress names


class TimeIsUp(Exception):
    """The time limit is reached, or the next run would not end before it."""


class Done(NamedTuple):
    """A job whose rounds are done, or the error that ended it."""

    job: Job
    error: Exception | None
    seconds: float


Work = Callable[[list[Job]], list[Done]]  # what a worker does


def submitted(
    groups: Sequence[list[Job]],
    executor: Executor,
    work: Work,
    end: float = math.inf,
    forecast: Forecast | None = None,
) -> Generator[Done, None, list[Job]]:
    """Every job of these groups as it ends, from any executor. Returns what is left when it breaks.

    A group whose worker was lost is submitted again, `ATTEMPTS` times in all.

    Args:
        groups: Jobs that train together.
        executor: Where they train.
        work: What a worker does with a group.
        end: By the monotonic clock, when TimeIsUp is raised.
        forecast: Says how much time is left.
    """
    waiting: dict[Future[list[Done]], tuple[list[Job], int]] = {}
    left, pace = list[Job](), Pace()

    def submit(group: list[Job], attempt: int) -> None:
        placed = [job._replace(path=job.path.absolute()) for job in group]  # a worker has its own folder
        waiting[executor.submit(work, placed)] = group, attempt

    try:
        for group in groups:
            submit(group, 1)
        while waiting:
            patience = max(0.0, min(pace.next, end) - time.monotonic())
            ended, _ = futures.wait(waiting, patience, futures.FIRST_COMPLETED)
            if not ended and time.monotonic() >= end:
                raise TimeIsUp
            if not ended and pace.is_due():
                logger.info(_progress([job for group, _ in waiting.values() for job in group], forecast))
            for future in [future for future in waiting if future in ended]:  # in the order of the jobs
                group, attempt = waiting.pop(future)
                error = futures.CancelledError() if future.cancelled() else future.exception()
                if error is None:
                    for done in future.result():
                        if not isinstance(done.error, CopflError | torch.cuda.OutOfMemoryError | None):
                            raise done.error  # not the user's
                        yield done
                elif isinstance(error, futures.BrokenExecutor):
                    left += group
                elif attempt < ATTEMPTS:
                    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                    logger.info(f"{group[0].title}: its worker was lost ({reason}); submitted again")
                    submit(group, attempt + 1)
                else:
                    often = f"{ATTEMPTS} times, perhaps for lack of memory, at last with"
                    for job in group:
                        lost = f"{job.title}: its worker was lost {often}: {error}"
                        yield Done(job, RunError(lost), 0.0)
    finally:
        for future in waiting:
            future.cancel()
    return left


def _progress(jobs: Sequence[Job], forecast: Forecast | None = None) -> str:
    """Such as "copfl, seed 0: round 12/40; local, seed 1: round 3/40; 7 waiting; about 2:10 left"."""
    rounds = [(job, rounds_in(job.path)) for job in jobs]
    running = [f"{job.title}: round {done}/{job.run.run.rounds}" for job, done in rounds if done]
    more = [f"{len(running) - SHOWN} more"] if len(running) > SHOWN else []
    left = [] if forecast is None else [forecast.text()]
    return "; ".join(filter(None, [*running[:SHOWN], *more, f"{len(jobs) - len(running)} waiting", *left]))
