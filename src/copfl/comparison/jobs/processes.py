"""Processes of this machine that train jobs, on its CPU or sharing its GPU.

`runner.all_done` uses a `Pool` where several runs train at a time. Other machines are for `executors`.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Generator, Mapping, Sequence
from concurrent import futures
from multiprocessing import connection, parent_process
from types import MappingProxyType

import numpy as np

from copfl.comparison.jobs.copies import process_context
from copfl.comparison.jobs.forecast import Forecast
from copfl.comparison.jobs.job import Job
from copfl.comparison.jobs.submission import Done, Work, submitted
from copfl.engine import mps
from copfl.engine.autotune import runs_at_a_time
from copfl.errors import COMMAND_LINE, RunError, raised_as
from copfl.experiment.experiment import Experiment
from copfl.settings.schema import Run


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
        self.exit_codes: list[int | None] = []  # of the processes that ended last

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.end(at_once=error is not None)

    def started(self) -> futures.ProcessPoolExecutor:
        """The processes; the last jobs' processes, if they were not ended."""
        if self.workers is None:
            on_gpu = self.device.startswith("cuda") and self.size > 1
            environment = self.sharing.enter_context(mps.shared()) if on_gpu else {}
            self.workers = executor_of(self.size, self.device, environment)
        return self.workers

    def end(self, at_once: bool = False) -> None:
        """Ends the processes; at once: also while they train."""
        if self.workers is not None:
            processes = list((self.workers._processes or {}).values())
            for process in processes if at_once else ():
                process.terminate()
            self.workers.shutdown(cancel_futures=True)
            self.workers, self.exit_codes = None, [process.exitcode for process in processes]
        self.sharing.close()


def pool_for(experiment: Experiment, jobs: int) -> Pool:
    """A pool of so many processes for runs such as this one; 0: as many as the machine trains at a time.

    Args:
        experiment: A run such as those that will train.
        jobs: How many train at a time; 0: as many as the machine can.
    """
    e = experiment
    most = runs_at_a_time(e.task, e.federation, e.settings.participants) // max(1, e.settings.workers)
    return Pool(jobs or max(1, most), e.settings.device)


def executor_of(
    size: int, device: str, environment: Mapping[str, str] = MappingProxyType({})
) -> futures.ProcessPoolExecutor:
    """Processes that start as `copies` says and have the environment of this one as it is now.

    Args:
        size: How many there are at most.
        device: Where they train, as the setting names it.
        environment: Further variables.
    """
    variables = {**os.environ, **environment}
    lacking = "processes cannot be started: {}; they need some space in /dev/shm, and one run at a time (jobs 1) none"
    with raised_as(RunError, lacking, OSError):
        return futures.ProcessPoolExecutor(size, process_context(device), _begin, (variables,))


def _begin(environment: Mapping[str, str]) -> None:
    """Makes a copied process one of its own. It ignores Ctrl-C.

    It ends with its parent, so that no run folder stays locked.
    """
    os.environ.clear()
    os.environ.update(environment)  # a GPU's driver reads it at the first use
    np.random.seed()  # noqa: NPY002  copies would draw the same numbers in a user's code that does not seed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent, which then ends this process
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def only_here(run: Run) -> str:
    """Why no other process can train the run, such as "the model Net is of this program"; empty if it can."""
    for kind in run.values:
        try:
            is_here = b"__main__" in pickle.dumps(run.values[kind])
        except Exception:  # pickle's own, and any of the value's methods
            is_here = True
        if is_here:
            return f"the {kind} {getattr(run, kind).title} is of this program, and no other process has it"
    for kind, chosen in (("algorithm", run.algorithm), ("optimizer", run.optimizer)):
        if chosen.title != chosen.name:
            return f"the {kind} {chosen.title} is of this program, and no other process has it"
    return ""


def sendable(error: BaseException) -> Exception:
    """The error with its traceback as a note; in words where it cannot be pickled or asks the process to end.

    A pool breaks at an error that the other process cannot read, as if this process had been killed.
    """
    error.add_note("".join(traceback.format_exception(error)))  # a traceback cannot be sent
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        if isinstance(error, Exception):
            return error
    in_words = RuntimeError(f"{type(error).__name__}: {error}")
    in_words.__notes__ = error.__notes__
    return in_words


def in_processes(
    jobs: Sequence[Job],
    pool: Pool,
    work: Work,
    end: float = math.inf,
    forecast: Forecast | None = None,
) -> Generator[Done]:
    """Every job as it ends, from the processes of the pool; each does the work.

    A killed process, perhaps for lack of memory, ends its pool; what is left is tried again sequentially.

    Args:
        jobs: The runs.
        pool: The processes.
        work: What a process does with jobs.
        end: By the monotonic clock, when TimeIsUp ends the runs.
        forecast: Says how much time is left.
    """
    for job in (yield from _in_pool(jobs, pool, work, end, forecast)):
        with Pool(1, pool.device) as alone:
            if (yield from _in_pool([job], alone, work, end, forecast)):
                yield Done(job, RunError(f"{job.title}: its process {_fate(alone.exit_codes)}"), 0.0)


def _fate(exit_codes: Sequence[int | None]) -> str:
    """How a process ended that should not have, by its exit code, and what to do."""
    code = next((code for code in exit_codes if code), -signal.SIGKILL)
    if code == -signal.SIGKILL:
        return "was killed, perhaps for lack of memory; run the same again with one process (jobs 1)"
    if code < 0:
        return f"crashed ({signal.Signals(-code).name}); run the same again with one process (jobs 1)"
    guard = ""
    if COMMAND_LINE not in os.environ:
        guard = ', and a script calls copfl inside `if __name__ == "__main__":`'
    return f"ended with exit code {code}; what it printed says why{guard}"


def _in_pool(
    jobs: Sequence[Job], pool: Pool, work: Work, end: float, forecast: Forecast | None
) -> Generator[Done, None, list[Job]]:
    """Every job as it ends; returns those that a killed process left undone."""
    complete = False
    try:
        groups = [[job] for job in jobs]
        left = yield from submitted(groups, pool.started(), work, end, forecast)
        complete = not left
    finally:
        if not complete:
            pool.end(at_once=True)
    return left
