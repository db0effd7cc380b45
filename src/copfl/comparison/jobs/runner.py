"""Runs jobs until all are done or the time is up, here with seeds batched on a GPU, or in other processes.

A job is idempotent: a finished one is not run again, and one that was stopped continues from its checkpoint.
So a job whose worker was lost is submitted again, and one that another process has is left to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from copfl.comparison.jobs.forecast import Forecast
from copfl.comparison.jobs.job import (
    PAUSE,
    Job,
    LeanFolder,
    Start,
    damaged,
    edited_since,
    finished,
    held,
    locked_folder,
)
from copfl.comparison.jobs.processes import Pool, in_processes, only_here, sendable
from copfl.comparison.jobs.starts import started_with
from copfl.comparison.jobs.submission import Done, TimeIsUp, submitted
from copfl.data.samples import Dataset
from copfl.engine import seed_batching
from copfl.engine.cuda_graph import out_of_memory
from copfl.engine.rounds import Round
from copfl.errors import CopflError, RunError, UsageError
from copfl.experiment.experiment import Experiment
from copfl.experiment.preparation import prepare
from copfl.experiment.training import OnRound, execute, simulation_of
from copfl.files import Busy
from copfl.settings import named_code
from copfl.settings.complete import complete
from copfl.settings.data import data_of
from copfl.settings.identity import essential
from copfl.settings.named_code import file_of
from copfl.settings.schema import Run, table_of
from copfl.telling import Pace

logger = logging.getLogger(__name__)
POLL = 2.0  # seconds between two checks of a folder that another process has
BATCHED = (("run", "seed"), ("optimizer", "lr"))  # settings in which the jobs of a batch may differ


class Paused(Exception):
    """The run has the rounds that it should have for now."""


class CannotBatch(Exception):
    """These jobs cannot train as one batch."""


def all_done(
    jobs: Sequence[Job],
    pool: Pool,
    what: str = "runs",
    executor: Executor | None = None,
    end: float = math.inf,
    forecast: Forecast | None = None,
) -> None:
    """Runs every job that is not finished. A failure does not stop the others; a RunError names each.

    Args:
        jobs: The runs.
        pool: The processes that train them; of one, this process does.
        what: What the runs are called.
        executor: Trains them elsewhere.
        end: By the monotonic clock, when the runs are stopped with TimeIsUp: those in other processes at
            once, one in this process after its round.
        forecast: Of a command that has more runs than these.
    """
    forecast = Forecast() if forecast is None else forecast
    distinct = list({job.path: job for job in jobs}.values())
    left = [job for job in distinct if not finished(job)]
    if len(left) < len(distinct):
        logger.info(f"{len(distinct) - len(left)} of {len(distinct)} {what} are there already")
    edited = {job.title: modules for job in left if (modules := edited_since(job))}
    if edited:
        files = ", ".join(sorted({str(file_of(one) or one) for of_job in edited.values() for one in of_job}))
        logger.info(f"{len(edited)} of {len(distinct)} {what} are trained again, as {files} changed since")
    problems, count, total = dict[str, list[str]](), 0, len(left)
    forecast.plan(distinct)
    confined = next(filter(None, (only_here(job.run) for job in left)), "")
    if confined and executor is not None:
        raise UsageError(
            f"{confined}, so an executor cannot train it; define it in a module that can be imported"
        )
    if confined and pool.size > 1:
        logger.info(f"{confined}: the {what} are trained one after another, in this process")
    while left:
        parallel = executor is None and min(pool.size, len(left)) > 1 and not confined
        runner = Runner(end, executor=executor, forecast=forecast)
        work = partial(run_in_worker, code=named_code.named())
        ended = in_processes(left, pool, work, end, forecast) if parallel else runner.run(left)
        with contextlib.closing(ended):  # ends the processes whatever happens here
            busy = list[Path]()
            for job, error, _ in ended:
                if isinstance(error, Busy):
                    busy.append(job.path.absolute())
                    continue
                count += 1
                forecast.ended(job)
                how = ", ".join(filter(None, ["done", forecast.text()]))
                if error is not None:
                    reason = str(error).removeprefix(f"{job.title}: ")
                    problems.setdefault(reason, []).append(job.title)
                    how = f"failed: {reason}"
                logger.info(f"[{count}/{total} {what}] {job.title}: {how}")
        left = [job for job in left if job.path.absolute() in busy]
        if left:
            logger.info(
                f"{len(left)} {what} are in the hands of another process; waiting for it: {left[0].path}"
            )
            while all(held(job.path) for job in left):
                if time.monotonic() > end:
                    raise TimeIsUp
                time.sleep(POLL)
    if problems:
        failed = f"{sum(map(len, problems.values()))} of {len(distinct)} {what} failed"
        named = [f"{'; '.join(titles)}: {reason}" for reason, titles in problems.items()]
        raise RunError(f"{failed}, the others are there. {'; '.join(named)}")


@dataclass
class Runner:
    """How jobs are run in this process."""

    end: float = math.inf  # by the monotonic clock
    pause: float = PAUSE
    batch_seeds: bool = False  # jobs that differ in seed or learning rate train as one batch, if they fit
    known: Callable[[Job], bool] = lambda job: False  # jobs whose results are stored elsewhere
    check: Callable[[Job, Start, str], None] = lambda job, start, note: None  # refuses a run before it trains
    seconds: dict[str, float] = field(default_factory=dict)  # per round, by kind of job, as last measured
    loaded: tuple[str, Dataset] | None = None  # the last data set: jobs share it, and some take a minute
    loading: float = 0.0  # seconds spent on data sets
    executor: Executor | None = None  # trains the jobs elsewhere; `known` and `check` are then not called
    forecast: Forecast | None = None  # of the command; None: no lines while a job trains

    def run(self, jobs: Sequence[Job]) -> Generator[Done]:
        """Every job as it ends. Its folder stays locked until the next one is asked for."""
        groups = _grouped(jobs, BATCHED) if self.batch_seeds else [[job] for job in jobs]
        if self.executor is None:
            for group in groups:
                yield from self._batched(group)
            return
        named = named_code.named()
        work = partial(run_in_worker, pause=self.pause, batch_seeds=self.batch_seeds, code=named)
        for job in (yield from submitted(groups, self.executor, work, self.end, self.forecast)):
            yield Done(job, RunError(f"{job.title}: its executor is broken; run the same command again"), 0.0)

    def _batched(self, jobs: Sequence[Job]) -> Iterator[Done]:
        """These jobs as one batch; else the seeds of each learning rate as one; else each job alone.

        Their folders are locked; an error is of these jobs.
        """
        if time.monotonic() + self.expected(jobs) > self.end:
            raise TimeIsUp
        clock, loading, left = time.monotonic(), self.loading, list(jobs)
        smaller: list[list[Job]] = []
        try:
            with contextlib.ExitStack() as locks:
                trained = self._train(jobs, locks)
                seconds = time.monotonic() - clock - (self.loading - loading)
                if trained:
                    self.seconds[_kind(jobs)] = seconds / jobs[0].run.run.rounds
                for job in jobs:
                    left.remove(job)
                    yield Done(job, None, seconds / len(jobs))
        except CannotBatch:  # trained below, where the error holds no GPU memory
            by_rate = _grouped(jobs, BATCHED[:1])
            smaller = by_rate if len(by_rate) > 1 else [[job] for job in jobs]
        except (CopflError, torch.cuda.OutOfMemoryError) as error:
            for job in left:
                yield Done(job, error, time.monotonic() - clock)
        finally:
            gc.collect()  # the next run, or another process, needs the GPU memory of this one
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        for some in smaller:
            yield from self._batched(some)

    def expected(self, jobs: Sequence[Job]) -> float:
        """Seconds that these jobs will take: as the last of their kind, or the slowest so far; 0 at first."""
        slowest = max(self.seconds.values(), default=0.0)
        return float(jobs[0].run.run.rounds * self.seconds.get(_kind(jobs), slowest))

    def _train(self, jobs: Sequence[Job], locks: contextlib.ExitStack) -> bool:
        """Trains these jobs, several of them as one batch; False if they are finished already."""
        prepared = [self._prepared(job, locks) for job in jobs]
        if len(jobs) == 1 and prepared[0] is not None:
            try:
                with contextlib.suppress(Paused):
                    execute(*prepared[0])
            except RunError as error:
                raise damaged(jobs[0], error) from error
        if len(jobs) == 1:
            return prepared[0] is not None
        fresh = [run for run in prepared if run is not None and not run.folder.begun]
        settings = [simulation_of(run.experiment) for run in fresh]
        if len(fresh) < len(jobs) or not seed_batching.can_batch(settings):
            raise CannotBatch
        try:
            seed_batching.run_batched(settings, [partial(execute, *run) for run in fresh])
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            logger.info("the GPU has no memory for all these runs in one batch: they train one after another")
            raise CannotBatch from error
        return True

    def _prepared(self, job: Job, locks: contextlib.ExitStack) -> ReadyRun | None:
        """The arguments of `execute`, on a data set that is loaded once for many jobs.

        None if another process has finished the job.
        """
        folder = locks.enter_context(locked_folder(job.path))
        if self.known(job) or finished(job):
            return None
        run = job.run
        if folder.begun:
            stored = folder.tables()
            same_device = run.run.device in (Run.of(stored).run.device, "auto")
            layer = stored if same_device else run.tables()  # with the engine that was measured when it began
            run = complete(layer, values={**job.run.values, "partition": folder.partition()})
        key = json.dumps(table_of(run.data), sort_keys=True)
        if self.loaded is None or self.loaded[0] != key:
            self.loaded = None  # before the next one, or both are in memory
            clock = time.monotonic()
            self.loaded = key, data_of(run.data)
            self.loading += time.monotonic() - clock
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, value=self.loaded[1]))
        experiment = prepare(run, validation=job.validation)
        start, rounds = started_with(experiment), experiment.settings.rounds
        self.check(job, start, experiment.federation.dataset.note)
        lean = LeanFolder(job.path, start=start, rounds=rounds, until=job.rounds, pause=self.pause)
        return ReadyRun(experiment, lean, self._on_round(job))

    def _on_round(self, job: Job) -> OnRound:
        """What is called after each round of the job: it says how far it is, and stops it in time."""
        rounds, pace = job.run.run.rounds, Pace()
        stop = _stop_at(self.end, rounds, job.rounds)

        def watch(round: Round, seconds: float) -> None:
            done = round.number + 1
            if self.forecast is not None and done < job.rounds and pace.is_due():
                progress = [f"{job.title}: round {done}/{rounds}", self.forecast.text()]
                logger.info(", ".join(filter(None, progress)))
            stop(round, seconds)

        return watch


class ReadyRun(NamedTuple):
    """The arguments of `execute`."""

    experiment: Experiment
    folder: LeanFolder
    on_round: OnRound


def _grouped(jobs: Sequence[Job], apart_from: Sequence[tuple[str, str]]) -> list[list[Job]]:
    """The jobs in groups of those that are alike but for these settings."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        tables = essential(job.run)
        for title, key in apart_from:
            tables.get(title, {}).pop(key, None)
        groups.setdefault(json.dumps([tables, job.validation], sort_keys=True), []).append(job)
    return list(groups.values())


def _kind(jobs: Sequence[Job]) -> str:
    run = jobs[0].run
    return f"{run.data.name} {run.run.clients} {run.algorithm.name} {len(jobs)}"


def _stop_at(end: float, rounds: int, until: int = 0) -> OnRound:
    def watch(round: Round, seconds: float) -> None:
        if 0 < until <= round.number + 1 < rounds:
            raise Paused
        if time.monotonic() > end and round.number + 1 < rounds:
            raise TimeIsUp

    return watch


# In other processes


_worker = Runner()  # of this process, if it is a worker
_one_at_a_time = threading.Lock()  # torch has one number of threads and one random generator per process


def run_in_worker(
    jobs: list[Job], pause: float = PAUSE, batch_seeds: bool = False, code: Sequence[str] = ()
) -> list[Done]:
    """What the jobs ended with; an exception of this function itself is that its worker was lost.

    Args:
        jobs: The runs.
        pause: Seconds between checkpoints.
        batch_seeds: As of `Runner`.
        code: The modules that the command named.
    """
    with _one_at_a_time, named_code.scope():
        named_code.name(code)
        _worker.pause, _worker.batch_seeds = pause, batch_seeds
        try:
            return list(_worker.run(jobs))
        except (Exception, SystemExit) as error:
            return [Done(job, sendable(error), 0.0) for job in jobs]
