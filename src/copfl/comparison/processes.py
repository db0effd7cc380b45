"""Processes of this machine that train jobs, on its CPU or sharing its GPU."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent import futures
from multiprocessing import connection, parent_process
from types import MappingProxyType

from copfl.comparison.copies import process_context
from copfl.comparison.forecast import Forecast
from copfl.comparison.jobs import Job
from copfl.comparison.submission import Done, Log, Work, submitted
from copfl.engine import mps
from copfl.engine.autotune import runs_at_a_time
from copfl.errors import RunError
from copfl.experiment.result import Experiment


class Pool:
    """Processes that import torch once and run one job after another, until the `with` block ends.

    On a GPU they share it, see `engine.mps`.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        """None of the processes is started yet.

        Args:
            size: How many jobs train at a time.
            device: Where, as torch names it.
        """
        self.size, self.device = size, device
        self.workers: futures.ProcessPoolExecutor | None = None
        self.sharing = contextlib.ExitStack()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.end(at_once=error is not None)

    def started(self, log: Log) -> futures.ProcessPoolExecutor:
        """The processes; those of the last jobs, if they were not ended."""
        if self.workers is None:
            on_gpu = self.device.startswith("cuda") and self.size > 1
            environment = self.sharing.enter_context(mps.shared(log)) if on_gpu else {}
            self.workers = futures.ProcessPoolExecutor(
                self.size, process_context(self.device), init_worker, (environment,)
            )
        return self.workers

    def end(self, at_once: bool = False) -> None:
        """Ends the processes; at once: also while they train."""
        if self.workers is not None:
            for process in list((self.workers._processes or {}).values()) if at_once else ():
                process.terminate()
            self.workers.shutdown(cancel_futures=True)
            self.workers = None
        self.sharing.close()


def pool_for(experiment: Experiment, jobs: int) -> Pool:
    """A pool of so many processes for runs such as this one; 0: as many as the machine trains at a time."""
    e = experiment
    most = runs_at_a_time(e.task, e.federation, e.settings.participants) // max(1, e.settings.workers)
    return Pool(jobs or max(1, most), e.settings.device)


def init_worker(environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """This process ignores Ctrl-C and ends with its parent, so that no run folder stays locked."""
    os.environ.update(environment)  # the driver reads it at the first use of a GPU
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent, which then ends this process
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def in_processes(
    jobs: Sequence[Job],
    pool: Pool,
    work: Work,
    log: Log = print,
    end: float = math.inf,
    forecast: Forecast | None = None,
) -> Generator[Done]:
    """Every job as it ends, from the processes of the pool, of which each does the work.

    A killed process, perhaps for lack of memory, ends its pool; what is left is tried again sequentially.
    """
    for job in (yield from _in_pool(jobs, pool, work, log, end, forecast)):
        with Pool(1, pool.device) as alone:
            if (yield from _in_pool([job], alone, work, log, end, forecast)):
                advice = "perhaps for lack of memory; run the same again with one process (jobs 1)"
                yield Done(job, RunError(f"{job.title}: its process was killed, {advice}"), 0.0)


def _in_pool(
    jobs: Sequence[Job], pool: Pool, work: Work, log: Log, end: float, forecast: Forecast | None
) -> Generator[Done, None, list[Job]]:
    """Every job as it ends; returns those that a killed process left undone."""
    complete = False
    try:
        groups = [[job] for job in jobs]
        left = yield from submitted(groups, pool.started(log), work, log, end, forecast)
        complete = not left
    finally:
        if not complete:
            pool.end(at_once=True)
    return left
