"""Executors that run jobs on a cluster: `--on slurm[:PARTITION]` through submitit, `--on dask:ADDRESS`.

The run folders must be on a file system that all machines share, and copfl must be installed on each.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from copfl.errors import RunError, UsageError

P = ParamSpec("P")
R = TypeVar("R")

FORMS = "slurm, slurm:PARTITION or dask:ADDRESS, such as dask:tcp://10.0.0.1:8786"
TIMEOUT = 10.0  # seconds for an answer of Dask
RESULTS = 1.0  # seconds between two checks for results
STATES = 10.0  # seconds between two questions to Slurm
DELAY = 15.0  # seconds after the end of a job until its result must be visible on a shared file system
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}


@contextlib.contextmanager
def opened(on: str | None, folder: Path, cpus: int = 1) -> Iterator[Executor | None]:
    """The executor that `on` names, until the end; none without a name. Slurm's files go below `folder`."""
    if on is None:
        yield None
        return
    kind, _, place = on.partition(":")
    if kind == "slurm":
        with Slurm(folder / "slurm", place or None, cpus) as executor:
            yield executor
    elif kind == "dask" and place:
        with _dask(place) as executor:
            yield executor
    else:
        raise UsageError(f'--on "{on}" must be {FORMS}')


def _missing(library: str, error: ImportError) -> UsageError:
    install = "install it with `pip install 'copfl[cluster]'`"
    return UsageError(f"--on needs {library}, which is not installed ({error}); {install}")


@contextlib.contextmanager
def _dask(address: str) -> Iterator[Executor]:
    try:
        import distributed
    except ImportError as error:
        raise _missing("dask.distributed", error) from error
    connect: Any = distributed.Client  # it has no types
    try:
        client = connect(address, timeout=TIMEOUT, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        remedy = "start one with `dask scheduler` and `dask worker --nthreads 1`, and name its address"
        raise RunError(f"no Dask scheduler answers at {address} ({error}); {remedy}") from error
    with client:
        yield client.get_executor(pure=False)


class Slurm(Executor):
    """Every call is a job of Slurm. submitit submits it and stores its result; a thread watches the jobs."""

    def __init__(self, folder: Path, partition: str | None = None, cpus: int = 1) -> None:
        try:
            import submitit
        except ImportError as error:
            raise _missing("submitit", error) from error
        try:
            self._submitit: Any = submitit.SlurmExecutor(folder=folder)
        except RuntimeError as error:
            raise UsageError(
                f"--on slurm: {error} Start it on a machine with Slurm's commands sbatch and squeue"
            ) from error
        # No time: that of the partition, or of the environment variable SBATCH_TIMELIMIT.
        self._submitit.update_parameters(
            job_name="copfl", partition=partition, cpus_per_task=cpus, time=None, use_srun=False
        )
        self._jobs: dict[Future[Any], Any] = {}
        self._changed, self._closed = threading.Lock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        try:
            job = self._submitit.submit(fn, *args, **kwargs)
        except RuntimeError as error:  # of submitit, with what sbatch said
            raise RunError(f"Slurm did not take a job: {error}; correct the options of --on") from error
        future: Future[R] = Future()
        with self._changed:
            self._jobs[future] = job
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancels what is left."""
        self._closed.set()
        self._watcher.join()
        for job in self._jobs.values():
            job.cancel(check=False)

    def _watch(self) -> None:
        """Sets the result of every job that has one, and an error for those that ended without."""
        asked, ended = 0.0, dict[str, float]()  # when each job was first seen as ended
        while not self._closed.wait(RESULTS):
            now = time.monotonic()
            with self._changed:
                jobs = dict(self._jobs)
            if jobs and now - asked >= STATES:
                asked, states = now, self._states()
                if states is not None:
                    gone = [
                        job.job_id for job in jobs.values() if states.get(job.job_id, "COMPLETED") in ENDED
                    ]
                    ended = {id: ended.get(id, now) for id in gone}
            for future, job in jobs.items():
                outcome = self._outcome(job, now - ended.get(job.job_id, now) > DELAY)
                if outcome is None and not future.cancelled():
                    continue
                if not future.set_running_or_notify_cancel():
                    job.cancel(check=False)
                elif isinstance(outcome, Exception):
                    future.set_exception(outcome)
                elif outcome is not None:
                    future.set_result(outcome[0])
                with self._changed:
                    del self._jobs[future]

    def _outcome(self, job: Any, lost: bool) -> tuple[Any] | Exception | None:
        """The result, the error without one, or None as long as the job may run."""
        path = Path(job.paths.result_pickle)
        try:
            os.listdir(path.parent)  # so that a network file system reads it again
            if path.exists():
                return (job.result(),)
        except Exception as error:
            return error
        return RuntimeError(f"Slurm ended job {job.job_id}, see {job.paths.stderr}") if lost else None

    def _states(self) -> dict[str, str] | None:
        """The state of every job of this user that Slurm knows; None if it does not answer."""
        words = ["squeue", "--noheader", "--states=all", "--format=%A %T", f"--user={os.getuid()}"]
        answer = subprocess.run(words, capture_output=True, text=True)
        if answer.returncode:
            return None
        return dict(line.split(maxsplit=1) for line in answer.stdout.splitlines())
