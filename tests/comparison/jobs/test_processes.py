"""Processes that train jobs: a copy is as a new process, and how one ended is told as it was."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from copfl.comparison.jobs.job import Job
from copfl.comparison.jobs.processes import Pool, executor_of, in_processes, sendable
from copfl.comparison.jobs.runner import Runner, run_in_worker
from copfl.comparison.jobs.submission import Done
from copfl.errors import RunError
from tests.comparison.jobs.test_runner import job


class Unreadable:
    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


class Odd(Exception):
    """Can be pickled, but not read again, as many whose `__init__` takes other arguments than a text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.part = Unreadable()


class Holding(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function = lambda: None


def random_number() -> float:
    return float(np.random.random())  # noqa: NPY002  as in a user's code


def test_copies_have_the_environment_of_now_and_their_own_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COPFL_FIRST", "1")
    with executor_of(1, "cpu") as first:
        drawn = first.submit(random_number).result()
        assert first.submit(os.getenv, "COPFL_FIRST").result() == "1"
    monkeypatch.delenv("COPFL_FIRST")
    with executor_of(1, "cpu", {"COPFL_MORE": "2"}) as second:
        assert second.submit(random_number).result() != drawn
        assert second.submit(os.getenv, "COPFL_FIRST").result() is None
        assert second.submit(os.getenv, "COPFL_MORE").result() == "2"
        assert second.submit(os.getenv, "PYTHONSAFEPATH").result() == os.getenv("PYTHONSAFEPATH")


def test_a_machine_without_shared_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def semaphore(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", semaphore)
    with pytest.raises(RunError, match=r"No space left on device; they need some space in /dev/shm.*jobs 1"):
        executor_of(1, "cpu")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("wrong"), ValueError, "wrong"),
        (Odd("strange"), RuntimeError, "Odd: strange"),
        (Holding("held"), RuntimeError, "Holding: held"),
        (SystemExit("bye"), RuntimeError, "SystemExit: bye"),
    ],
)
def test_every_error_of_a_users_code_can_be_sent_with_its_traceback(
    error: BaseException, kind: type[Exception], text: str
) -> None:
    try:
        raise error
    except BaseException as raised:
        received = pickle.loads(pickle.dumps(sendable(raised)))
    assert type(received) is kind
    assert str(received) == text
    assert "in test_every_error_of_a_users_code" in received.__notes__[0]


def test_code_that_exits_in_a_worker_is_no_lost_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exiting(self: Runner, jobs: list[Job]) -> list[Done]:
        sys.exit("bye")

    monkeypatch.setattr(Runner, "run", exiting)
    (done,) = run_in_worker([job(tmp_path)])
    assert str(done.error) == "SystemExit: bye"


def ends_itself(jobs: list[Job]) -> list[Done]:
    os._exit(3)


def crashes(jobs: list[Job]) -> list[Done]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def test_how_a_process_ended_is_told(tmp_path: Path) -> None:
    (ended,) = in_processes([job(tmp_path)], Pool(1), ends_itself)
    assert "its process ended with exit code 3; what it printed says why" in str(ended.error)
    (crashed,) = in_processes([job(tmp_path)], Pool(1), crashes)
    assert "its process crashed (SIGSEGV)" in str(crashed.error)
