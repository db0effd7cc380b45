"""Runs carried out, one after the other in this process or side by side in several; the results are the same."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing import connection, get_context, parent_process
from typing import Any

from copfl.comparison.jobs import Job, carry_out, finished
from copfl.errors import CopflError, RunError
from copfl.experiment.progress import span

Say = Callable[[str], None]
Problem = str | None


def all_done(jobs: Sequence[Job], processes: int, say: Say, what: str = "runs") -> None:
    """Nothing, once every run is there; those that are finished already are left as they are.

    A run that fails does not stop the others; in the end one RunError says which failed and why.
    """
    distinct = list({job.path: job for job in jobs}.values())
    left = [job for job in distinct if not finished(job)]
    if len(left) < len(distinct):
        say(f"{len(distinct) - len(left)} of {len(distinct)} {what} are there already")
    problems, clock = [], time.monotonic()
    with contextlib.closing(
        _carried_out(left, processes)
    ) as outcomes:  # or the processes would outlive an error here
        for count, (job, problem) in enumerate(outcomes, 1):
            if problem:
                problems.append(problem)
            gone = time.monotonic() - clock
            how = (
                f"failed: {problem}"
                if problem
                else f"done, about {span(gone / count * (len(left) - count))} left"
            )
            say(f"[{count}/{len(left)} {what}] {job.label}, seed {job.seed}: {how}")
    if problems:
        raise RunError(
            f"{len(problems)} of {len(distinct)} {what} failed, the others are there. {'; '.join(problems)}"
        )


def _carried_out(jobs: Sequence[Job], processes: int) -> Generator[tuple[Job, Problem], None, None]:
    """Every run as it ends, with what went wrong."""
    if min(processes, len(jobs)) > 1:
        yield from _side_by_side(jobs, min(processes, len(jobs)))
        return
    for job in jobs:
        yield job, _tried(job)
        gc.collect()  # on a GPU, what the run recorded holds memory that the next one wants


def _tried(job: Job) -> Problem:
    try:
        carry_out(job)
    except CopflError as error:
        text = str(error)
        return text if job.label in text else f"{job.label}, seed {job.seed}: {text}"
    return None


def _side_by_side(jobs: Sequence[Job], processes: int) -> Generator[tuple[Job, Problem], None, None]:
    """The same, in processes of which each imports torch once and then takes one run after the other."""
    context = get_context("spawn")  # a forked torch may hang in its thread pool
    waiting, busy, ended = deque(jobs), dict[connection.Connection, tuple[Any, Job]](), list[Any]()
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs,)
            )  # a daemon could have no processes of its own
            process.start()
            theirs.close()
            ours.send(waiting[0])
            busy[ours] = process, waiting.popleft()
        while busy:
            for pipe in connection.wait(list(busy)):
                assert isinstance(pipe, connection.Connection)
                process, job = busy[pipe]
                problem, bug = _answer(pipe, process, job)
                if bug:
                    raise RuntimeError(f"{job.label}, seed {job.seed}: {bug}")
                if waiting:
                    pipe.send(waiting[0])
                    busy[pipe] = process, waiting.popleft()
                else:
                    pipe.close()  # which tells the process to end
                    ended.append(busy.pop(pipe)[0])
                yield job, problem
    finally:
        for pipe, (process, _) in busy.items():
            process.terminate()
            pipe.close()
            ended.append(process)
        for process in ended:
            process.join()


def _answer(pipe: connection.Connection, process: Any, job: Job) -> tuple[Problem, str | None]:
    """What a worker says of its run: a problem that a person can mend, or the trace of a bug."""
    try:
        answer: tuple[Problem, str | None] = pipe.recv()
    except (EOFError, ConnectionError) as error:
        process.join()
        raise RunError(
            f"the process of {job.label}, seed {job.seed} ended with code {process.exitcode}, perhaps for want of "
            "memory; run the same command again to go on, with --jobs 1 if it happens again"
        ) from error
    return answer


def _work(pipe: connection.Connection) -> None:
    """One process: takes runs from the pipe until it is closed, and answers each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((_tried(job), None))
        except Exception:  # a bug: the parent shows it
            pipe.send((None, traceback.format_exc()))


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, however it went, so that no run folder stays in use."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
