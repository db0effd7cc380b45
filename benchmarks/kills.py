"""Runs that are killed hundreds of times and resumed: `python benchmarks/kills.py --kills 500`

Small runs, each in a forked child, are stopped by SIGKILL and resumed until they are done. Half of the kills
come at a time drawn uniformly from the run's processor time. The others come inside a write: half of a file,
a line or a client's state is on disk, or the file is complete and its rename or sync never happens. Then:

    lost       recorded rounds that must be repeated: at most the one that was being written
    stuck      no process of the child may run after a time limit
    different  a finished run has the same files as an uninterrupted run, with the same rounds.jsonl,
               partition.json, run.toml and models/, byte for byte

The other faults: a full disk, a read-only folder, a clock that jumps, two processes in one folder. Prints a
line per run; exits with 1 if a run is lost, stuck or different. --json FILE writes the counts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import io
import itertools
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from copfl.cli import main as cli
from copfl.engine import checkpoint
from copfl.errors import RunError
from copfl.experiment import records

TINY = (
    "--dataset",
    "digits",
    "--model",
    "mlp",
    "--clients",
    "4",
    "--rounds",
    "5",
    "--batch-size",
    "64",
    "--set",
    "model.width=4",
)
EXACT = (  # no choice that depends on measured times
    "--set",
    "run.checkpoint_every=1",
    "--set",
    "run.engine=vmap",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "copfl": ("-a", "copfl"),
    "copfl, states on disk": ("-a", "copfl", "--set", "run.store=disk"),
    "copfl, half of the clients": (
        "-a",
        "copfl",
        "--set",
        "run.participation=0.5",
        "--set",
        "run.store=disk",
    ),
    "copfl, two workers": ("-a", "copfl", "--set", "run.workers=2", "--set", "run.chunk=2"),
    "fedavg": ("-a", "fedavg"),
    "apfl": ("-a", "apfl"),
    "local": ("-a", "local"),
}
WEIGHTS = {"copfl": 6, "copfl, states on disk": 4, "copfl, half of the clients": 2}  # of the others: 1
RARE = "copfl, two workers"  # every 60th run: its processes import torch, which takes seconds
LIMIT = 900.0  # seconds after which a child is stuck; long, because the machine may be busy
KILLED = -signal.SIGKILL
Patch = Callable[[], None]


class Ended(NamedTuple):
    """How a child ended."""

    code: int  # its exit code, or minus its signal
    err: str
    stuck: bool
    seconds: float  # of processor time, at the last reading


def call(words: tuple[str, ...]) -> tuple[int, str]:
    """The exit code of `copfl WORDS` in this process, and its error output."""
    sys.argv = ["copfl", *words]
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as exit:
            return int(exit.code or 0), err.getvalue()


def started(words: tuple[str, ...], patch: Patch, err: Path) -> int:
    """The process id of a forked child that runs `copfl WORDS`, in its own process group."""
    pid = os.fork()
    if pid:
        return pid
    code = 99  # an exception that the command line should have caught
    try:
        os.setpgid(0, 0)
        patch()
        code, message = call(words)
        err.write_text(message)
    except BaseException as error:
        err.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def ended(pid: int, err: Path, after: float | None = None) -> Ended:
    """How the child ended; it is killed after so many seconds of processor time."""
    started_at, status, seconds, stuck = time.monotonic(), None, 0.0, False
    while status is None:
        got, exit_status = os.waitpid(pid, os.WNOHANG)
        if got:
            status = exit_status
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            seconds = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
        if after is not None and seconds >= after:
            os.kill(pid, signal.SIGKILL)
        elif time.monotonic() - started_at >= LIMIT:
            stuck = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    stuck |= not all_ended(pid)
    return Ended(os.waitstatus_to_exitcode(status), err.read_text() if err.exists() else "", stuck, seconds)


def all_ended(group: int, patience: float = LIMIT) -> bool:
    """Whether all processes that the child started end; this process is their reaper."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        try:
            if os.waitpid(-group, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        except ChildProcessError:
            return True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    return False


# A kill inside a write


class Writes:
    """Counts every write, rename and sync in the folder, and calls `act` inside the one with this number."""

    def __init__(self, folder: Path, number: int, act: Callable[[], None]) -> None:
        self.folder, self.number, self.act = str(folder), number, act
        self.shared = mmap.mmap(-1, 256)  # written by the child, read by its parent

    @property
    def state(self) -> tuple[int, str]:
        """Their count, and the position of the one with the given number."""
        count, _, position = bytes(self.shared).rstrip(b"\0").decode().partition(" ")
        return int(count or 0), position

    def now(self, what: str, path: object) -> bool:
        count = self.state[0] + 1
        if count <= self.number or not self.number:
            name = re.sub(r"-\d+", "", Path(str(path)).name.removeprefix("."))
            self.shared[:] = f"{count} {what} {name}".encode()[:255].ljust(256, b"\0")
        return count == self.number

    def patch(self) -> None:
        """Replaces the functions that write; only in a child."""
        write, pwrite, replace, fsync, save = (
            Path.write_bytes,
            os.pwrite,
            os.replace,
            os.fsync,
            checkpoint.save,
        )

        def write_bytes(path: Path, content: Any) -> int:
            if str(path).startswith(self.folder) and self.now("half of", path):
                write(path, content[: len(content) // 2])
                self.act()
            return write(path, content)

        def write_at(handle: int, content: Any, start: int) -> int:
            if self.now("half of a state in", "clients.bin"):
                pwrite(handle, content[: len(content) // 2], start)
                self.act()
            return pwrite(handle, content, start)

        def replaced(source: Any, target: Any) -> None:
            if str(target).startswith(self.folder) and self.now("before the rename to", target):
                self.act()
            replace(source, target)

        def synced(handle: int) -> None:
            if self.now("before the sync of", os.readlink(f"/proc/self/fd/{handle}")):
                self.act()
            fsync(handle)

        def saved(path: Path, trees: Any, about: Any) -> None:
            if self.now("half of", path):  # safetensors writes its own files: a kill leaves a part of one
                part, whole = (
                    path.with_name(f".{path.name}.{os.getpid()}.part"),
                    path.with_name(f".{path.name}.tmp"),
                )
                self.number = -1  # the writes below do not count
                save(whole, trees, about)
                content = whole.read_bytes()
                whole.unlink()
                write(part, content[: len(content) // 2])
                try:
                    self.act()
                except OSError as error:
                    part.unlink()  # as on a full disk
                    raise RunError(f"cannot write {path}: {error.strerror}") from error
            save(path, trees, about)

        def opened(path: Any, *given: Any, **named: Any) -> Any:
            file = open(path, *given, **named)  # noqa: SIM115 - the caller closes it
            return Line(file, self) if "a" in str(given[:1]) else file

        Path.write_bytes = write_bytes  # type: ignore[assignment, method-assign]
        os.pwrite, os.replace, os.fsync = write_at, replaced, synced  # type: ignore[assignment]
        checkpoint.save, records.open = saved, opened  # type: ignore[attr-defined]


class Line:
    """A file to which lines are added; the last one may be half a line."""

    def __init__(self, file: Any, writes: Writes) -> None:
        self.file, self.writes = file, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> int:
        if self.writes.now("half a line of", self.file.name):
            self.file.write(content[: len(content) // 2])
            self.writes.act()
        return int(self.file.write(content))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# One run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def result(folder: Path) -> dict[str, bytes]:
    """The files that must be equal: all but times, the machine and the checkpoint."""
    names = ("rounds.jsonl", "partition.json", "run.toml", "models/")
    return {name: content for name, content in contents(folder).items() if name.startswith(names)}


def lost(folder: Path) -> int:
    """Number of recorded rounds that are not in the checkpoint."""
    state = folder / "checkpoint" / "state.safetensors"
    done = int(checkpoint.peek(state)[1]["round"]) if state.exists() else 0
    return len(records.read(folder / "rounds.jsonl")) - done


class Whole(NamedTuple):
    """A run without kills."""

    folder: Path
    seconds: float  # of processor time
    writes: int  # with renames and syncs


class Capabilities(ctypes.Structure):
    """The argument of Linux's capget and capset."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def obey_permissions() -> None:
    """Drops the capabilities with which root ignores permissions."""
    if os.geteuid() != 0:
        return
    libc, head, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (Capabilities * 2)()
    if libc.capget(head, sets) != 0:
        raise OSError("capget failed")
    for bit in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        sets[0].effective &= ~(1 << bit)
    if libc.capset(head, sets) != 0:
        raise OSError("capset failed")


class Kills:
    """The harness: its folder, its random numbers and its counts."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.draw = home, random.Random(seed)
        self.count: Counter[str] = Counter()
        self.by: dict[str, Counter[str]] = {"variant": Counter(), "position": Counter()}
        self.max_lost = 0
        self.failures: list[str] = []
        self.wholes: dict[str, Whole] = {}
        self.err = home / "err"

    def child(self, words: tuple[str, ...], patch: Patch = lambda: None, after: float | None = None) -> Ended:
        self.err.unlink(missing_ok=True)
        return ended(started(words, patch, self.err), self.err, after)

    def words(self, variant: str, folder: Path) -> tuple[str, ...]:
        return ("run", *VARIANTS[variant], *TINY, *EXACT, "--quiet", "--out", str(folder))

    def whole(self, variant: str) -> Whole:
        if variant not in self.wholes:
            folder = self.home / "whole" / str(len(self.wholes))
            how = self.child(self.words(variant, folder))
            assert how.code == 0, f"{variant} does not run: {how}"
            counter = Writes(self.home / "counted", 0, die)
            assert self.child(self.words(variant, self.home / "counted"), counter.patch).code == 0
            shutil.rmtree(self.home / "counted")
            self.wholes[variant] = Whole(folder, how.seconds, counter.state[0])
        return self.wholes[variant]

    def run(self, number: int) -> int:
        """Kills one run until it is done; the number of kills."""
        names = [name for name in VARIANTS if name != RARE]
        variant = self.draw.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]
        if number % 60 == 30:
            variant = RARE
        whole, folder = self.whole(variant), self.home / f"run-{number}"
        kills, wanted, before = 0, self.draw.choice((1, 2, 3, 4, 6)), len(self.failures)
        while True:
            has_run = (folder / "run.toml").exists()
            words = ("resume", str(folder), "--quiet") if has_run else self.words(variant, folder)
            position = ""
            if kills >= wanted:
                how = self.child(words)
            elif self.draw.random() < 0.5:
                how = self.child(words, after=self.draw.uniform(0, 1) * whole.seconds)
                position = "at a random time"
            else:
                writes = Writes(folder, self.draw.randint(1, max(2, whole.writes * 2 // 3)), die)
                how = self.child(words, writes.patch)
                position = writes.state[1]
            self.count["starts"] += 1
            if how.stuck:
                self.count["stuck"] += 1
                self.failures.append(f"{variant}: stuck after {kills} kills")
            if how.code != KILLED:
                break
            kills += 1
            self.by["position"][position] += 1
            self.by["variant"][variant] += 1
            if (folder / "run.toml").exists():
                self.max_lost = max(self.max_lost, lost(folder))
        self.count["kills"] += kills
        self.count["runs"] += 1
        if how.code != 0:
            self.count["not resumed"] += 1
            self.failures.append(f"{variant}: after {kills} kills it ended in {how.code}: {how.err[-300:]}")
        else:
            self.compare(variant, whole.folder, folder)
        shutil.rmtree(folder, ignore_errors=True)
        status = "; ".join(self.failures[before:]) or "equal"
        print(f"{self.count['kills']:4d} kills: {variant}, killed {kills} times: {status}", flush=True)
        return kills

    def compare(self, what: str, whole: Path, folder: Path) -> None:
        if result(folder) != result(whole):
            self.count["different"] += 1
            kept = self.home.parent / f"different-{self.count['different']}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            self.failures.append(f"{what}: the result is different; see {kept}")
        if contents(folder).keys() != contents(whole).keys():
            self.count["other files"] += 1
            others = sorted(contents(folder).keys() ^ contents(whole).keys())
            self.failures.append(f"{what}: other files: {others}")

    # The other faults

    def check(self, what: str, passed: bool, details: object = "") -> None:
        """Counts one case."""
        self.count["cases"] += 1
        if not passed:
            self.count["cases failed"] += 1
            self.failures.append(f"{what}: {details}")
        print(f"{'passed' if passed else 'FAILED'}: {what}{'' if passed else f' ({details})'}", flush=True)

    def check_resumed(self, what: str, variant: str, folder: Path) -> None:
        """After the fault, the run can be finished with the same result."""
        has_run = (folder / "run.toml").exists()
        how = self.child(("resume", str(folder), "--quiet") if has_run else self.words(variant, folder))
        before = len(self.failures)
        if how.code == 0:
            self.compare(what, self.whole(variant).folder, folder)
        self.check(
            f"{what}; then the resumed run has the same bytes",
            how.code == 0 and len(self.failures) == before,
            how,
        )
        shutil.rmtree(folder, ignore_errors=True)

    def full_disk(self, times: int) -> None:
        """Writes that fail as on a full disk, files that may not grow, and a mounted disk if possible."""
        for _ in range(times):
            variant = self.draw.choice(("copfl", "copfl, states on disk"))
            folder = self.home / "full"
            number = self.draw.randint(1, self.whole(variant).writes)
            how = self.child(self.words(variant, folder), Writes(folder, number, full).patch)
            left = (
                [n for n in contents(folder) if n.endswith((".part", ".tmp", ".lock"))]
                if folder.exists()
                else []
            )
            right = how.code == 2 and "No space left" in how.err and not left
            what = f"the disk is full at write {number} of {variant}"
            self.check(f"{what}: exit code 2, reported, no partial file", right, (how, left))
            self.check_resumed(what, variant, folder)
        for limit in (300, 2000, 12_000):
            folder = self.home / f"limit-{limit}"

            def small(limit: int = limit) -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

            how = self.child(self.words("copfl", folder), small)
            self.check(f"no file may grow beyond {limit} bytes: exit code 2", how.code == 2, how)
            self.check_resumed(f"no file may grow beyond {limit} bytes", "copfl", folder)
        with small_disk(self.home / "disk", 64) as disk:
            if disk is None:
                print("left out: a mounted full disk (this process may not mount one)", flush=True)
                return
            folder = disk / "run"
            how = self.child(self.words("copfl", folder))
            self.check(
                "a disk of 64 KiB is full: exit code 2, reported",
                how.code == 2 and "No space" in how.err,
                how,
            )

    def read_only(self) -> None:
        """A read-only folder; root drops its right to ignore permissions."""
        folder = self.home / "read-only"
        variant = "copfl"
        self.child(self.words(variant, folder), Writes(folder, self.whole(variant).writes // 2, die).patch)
        before = contents(folder)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        pid = started(("resume", str(folder), "--quiet"), obey_permissions, self.err)
        how = ended(pid, self.err)
        right = how.code == 2 and "Permission denied" in how.err and contents(folder) == before
        self.check("a read-only folder: exit code 2, reported, nothing changed", right, how)
        pid = started(self.words(variant, folder / "new"), obey_permissions, self.err)
        how = ended(pid, self.err)
        right = how.code == 2 and "Permission denied" in how.err and contents(folder) == before
        self.check("a new run below a read-only folder: exit code 2, reported", right, how)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        self.check_resumed("a read-only folder that may be written again", variant, folder)

    def clock(self) -> None:
        """A clock that is ten years off or runs backwards, and files from the future and the past."""
        for name, shift in (("ten years ahead", 3e8), ("ten years behind", -3e8), ("backwards", 0.0)):
            folder, variant = self.home / "clock", self.draw.choice(("copfl", "copfl, states on disk"))

            def moved(shift: float = shift) -> None:
                now, calls = time.time, itertools.count(1)
                start = now()

                def shifted() -> float:
                    return now() + shift if shift else start - next(calls) * 3600

                time.time, time.time_ns = shifted, lambda: int(shifted() * 1e9)

            def both(moved: Patch = moved, folder: Path = folder, variant: str = variant) -> None:
                moved()
                Writes(folder, self.whole(variant).writes // 2, die).patch()

            how = self.child(self.words(variant, folder), both)
            self.check(f"the clock is {name}: the run works until it is killed", how.code == KILLED, how)
            for number, path in enumerate(folder.rglob("*")):
                os.utime(path, (1e8, 1e8) if number % 2 else (4e9, 4e9))
            self.check_resumed(f"the clock is {name}, the files are of 1973 and 2096", variant, folder)

    def two(self) -> None:
        """Two processes in one folder: the second is refused, the first is not affected."""
        for command in ("run", "resume"):
            folder, variant = self.home / "two", "copfl"
            if command == "resume":
                self.child(
                    self.words(variant, folder), Writes(folder, self.whole(variant).writes // 2, die).patch
                )
            fsync = os.fsync

            def slow(fsync: Any = fsync) -> None:
                def late(handle: int) -> None:
                    time.sleep(0.1)
                    fsync(handle)

                os.fsync = late  # type: ignore[assignment]

            words = self.words(variant, folder) if command == "run" else ("resume", str(folder), "--quiet")
            first = started(words, slow, self.home / "first")
            until = time.monotonic() + LIMIT
            while (
                not ((folder / ".lock").exists() and (folder / "run.toml").exists())
                and time.monotonic() < until
            ):
                time.sleep(0.01)
            time.sleep(0.3)
            for second in (("resume", str(folder), "--quiet"), self.words(variant, folder)):
                how = self.child(second)
                right = how.code == 2 and (
                    "another process" in how.err or "already contains a run" in how.err
                )
                what = f"`copfl {second[0]}` in the folder of a working `copfl {command}`"
                self.check(f"{what}: refused with exit code 2", right, how)
            how = ended(first, self.home / "first")
            self.check(f"and the working `copfl {command}` ends well", how.code == 0, how)
            self.check_resumed(f"two processes, the first a `copfl {command}`", variant, folder)


@contextlib.contextmanager
def small_disk(path: Path, kibibytes: int) -> Iterator[Path | None]:
    """A disk of that size, or None where this process may not mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(path)]
    mounted = (
        shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    )
    try:
        yield path if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True)


def shared_memory() -> set[str]:
    """Shared memory of torch; it must be removed when the processes end."""
    return {p.name for p in Path("/dev/shm").glob("torch_*")} if Path("/dev/shm").is_dir() else set()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", type=int, default=20, help="number of writes that fail as on a full disk")
    parser.add_argument("--json", type=Path, help="file for the counts")
    parser.add_argument("--home", type=Path, help="an empty folder (default: a temporary one)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # no threads, so that forking is safe
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            36, 1, 0, 0, 0
        )  # PR_SET_CHILD_SUBREAPER: this process reaps the processes of a killed child
    started_at, shared = time.monotonic(), shared_memory()
    with tempfile.TemporaryDirectory(dir=given.home) as temporary:
        home = Path(temporary).resolve() / "home"
        home.mkdir()
        assert (
            call(("run", *TINY, "--quiet", "--out", str(home / "warm")))[0] == 0
        )  # so that the children have all modules imported
        kills = Kills(home, given.seed)
        number = 0
        while kills.count["kills"] < given.kills:
            kills.run(number)
            number += 1
        kills.full_disk(given.full)
        kills.read_only()
        kills.clock()
        kills.two()
    stay = shared_memory() - shared
    zeros = ("not resumed", "different", "other files", "stuck", "cases failed")
    summary = {
        **{name: kills.count[name] for name in ("kills", "runs", "starts", *zeros, "cases")},
        "recorded rounds to repeat, at most": kills.max_lost,
        "left in shared memory": len(stay),
        "kills by position": dict(kills.by["position"].most_common()),
        "kills by variant": dict(sorted(kills.by["variant"].items())),
        "seed": given.seed, "minutes": round((time.monotonic() - started_at) / 60, 1),
    }  # fmt: skip
    print(json.dumps(summary, indent=1))
    for line in kills.failures:
        print(line)
    if given.json:
        given.json.write_text(json.dumps({**summary, "failures": kills.failures}, indent=1) + "\n")
    return int(any(kills.count[name] for name in zeros) or kills.max_lost > 1 or bool(stay))


if __name__ == "__main__":
    sys.exit(main())
