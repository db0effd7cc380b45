"""Stops copfl at every access to the disk, resumes it, and compares the result with that of a run never stopped.

    python -m tests.killing FOLDER [kill] [full] [clock]    all three unless some are named

    kill     SIGKILL before the first, second, ... write, rename or sync
    full     that one fails as on a full disk, or the system lets no file grow
    clock    SIGKILL or Ctrl-C at random moments, of runs that choose their engine by a measurement

Every run is a forked child, so that torch is imported once. Prints a line per moment; exits with 1 at the first
failure.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from copfl.cli import main as cli
from tests.commands import TINY, files, found

RUN = ("run", "--rounds", "4", "--set", "run.checkpoint_every=2", *TINY)
EXACT = (*RUN, "--batch", "64", "--engine", "vmap")  # where the disk counts: as quick as can be
TEMPORARY = (".part", ".tmp", ".lock")


def call(words: tuple[str, ...]) -> int:
    """The exit code of `copfl WORDS` in this process."""
    sys.argv = ["copfl", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main()
        except SystemExit as exit:
            return int(exit.code or 0)


def child(
    words: tuple[str, ...],
    prepare: Callable[[], None] = lambda: None,
    stop: tuple[float, signal.Signals] | None = None,
) -> int:
    """The exit code of `copfl WORDS` in a forked child, stopped after some seconds; minus the signal that ended it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, b"ready")  # from here on a signal interrupts the command
            prepare()
            os._exit(call(words))
        except KeyboardInterrupt:
            os._exit(130)  # before or after the command itself
        finally:
            os._exit(99)  # an exception that the command line should have caught
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    if stop is not None:
        time.sleep(stop[0])
        os.kill(pid, stop[1])
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at(moment: int, act: Callable[[], None], folder: Path) -> Callable[[], None]:
    """Calls `act` before the moment-th time that something in the folder is opened, made durable or put in place."""
    count = 0

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *given: Any, **named: Any) -> Any:
            nonlocal count
            count += isinstance(target, int) or str(target).startswith(str(folder))
            if count == moment:
                count += 1
                act()
            return original(target, *given, **named)

        return call

    def patch() -> None:
        os.fsync, os.replace, os.open = patched(os.fsync), patched(os.replace), patched(os.open)

    return patch


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def small(limit: int) -> Callable[[], None]:
    """Lets no file of the process grow beyond so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def moments(act: Callable[[], None], expected: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """A stopped run for every moment, until one comes that the run does not reach."""
    for moment in range(1, 1000):
        path = folder / f"at-{moment}"
        code = child((*EXACT, "--out", str(path)), at(moment, act, path))
        if code == 0:
            assert moment > 20, f"a run touches the disk more often than {moment} times"
            return
        assert code == expected, f"moment {moment} ended in {code}"
        yield f"moment {moment}", path


def limits(folder: Path) -> Iterator[tuple[str, Path]]:
    """A run whose files may not grow: one that cannot begin, one that cannot write its rounds, one no checkpoint."""
    for limit in (500, 2000, 10_000):
        path = folder / f"limit-{limit}"
        code = child((*EXACT, "--out", str(path)), small(limit))
        assert code == 2, f"a limit of {limit} bytes ended in {code}"
        assert (path / "run.toml").exists() == (limit > 500)
        if path.exists():
            assert (path / "rounds.jsonl").read_bytes()[-1:] in (b"", b"\n"), "half a line is left"
        yield f"limit {limit}", path


def times(folder: Path) -> Iterator[tuple[str, Path]]:
    """A run stopped at random moments."""
    start = time.perf_counter()
    assert child((*RUN, "--out", str(folder / "timed"))) == 0
    whole = time.perf_counter() - start
    for seed in range(8):
        path, after = folder / f"clock-{seed}", random.Random(seed).uniform(0.02, 1) * whole
        how = signal.SIGKILL if seed % 2 else signal.SIGINT
        code = child((*RUN, "--out", str(path)), stop=(after, how))
        assert code in (0, 130 if how == signal.SIGINT else -how), f"{how.name} ended in {code}"
        yield f"{how.name} after {after:.2f} of {whole:.2f} s", path


def stopped(how: str, folder: Path) -> None:
    """Stops runs in one way and resumes each."""
    words = RUN if how == "clock" else EXACT
    whole = folder / "never-stopped"
    assert (
        call((*words, "--out", str(whole))) == 0
    )  # in this process, so that the children find all modules imported
    expected = found(whole)
    assert len(expected) == 3, "rounds.jsonl and two models"
    stops = times(folder)
    if how == "kill":
        stops = moments(die, -signal.SIGKILL, folder)
    elif how == "full":
        stops = itertools.chain(limits(folder), moments(fail, 2, folder))
    for what, path in stops:
        begun = (path / "run.toml").exists()
        left = sorted(files(path)) if path.exists() else []
        if how == "full":
            assert not [name for name in left if name.endswith(TEMPORARY)], f"{what} left {left}"
            assert begun or not path.exists(), f"{what}: a folder without a run is left: {left}"
        if not begun:
            assert child(("resume", str(path))) == 2, f"{what}: there is nothing to resume"
        code = child(("resume", str(path)) if begun else (*words, "--out", str(path)))
        assert code == 0, f"{what}: resuming ended in {code}"
        assert found(path) == expected, f"{what}: the result differs from that of a run never stopped"
        assert files(path).keys() == files(whole).keys(), (
            f"{what}: other files are left: {sorted(files(path))}"
        )
        print(f"{how}, {what}: {'resumed' if begun else 'begun again'}, equal", flush=True)
        shutil.rmtree(path)


def main(folder: Path, *ways: str) -> None:
    torch.set_num_threads(1)  # no threads, so that forking is safe
    os.fsync = os.fstat  # type: ignore[assignment] # it waits for the disk; what a killed process wrote is there without
    for how in ways or ("kill", "full", "clock"):
        stopped(how, folder / how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
