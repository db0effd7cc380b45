"""Executors that run jobs on a cluster: `--on slurm[:PARTITION]` through submitit, `--on dask:ADDRESS`.

The run folders must be on a file system that all machines share, and copfl must be installed on each.
"""

import contextlib
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from copfl.errors import RunError, UsageError, library, raised_as

P = ParamSpec("P")
R = TypeVar("R")

FORMS = "slurm, slurm:PARTITION or dask:ADDRESS, such as dask:tcp://10.0.0.1:8786"
TIMEOUT = 10.0  # seconds for an answer of Dask
MOST = 100_000  # jobs, each of which has a thread that waits for it
RESULTS = 1.0  # seconds between two checks for results
STATES = 10.0  # seconds between two questions to Slurm
DELAY = 15.0  # seconds after the end of a job until its result must be visible on a shared file system
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}


def opened(on: str | None, folder: Path, cpus: int = 1) -> contextlib.AbstractContextManager[Executor | None]:
    """The executor that `on` names, until the end; none without a name. Slurm's files go below `folder`."""
    if on is None:
        return contextlib.nullcontext()
    kind, _, cluster = on.partition(":")
    if kind == "slurm":
        return Slurm(folder / "slurm", cluster or None, cpus)
    if kind == "dask" and cluster:
        return _dask(cluster)
    raise UsageError(f'--on "{on}" must be {FORMS}')


@contextlib.contextmanager
def _dask(address: str) -> Iterator[Executor]:
    distributed = library("distributed", "--on dask")
    remedy = "start one with `dask scheduler` and `dask worker --nthreads 1`, and name its address"
    missing = f"no Dask scheduler answers at {address} ({{}}); {remedy}"
    with raised_as(RunError, missing, OSError, ValueError, TimeoutError):
        # Asked first: a Client that cannot connect was seen to wait past its own limit.
        socket.create_connection(distributed.comm.get_address_host_port(address), TIMEOUT).close()
        client = distributed.Client(address, timeout=TIMEOUT, set_as_default=False)
    with client:
        yield client.get_executor(pure=False)


class Slurm(ThreadPoolExecutor):
    """Every call is a job of Slurm. submitit submits it and stores its result; a thread waits for that."""

    def __init__(self, folder: Path, partition: str | None = None, cpus: int = 1) -> None:
        submitit = library("submitit", "--on slurm")
        remedy = "Start it on a machine with Slurm's commands sbatch and squeue"
        with raised_as(UsageError, f"--on slurm: {{}} {remedy}", RuntimeError):
            self._submitit = submitit.SlurmExecutor(folder=folder)
        # No time: that of the partition, or of the environment variable SBATCH_TIMELIMIT.
        self._submitit.update_parameters(
            job_name="copfl", partition=partition, cpus_per_task=cpus, time=None, use_srun=False
        )
        super().__init__(MOST)
        self._closed, self._asking = threading.Event(), threading.Lock()
        self._asked = -math.inf
        self._states: dict[str, str] | None = None

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        refused = "Slurm did not take a job: {}; correct the options of --on"  # with what sbatch said
        with raised_as(RunError, refused, RuntimeError):
            job = self._submitit.submit(fn, *args, **kwargs)
        return super().submit(self._result, job)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancels what is left."""
        self._closed.set()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _result(self, job: Any) -> Any:
        """The result of the job, once there is one; an error, if it ended without."""
        path, ended = Path(job.paths.result_pickle), math.inf  # when the job was first seen as ended
        while not self._closed.wait(RESULTS):
            os.listdir(path.parent)  # so that a network file system reads it again
            if path.exists():
                return job.result()
            ended = min(ended, time.monotonic()) if self._state(job.job_id) in ENDED else math.inf
            if time.monotonic() - ended > DELAY:
                raise RuntimeError(f"Slurm ended job {job.job_id}, see {job.paths.stderr}")
        job.cancel(check=False)
        raise CancelledError

    def _state(self, id: str) -> str:
        """The state of a job, as Slurm last answered for all jobs of this user; "" if it did not."""
        with self._asking:
            if time.monotonic() - self._asked >= STATES:
                words = ["squeue", "--noheader", "--states=all", "--format=%A %T", f"--user={os.getuid()}"]
                answer = subprocess.run(words, capture_output=True, text=True)
                lines = answer.stdout.splitlines()
                self._states = None if answer.returncode else dict(line.split(maxsplit=1) for line in lines)
                self._asked = time.monotonic()
            return "" if self._states is None else self._states.get(id, "COMPLETED")
