"""Runs that are killed hundreds of times and go on: `python benchmarks/kills.py --kills 500`

Small runs, each in a forked child, are stopped by SIGKILL and resumed, again and again, until they are done. Half of
the kills come at a moment drawn evenly from the run's length, the others in the middle of a write: half of a file, of
a line or of a client's state is on disk, or the file is whole and its rename or sync never happens. After every kill:

    lost       rounds that are recorded and must be played again: at most the one that was being written down
    stuck      nothing may still be running, in the child or in what it started, after a limit
    different  when the run is done, rounds.jsonl, partition.json, run.toml and models/ are, byte for byte, those of a
               run that was never stopped, and no other file is there

Then the other ways to be stopped: a full disk, a folder that may not be written, a clock that jumps, two processes at
one folder. Prints a line per run; exits with 1 if anything was lost, stuck or different. --json FILE keeps the counts.
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

TINY = ("--model", "mlp", "--clients", "4", "--rounds", "5", "--batch", "64", "--set", "mlp.width=4")
EXACT = (
    "--set",
    "run.checkpoint_every=1",
    "--set",
    "run.engine=vmap",
    "--set",
    "run.mkldnn=off",
)  # not measured
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
OFTEN = {
    "copfl": 6,
    "copfl, states on disk": 4,
    "copfl, half of the clients": 2,
}  # the others once, workers seldom
SELDOM = "copfl, two workers"  # its processes import torch, which takes seconds
LIMIT = 900.0  # seconds after which a child is stuck; long, for a busy machine
KILLED = -signal.SIGKILL
Plant = Callable[[], None]


class Ended(NamedTuple):
    """How a child ended."""

    code: int  # its exit code, or minus its signal
    err: str
    stuck: bool
    seconds: float  # of processor time, as last seen


def call(words: tuple[str, ...]) -> tuple[int, str]:
    """The exit code of `copfl WORDS` in this process, and what it printed as an error."""
    sys.argv = ["copfl", *words]
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as exit:
            return int(exit.code or 0), err.getvalue()


def started(words: tuple[str, ...], plant: Plant, err: Path) -> int:
    """The process id of a forked child that does `copfl WORDS`, in a process group of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 99  # an exception that the command line should have caught
    try:
        os.setpgid(0, 0)
        plant()
        code, message = call(words)
        err.write_text(message)
    except BaseException as error:
        err.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def ended(pid: int, err: Path, after: float | None = None) -> Ended:
    """How the child ended, killed after so many seconds of processor time: on a busy machine too, anywhere in a run."""
    begun, status, seconds, stuck = time.monotonic(), None, 0.0, False
    while status is None:
        got, seen = os.waitpid(pid, os.WNOHANG)
        if got:
            status = seen
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            seconds = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
        if after is not None and seconds >= after:
            os.kill(pid, signal.SIGKILL)
        elif time.monotonic() - begun >= LIMIT:
            stuck = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    stuck |= not alone(pid)
    return Ended(os.waitstatus_to_exitcode(status), err.read_text() if err.exists() else "", stuck, seconds)


def alone(group: int, patience: float = LIMIT) -> bool:
    """Whether everything that the child had started ends by itself; it is ours to bury, as the child cannot."""
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


# -- a kill in the middle of a write -----------------------------------------------------------------------------------


class Places:
    """Counts every write, rename and sync in the folder, and does something in the middle of the one that is meant."""

    def __init__(self, folder: Path, moment: int, act: Callable[[], None]) -> None:
        self.folder, self.moment, self.act = str(folder), moment, act
        self.shared = mmap.mmap(-1, 256)  # the child counts here, and its parent reads it

    @property
    def seen(self) -> tuple[int, str]:
        """How many there were, and where the one that was meant was."""
        count, _, place = bytes(self.shared).rstrip(b"\0").decode().partition(" ")
        return int(count or 0), place

    def now(self, what: str, path: object) -> bool:
        count = self.seen[0] + 1
        if count <= self.moment or not self.moment:
            name = re.sub(r"-\d+", "", Path(str(path)).name.removeprefix("."))
            self.shared[:] = f"{count} {what} {name}".encode()[:255].ljust(256, b"\0")
        return count == self.moment

    def plant(self) -> None:
        """Puts the traps; only ever in a child."""
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

        def at(handle: int, content: Any, start: int) -> int:
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
            if self.now(
                "half of", path
            ):  # safetensors writes by itself: a kill in there leaves a part of its file
                part, whole = (
                    path.with_name(f".{path.name}.{os.getpid()}.part"),
                    path.with_name(f".{path.name}.tmp"),
                )
                self.moment = -1  # what follows is ours and does not count
                save(whole, trees, about)
                content = whole.read_bytes()
                whole.unlink()
                write(part, content[: len(content) // 2])
                try:
                    self.act()
                except OSError as error:
                    part.unlink()  # as it does when the disk is full
                    raise RunError(f"cannot write {path}: {error.strerror}") from error
            save(path, trees, about)

        def opened(path: Any, *given: Any, **named: Any) -> Any:
            file = open(path, *given, **named)  # noqa: SIM115 - who asked for it closes it
            return Line(file, self) if "a" in str(given[:1]) else file

        Path.write_bytes, os.pwrite, os.replace, os.fsync = write_bytes, at, replaced, synced  # type: ignore[assignment, method-assign]
        checkpoint.save, records.open = saved, opened  # type: ignore[attr-defined]


class Line:
    """A file to which lines are added, of which half a line may be the last."""

    def __init__(self, file: Any, places: Places) -> None:
        self.file, self.places = file, places

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> int:
        if self.places.now("half a line of", self.file.name):
            self.file.write(content[: len(content) // 2])
            self.places.act()
        return int(self.file.write(content))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- one run -----------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def result(folder: Path) -> dict[str, bytes]:
    """What must come out the same: everything but the clock, the machine, and the checkpoint's places on disk."""
    same = ("rounds.jsonl", "partition.json", "run.toml", "models/")
    return {name: content for name, content in contents(folder).items() if name.startswith(same)}


def lost(folder: Path) -> int:
    """How many rounds are recorded that the checkpoint does not have."""
    state = folder / "checkpoint" / "state.safetensors"
    done = int(checkpoint.peek(state, "")[1]["round"]) if state.exists() else 0
    return len(records.read(folder / "rounds.jsonl")) - done


class Whole(NamedTuple):
    """The run that was never stopped."""

    folder: Path
    seconds: float  # of processor time
    touches: int  # writes, renames and syncs


class Capabilities(ctypes.Structure):
    """What Linux's capget and capset speak of: two words of bits each."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def obey_permissions() -> None:
    """Gives up what lets root write where no permission allows it; others have nothing to give up."""
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
    """The harness: the folder it works in, the draws, and what it has counted."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.draw = home, random.Random(seed)
        self.count: Counter[str] = Counter()
        self.by: dict[str, Counter[str]] = {"variant": Counter(), "moment": Counter()}
        self.most_lost = 0
        self.trouble: list[str] = []
        self.wholes: dict[str, Whole] = {}
        self.err = home / "err"

    def child(self, words: tuple[str, ...], plant: Plant = lambda: None, after: float | None = None) -> Ended:
        self.err.unlink(missing_ok=True)
        return ended(started(words, plant, self.err), self.err, after)

    def words(self, variant: str, folder: Path) -> tuple[str, ...]:
        return ("run", *VARIANTS[variant], *TINY, *EXACT, "--quiet", "--out", str(folder))

    def whole(self, variant: str) -> Whole:
        if variant not in self.wholes:
            folder = self.home / "whole" / str(len(self.wholes))
            how = self.child(self.words(variant, folder))
            assert how.code == 0, f"{variant} does not run: {how}"
            counter = Places(self.home / "counted", 0, die)
            assert self.child(self.words(variant, self.home / "counted"), counter.plant).code == 0
            shutil.rmtree(self.home / "counted")
            self.wholes[variant] = Whole(folder, how.seconds, counter.seen[0])
        return self.wholes[variant]

    def run(self, number: int) -> int:
        """Kills one run until it is done; how often it was killed."""
        names = [name for name in VARIANTS if name != SELDOM]
        variant = self.draw.choices(names, [OFTEN.get(name, 1) for name in names])[0]
        if number % 60 == 30:
            variant = SELDOM
        whole, folder = self.whole(variant), self.home / f"run-{number}"
        kills, wanted, before = 0, self.draw.choice((1, 2, 3, 4, 6)), len(self.trouble)
        while True:
            begun = (folder / "run.toml").exists()
            words = ("resume", str(folder), "--quiet") if begun else self.words(variant, folder)
            moment = ""
            if kills >= wanted:
                how = self.child(words)
            elif self.draw.random() < 0.5:
                how = self.child(words, after=self.draw.uniform(0, 1) * whole.seconds)
                moment = "at a random moment"
            else:
                places = Places(folder, self.draw.randint(1, max(2, whole.touches * 2 // 3)), die)
                how = self.child(words, places.plant)
                moment = places.seen[1]
            self.count["starts"] += 1
            if how.stuck:
                self.count["stuck"] += 1
                self.trouble.append(f"{variant}: stuck after {kills} kills")
            if how.code != KILLED:
                break
            kills += 1
            self.by["moment"][moment] += 1
            self.by["variant"][variant] += 1
            if (folder / "run.toml").exists():
                self.most_lost = max(self.most_lost, lost(folder))
        self.count["kills"] += kills
        self.count["runs"] += 1
        if how.code != 0:
            self.count["not resumed"] += 1
            self.trouble.append(f"{variant}: after {kills} kills it ended in {how.code}: {how.err[-300:]}")
        else:
            self.compare(variant, whole.folder, folder)
        shutil.rmtree(folder, ignore_errors=True)
        seen = "; ".join(self.trouble[before:]) or "equal"
        print(f"{self.count['kills']:4d} kills: {variant}, killed {kills} times: {seen}", flush=True)
        return kills

    def compare(self, what: str, whole: Path, folder: Path) -> None:
        if result(folder) != result(whole):
            self.count["different"] += 1
            kept = self.home.parent / f"different-{self.count['different']}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            self.trouble.append(f"{what}: the result is different; see {kept}")
        if contents(folder).keys() != contents(whole).keys():
            self.count["other files"] += 1
            odd = sorted(contents(folder).keys() ^ contents(whole).keys())
            self.trouble.append(f"{what}: other files: {odd}")

    # -- the other ways to be stopped ----------------------------------------------------------------------------------

    def check(self, what: str, truth: bool, seen: object = "") -> None:
        """Counts one case; a violation is recorded."""
        self.count["cases"] += 1
        if not truth:
            self.count["cases failed"] += 1
            self.trouble.append(f"{what}: {seen}")
        print(f"{'holds' if truth else 'FAILS'}: {what}{'' if truth else f' ({seen})'}", flush=True)

    def goes_on(self, what: str, variant: str, folder: Path) -> None:
        """After whatever it was, the run goes on to the same end."""
        begun = (folder / "run.toml").exists()
        how = self.child(("resume", str(folder), "--quiet") if begun else self.words(variant, folder))
        before = len(self.trouble)
        if how.code == 0:
            self.compare(what, self.whole(variant).folder, folder)
        self.check(
            f"{what}; then it goes on to the same bytes", how.code == 0 and len(self.trouble) == before, how
        )
        shutil.rmtree(folder, ignore_errors=True)

    def full_disk(self, times: int) -> None:
        """Writes that fail as on a full disk, files that may not grow, and, where we may mount one, a full disk."""
        for _ in range(times):
            variant = self.draw.choice(("copfl", "copfl, states on disk"))
            folder = self.home / "full"
            moment = self.draw.randint(1, self.whole(variant).touches)
            how = self.child(self.words(variant, folder), Places(folder, moment, full).plant)
            left = (
                [n for n in contents(folder) if n.endswith((".part", ".tmp", ".lock"))]
                if folder.exists()
                else []
            )
            right = how.code == 2 and "No space left" in how.err and not left
            what = f"the disk is full at write {moment} of {variant}"
            self.check(f"{what}: exit code 2, with a message, nothing half", right, (how, left))
            self.goes_on(what, variant, folder)
        for limit in (300, 2000, 12_000):
            folder = self.home / f"limit-{limit}"

            def small(limit: int = limit) -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

            how = self.child(self.words("copfl", folder), small)
            self.check(f"no file may grow beyond {limit} bytes: exit code 2", how.code == 2, how)
            self.goes_on(f"no file may grow beyond {limit} bytes", "copfl", folder)
        with small_disk(self.home / "disk", 64) as disk:
            if disk is None:
                print("left out: a real full disk (this process may not mount one)", flush=True)
                return
            folder = disk / "run"
            how = self.child(self.words("copfl", folder))
            self.check(
                "a disk of 64 KiB is full: exit code 2, with a message",
                how.code == 2 and "No space" in how.err,
                how,
            )

    def read_only(self) -> None:
        """A folder that may not be written, by a process that permissions stop; root makes itself one."""
        folder = self.home / "read-only"
        variant = "copfl"
        self.child(self.words(variant, folder), Places(folder, self.whole(variant).touches // 2, die).plant)
        before = contents(folder)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        pid = started(("resume", str(folder), "--quiet"), obey_permissions, self.err)
        how = ended(pid, self.err)
        right = how.code == 2 and "Permission denied" in how.err and contents(folder) == before
        self.check("a read-only folder: exit code 2, with a message, nothing changed", right, how)
        pid = started(self.words(variant, folder / "new"), obey_permissions, self.err)
        how = ended(pid, self.err)
        right = how.code == 2 and "Permission denied" in how.err and contents(folder) == before
        self.check("a new run below a read-only folder: exit code 2, with a message", right, how)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        self.goes_on("a read-only folder that may be written again", variant, folder)

    def clock(self) -> None:
        """A clock that is ten years off, or runs backwards, and files from the future and the past."""
        for name, shift in (("ten years ahead", 3e8), ("ten years behind", -3e8), ("backwards", 0.0)):
            folder, variant = self.home / "clock", self.draw.choice(("copfl", "copfl, states on disk"))

            def moved(shift: float = shift) -> None:
                now, calls = time.time, itertools.count(1)
                start = now()

                def shifted() -> float:
                    return now() + shift if shift else start - next(calls) * 3600

                time.time, time.time_ns = shifted, lambda: int(shifted() * 1e9)

            def both(moved: Plant = moved, folder: Path = folder, variant: str = variant) -> None:
                moved()
                Places(folder, self.whole(variant).touches // 2, die).plant()

            how = self.child(self.words(variant, folder), both)
            self.check(f"the clock is {name}: the run works until it is killed", how.code == KILLED, how)
            for number, path in enumerate(folder.rglob("*")):
                os.utime(path, (1e8, 1e8) if number % 2 else (4e9, 4e9))
            self.goes_on(f"the clock is {name}, the files are of 1973 and 2096", variant, folder)

    def two(self) -> None:
        """Two processes at one folder: the second is refused, the first is not disturbed."""
        for begins in ("run", "resume"):
            folder, variant = self.home / "two", "copfl"
            if begins == "resume":
                self.child(
                    self.words(variant, folder), Places(folder, self.whole(variant).touches // 2, die).plant
                )
            fsync = os.fsync

            def slow(fsync: Any = fsync) -> None:
                def late(handle: int) -> None:
                    time.sleep(0.1)
                    fsync(handle)

                os.fsync = late  # type: ignore[assignment]

            words = self.words(variant, folder) if begins == "run" else ("resume", str(folder), "--quiet")
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
                right = how.code == 2 and ("another process" in how.err or "already contains a run" in how.err)
                what = f"`copfl {second[0]}` in the folder of a working `copfl {begins}`"
                self.check(f"{what}: refused with exit code 2", right, how)
            how = ended(first, self.home / "first")
            self.check(f"and the working `copfl {begins}` ends well", how.code == 0, how)
            self.goes_on(f"two processes, the first a `copfl {begins}`", variant, folder)


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


def left_in_shared_memory() -> set[str]:
    """Shared memory of processes must be freed when they end."""
    return {p.name for p in Path("/dev/shm").glob("torch_*")} if Path("/dev/shm").is_dir() else set()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", type=int, default=20, help="how many writes fail as on a full disk")
    parser.add_argument("--json", type=Path, help="where the counts go")
    parser.add_argument("--home", type=Path, help="an empty folder to work in; default: a temporary one")
    given = parser.parse_args()
    torch.set_num_threads(1)  # no threads, so that forking is safe
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            36, 1, 0, 0, 0
        )  # PR_SET_CHILD_SUBREAPER: what a killed child leaves is ours to see
    begun, shared = time.monotonic(), left_in_shared_memory()
    with tempfile.TemporaryDirectory(dir=given.home) as temporary:
        home = Path(temporary).resolve() / "home"
        home.mkdir()
        assert (
            call(("run", *TINY, "--quiet", "--out", str(home / "warm")))[0] == 0
        )  # so that children find all imported
        kills = Kills(home, given.seed)
        number = 0
        while kills.count["kills"] < given.kills:
            kills.run(number)
            number += 1
        kills.full_disk(given.full)
        kills.read_only()
        kills.clock()
        kills.two()
    stay = left_in_shared_memory() - shared
    zeros = ("not resumed", "different", "other files", "stuck", "cases failed")
    summary = {
        **{name: kills.count[name] for name in ("kills", "runs", "starts", *zeros, "cases")},
        "recorded rounds to play again, at most": kills.most_lost,
        "left in shared memory": len(stay),
        "kills by moment": dict(kills.by["moment"].most_common()),
        "kills by variant": dict(sorted(kills.by["variant"].items())),
        "seed": given.seed, "minutes": round((time.monotonic() - begun) / 60, 1),
    }  # fmt: skip
    print(json.dumps(summary, indent=1))
    for line in kills.trouble:
        print(line)
    if given.json:
        given.json.write_text(json.dumps({**summary, "trouble": kills.trouble}, indent=1) + "\n")
    return int(any(kills.count[name] for name in zeros) or kills.most_lost > 1 or bool(stay))


if __name__ == "__main__":
    sys.exit(main())
