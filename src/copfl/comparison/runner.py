"""Runs jobs: in this process, in several or on a cluster, until a time limit, with seeds batched on a GPU.

A job is idempotent: a finished one is not run again, and one that was stopped continues from its checkpoint.
So a job whose worker was lost is submitted again, and one that another process has is left to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from copfl.comparison.jobs import PAUSE, Job, LeanFolder, Start, damaged, finished, held, locked_folder
from copfl.data.samples import Dataset
from copfl.engine import mps, seed_batching
from copfl.engine.autotune import runs_at_a_time
from copfl.engine.cuda_graph import out_of_memory
from copfl.engine.rounds import Round
from copfl.errors import CopflError, RunError
from copfl.experiment.folder import RunFolder
from copfl.experiment.progress import Pace, span
from copfl.experiment.run import Experiment, OnRound, execute, prepare, simulation_of
from copfl.files import Busy
from copfl.settings.complete import complete
from copfl.settings.data import data_of
from copfl.settings.identity import essential
from copfl.settings.schema import Run, table_of

Log = Callable[[str], None]
ATTEMPTS = 3  # for a job whose worker is lost
POLL = 2.0  # seconds between two checks of a folder that another process has
BATCHED = (("run", "seed"), ("optimizer", "lr"))  # settings in which the jobs of a batch may differ
SHOWN = 8  # running jobs that a line of progress names


class TimeIsUp(Exception):
    """The time limit is reached, or the next run would not end before it."""


class Paused(Exception):
    """The run has the rounds that it should have for now."""


class CannotBatch(Exception):
    """These jobs cannot train as one batch."""


class Done(NamedTuple):
    """A job whose rounds are done, or the error that ended it."""

    job: Job
    error: Exception | None
    seconds: float


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
        part = sum(min(rounds, rounds_in(path) - self.had[path]) for path, rounds in due.items())
        trained, remaining = self.trained + part, sum(due.values()) - part + self.later
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


def all_done(
    jobs: Sequence[Job],
    pool: Pool,
    log: Log,
    what: str = "runs",
    executor: Executor | None = None,
    end: float = math.inf,
    forecast: Forecast | None = None,
) -> None:
    """Runs every job that is not finished. A failure does not stop the others; a RunError names each.

    Args:
        jobs: The runs.
        pool: The processes that train them; of one, this process does.
        log: Gets lines of progress, with the time that is left.
        what: What the runs are called.
        executor: Trains them elsewhere.
        end: By the monotonic clock, when the runs are stopped with TimeIsUp: those in other processes at once,
            one in this process after its round.
        forecast: Of a command that has more runs than these.
    """
    forecast = Forecast() if forecast is None else forecast
    distinct = list({job.path: job for job in jobs}.values())
    left = [job for job in distinct if not finished(job)]
    if len(left) < len(distinct):
        log(f"{len(distinct) - len(left)} of {len(distinct)} {what} are there already")
    problems, count, total = dict[str, list[str]](), 0, len(left)
    forecast.plan(distinct)
    while left:
        parallel = executor is None and min(pool.size, len(left)) > 1
        runner = Runner(log, end, executor=executor, forecast=forecast)
        ended = in_processes(left, pool, log, end, forecast) if parallel else runner.run(left)
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
                log(f"[{count}/{total} {what}] {job.title}: {how}")
        left = [job for job in left if job.path.absolute() in busy]
        if left:
            log(f"{len(left)} {what} are in the hands of another process; waiting for it: {left[0].path}")
            while all(held(job.path) for job in left):
                if time.monotonic() > end:
                    raise TimeIsUp
                time.sleep(POLL)
    if problems:
        failed = f"{sum(map(len, problems.values()))} of {len(distinct)} {what} failed"
        named = [f"{'; '.join(titles)}: {reason}" for reason, titles in problems.items()]
        raise RunError(f"{failed}, the others are there. {'; '.join(named)}")


# In this process


@dataclass
class Runner:
    """How jobs are run in this process."""

    log: Log = print
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
        work = partial(_run_in_worker, pause=self.pause, batch_seeds=self.batch_seeds)
        for job in (yield from submitted(groups, self.executor, work, self.log, self.end, self.forecast)):
            yield Done(job, RunError(f"{job.title}: its executor is broken; run the same command again"), 0.0)

    def _batched(self, jobs: Sequence[Job]) -> Iterator[Done]:
        """These jobs as one batch; else the seeds of each learning rate as one; else each job alone."""
        smaller: list[list[Job]] = []
        try:
            yield from self._attempt(jobs)
        except CannotBatch:  # attempted below, where the error holds no GPU memory
            by_rate = _grouped(jobs, BATCHED[:1])
            smaller = by_rate if len(by_rate) > 1 else [[job] for job in jobs]
        for some in smaller:
            yield from self._batched(some)

    def expected(self, jobs: Sequence[Job]) -> float:
        """Seconds that these jobs will take: as the last of their kind, or the slowest so far; 0 at first."""
        slowest = max(self.seconds.values(), default=0.0)
        return float(jobs[0].run.run.rounds * self.seconds.get(_kind(jobs), slowest))

    def _attempt(self, jobs: Sequence[Job]) -> Iterator[Done]:
        if time.monotonic() + self.expected(jobs) > self.end:
            raise TimeIsUp
        clock, loading, left = time.monotonic(), self.loading, list(jobs)
        try:
            with contextlib.ExitStack() as locks:
                trained = self._train(jobs, locks)
                seconds = time.monotonic() - clock - (self.loading - loading)
                if trained:
                    self.seconds[_kind(jobs)] = seconds / jobs[0].run.run.rounds
                for job in jobs:
                    left.remove(job)
                    yield Done(job, None, seconds / len(jobs))
        except (CopflError, torch.cuda.OutOfMemoryError) as error:
            for job in left:
                yield Done(job, error, time.monotonic() - clock)
        finally:
            gc.collect()  # the next run, or another process, needs the GPU memory of this one
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

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
        fresh = [one for one in prepared if one is not None and not one.folder.begun]
        settings = [simulation_of(one.experiment) for one in fresh]
        if len(fresh) < len(jobs) or not seed_batching.can_batch(settings):
            raise CannotBatch
        try:
            seed_batching.run_batched(settings, [partial(execute, *one) for one in fresh])
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.log("the GPU has no memory for all these runs in one batch: they train one after another")
            raise CannotBatch from error
        return True

    def _prepared(self, job: Job, locks: contextlib.ExitStack) -> Prepared | None:
        """The arguments of `execute`; None if another process has finished the job."""
        folder = locks.enter_context(locked_folder(job.path))
        if self.known(job) or finished(job):
            return None
        experiment = self._experiment(job, folder)
        start, rounds = started_with(experiment), experiment.settings.rounds
        self.check(job, start, experiment.federation.dataset.note)
        lean = LeanFolder(job.path, start=start, rounds=rounds, until=job.rounds, pause=self.pause)
        return Prepared(experiment, lean, self._on_round(job))

    def _on_round(self, job: Job) -> OnRound:
        """What is called after each round of the job: it says how far it is, and stops it in time."""
        rounds, pace = job.run.run.rounds, Pace()
        stop = _stop_at(self.end, rounds, job.rounds)

        def watch(round: Round, seconds: float) -> None:
            done = round.number + 1
            if self.forecast is not None and done < job.rounds and pace.is_due():
                parts = [f"{job.title}: round {done}/{rounds}", self.forecast.text()]
                self.log(", ".join(filter(None, parts)))
            stop(round, seconds)

        return watch

    def _experiment(self, job: Job, folder: RunFolder) -> Experiment:
        """The experiment of the job, on a data set that is loaded once for many jobs."""
        run = job.run
        if folder.begun:
            stored = folder.tables()
            same_device = Run.of(stored).run.device == run.run.device
            layer = stored if same_device else run.tables()  # with the engine that was measured when it began
            run = complete(layer, values={"partition": folder.partition()})
        key = json.dumps(table_of(run.data), sort_keys=True)
        if self.loaded is None or self.loaded[0] != key:
            self.loaded = None  # before the next one, or both are in memory
            clock = time.monotonic()
            self.loaded = key, data_of(run.data)
            self.loading += time.monotonic() - clock
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, value=self.loaded[1]))
        return prepare(run, validation=job.validation)


class Prepared(NamedTuple):
    """The arguments of `execute`."""

    experiment: Experiment
    folder: LeanFolder
    on_round: OnRound


def started_with(experiment: Experiment) -> Start:
    """Fingerprints of what a run of the experiment begins with, as `environment_of` reads them."""
    initial = experiment.task.initial.detach().cpu().numpy().tobytes()
    return {
        "partition": experiment.federation.partition.fingerprint[:16],
        "samples": experiment.fingerprints()["samples"],
        "weights": hashlib.sha256(initial).hexdigest()[:16],
    }


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


def submitted(
    groups: Sequence[list[Job]],
    executor: Executor,
    work: Callable[[list[Job]], list[Done]],
    log: Log,
    end: float = math.inf,
    forecast: Forecast | None = None,
) -> Generator[Done, None, list[Job]]:
    """Every job of these groups as it ends, from any executor. Returns what is left when it breaks.

    A group whose worker was lost is submitted again, `ATTEMPTS` times in all.
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
                log(_progress([job for group, _ in waiting.values() for job in group], forecast))
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
                    log(f"{group[0].title}: its worker was lost ({reason}); submitted again")
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


def process_context(device: str) -> BaseContext:
    """How processes start: for a CPU, where possible, as copies of one that has imported torch and computed nothing.

    A copy of a process that has computed may hang in torch's threads. To import torch in each takes seconds. A driver
    of GPUs that was initialised before a copy is of no use in it, so there every process starts anew.

    Args:
        device: Where they train, as torch names it.
    """
    if device != "cpu" or "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


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
    """A pool of so many processes for runs such as this one; 0: of as many as the machine trains at a time."""
    e = experiment
    most = runs_at_a_time(e.task, e.federation, e.settings.participants) // max(1, e.settings.workers)
    return Pool(jobs or max(1, most), e.settings.device)


def in_processes(
    jobs: Sequence[Job],
    pool: Pool,
    log: Log = print,
    end: float = math.inf,
    forecast: Forecast | None = None,
) -> Generator[Done]:
    """Every job as it ends, from the processes of the pool.

    A killed process, perhaps for lack of memory, ends its pool; what is left is tried again sequentially.
    """
    for job in (yield from _in_pool(jobs, pool, log, end, forecast)):
        with Pool(1, pool.device) as alone:
            if (yield from _in_pool([job], alone, log, end, forecast)):
                advice = "perhaps for lack of memory; run the same again with one process (jobs 1)"
                yield Done(job, RunError(f"{job.title}: its process was killed, {advice}"), 0.0)


def _in_pool(
    jobs: Sequence[Job], pool: Pool, log: Log, end: float, forecast: Forecast | None
) -> Generator[Done, None, list[Job]]:
    """Every job as it ends; returns those that a killed process left undone."""
    complete = False
    try:
        groups = [[job] for job in jobs]
        left = yield from submitted(groups, pool.started(log), _run_in_worker, log, end, forecast)
        complete = not left
    finally:
        if not complete:
            pool.end(at_once=True)
    return left


_worker = Runner()  # of this process, if it is a worker
_one_at_a_time = threading.Lock()  # torch has one number of threads and one random generator per process


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


def _run_in_worker(jobs: list[Job], pause: float = PAUSE, batch_seeds: bool = False) -> list[Done]:
    """What the jobs ended with; an exception of this function itself is that its worker was lost."""
    with _one_at_a_time:
        _worker.pause, _worker.batch_seeds = pause, batch_seeds
        try:
            return list(_worker.run(jobs))
        except Exception as error:
            error.add_note(traceback.format_exc())  # a traceback cannot be sent
            return [Done(job, error, 0.0) for job in jobs]
