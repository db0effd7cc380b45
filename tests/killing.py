"""Stops runs at every disk operation, resumes them, and compares the results with an uninterrupted run.

    python -m tests.killing FOLDER [kill] [some] [full] [clock]    default: kill, full and clock

    kill     the folder as SIGKILL before the first, second, ... open, rename or sync leaves it
    some     the same before every sixth of them
    full     that operation fails as on a full disk, or no file may grow
    clock    SIGKILL or Ctrl-C at random times, in runs that measure which engine is fastest

Every run that is stopped is a forked child, so that torch is imported once. Prints a line per run; exits with
1 at the first difference.
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

# Without the local baseline, a run of its own in the same way: it would double the time.
RUN = ("run", "-d", "digits", "-r", "3", "--set", "run.checkpoint_every=2", "--no-local-baseline", *TINY)
# A fixed engine, and as fast as possible; models are written in any round, not only in the last ones.
EXACT = (*RUN, "--batch-size", "64", "--engine", "vmap", "--select", "best")
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
    patch: Callable[[], None] = lambda: None,
    stop: tuple[float, signal.Signals] | None = None,
) -> int:
    """The exit code of `copfl WORDS` in a forked child, stopped after some seconds; or minus its signal."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, b"ready")  # signals are handled below from here on
            patch()
            os._exit(call(words))
        except KeyboardInterrupt:
            os._exit(130)  # before or after the command
        finally:
            os._exit(99)  # an exception that the command line should have caught
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    if stop is not None:
        time.sleep(stop[0])
        os.kill(pid, stop[1])
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def before_each(act: Callable[[int], None], folder: Path) -> Callable[[], None]:
    """A patch that calls `act` with 1, 2, ... before each open, sync and rename in the folder."""
    count = 0

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *given: Any, **named: Any) -> Any:
            nonlocal count
            if isinstance(target, int) or str(target).startswith(str(folder)):
                count += 1
                act(count)
            return original(target, *given, **named)

        return call

    def patch() -> None:
        os.fsync, os.replace, os.open = patched(os.fsync), patched(os.replace), patched(os.open)

    return patch


def fail_at(number: int) -> Callable[[int], None]:
    def act(now: int) -> None:
        if now == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return act


def small(limit: int) -> Callable[[], None]:
    """A patch: no file of the process may exceed so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def kills(folder: Path) -> Iterator[tuple[str, Path]]:
    """What a kill before each disk operation leaves: copies of one run's folder at those moments.

    What the process has not written yet is in its memory alone, and so in no copy. Of copies with the same
    files one is enough.
    """
    path, copies = folder / "run", folder / "copies"

    def copy(number: int) -> None:
        (copies / str(number)).mkdir(parents=True)
        if path.exists():
            shutil.copytree(path, copies / str(number) / "run")

    assert child((*EXACT, "--out", str(path)), before_each(copy, path)) == 0
    assert {place.name for place in folder.iterdir()} == {"run", "copies", "never-stopped"}
    before: dict[str, bytes] | None = None
    for number in range(1, 1 + len(list(copies.iterdir()))):
        left = files(copies / str(number))
        if left != before:
            yield f"operation {number}", copies / str(number) / "run"
        before = left


def failures(folder: Path) -> Iterator[tuple[str, Path]]:
    """A run for every disk operation of a run, which fails as on a full disk."""
    for number in range(1, 1000):
        path = folder / f"at-{number}"
        code = child((*EXACT, "--out", str(path)), before_each(fail_at(number), path))
        if code == 0:
            assert number > 20, f"a run has more than {number} disk operations"
            return
        assert code == 2, f"operation {number} ended in {code}"
        yield f"operation {number}", path


def limits(folder: Path) -> Iterator[tuple[str, Path]]:
    """Runs whose files may not grow: without settings, without rounds, without a checkpoint."""
    for limit in (500, 2000, 10_000):
        path = folder / f"limit-{limit}"
        code = child((*EXACT, "--out", str(path)), small(limit))
        assert code == 2, f"a limit of {limit} bytes ended in {code}"
        assert (path / "run.toml").exists() == (limit > 500)
        if path.exists():
            assert (path / "rounds.jsonl").read_bytes()[-1:] in (b"", b"\n"), "half a line is left"
        yield f"limit {limit}", path


def times(folder: Path) -> Iterator[tuple[str, Path]]:
    """Runs stopped at random times."""
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
    # What a kill leaves is a copy, and nothing is killed here: no child is needed, which costs as much as its
    # run.
    called = call if how in ("kill", "some") else child
    whole = folder / "never-stopped"
    # In this process, so that the children have all modules imported.
    assert call((*words, "--out", str(whole))) == 0
    expected = found(whole)
    assert len(expected) == 10, "rounds.jsonl, and the bundles of two clients and of the server"
    stops = times(folder)
    if how in ("kill", "some"):
        stops = itertools.islice(kills(folder), 0, None, 1 if how == "kill" else 6)
    elif how == "full":
        stops = itertools.chain(limits(folder), failures(folder))
    for what, path in stops:
        has_run = (path / "run.toml").exists()
        left = sorted(files(path)) if path.exists() else []
        if how == "full":
            assert not [name for name in left if name.endswith(TEMPORARY)], f"{what} left {left}"
            assert has_run or not path.exists(), f"{what}: a folder without a run is left: {left}"
        if not has_run:
            assert called(("resume", str(path))) == 2, f"{what}: there is nothing to resume"
        code = called(("resume", str(path)) if has_run else (*words, "--out", str(path)))
        assert code == 0, f"{what}: resuming ended in {code}"
        assert found(path) == expected, f"{what}: the result differs from that of an uninterrupted run"
        assert files(path).keys() == files(whole).keys(), (
            f"{what}: other files are left: {sorted(files(path))}"
        )
        print(f"{how}, {what}: {'resumed' if has_run else 'started again'}, equal", flush=True)
        shutil.rmtree(path)


def main(folder: Path, *ways: str) -> None:
    torch.set_num_threads(1)  # no threads, so that forking is safe
    # Faster: the writes of a killed process are visible without a sync.
    os.fsync = os.fstat  # type: ignore[assignment]
    for how in ways or ("kill", "full", "clock"):
        stopped(how, folder / how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
