"""Run folders of jobs: locked, finished or damaged, and without what a comparison does not need."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from copfl.comparison.jobs import Job, Start
from copfl.comparison.results import environment_of
from copfl.data.partition import Partition
from copfl.engine.rounds import State
from copfl.errors import CopflError, RunError
from copfl.experiment import new_clients, records
from copfl.experiment.config import Tables
from copfl.experiment.folder import RunFolder, claimed
from copfl.experiment.identity import essential
from copfl.experiment.result import Experiment
from copfl.files import Busy

PAUSE = 60.0  # seconds between checkpoints: a shorter run starts again instead


@contextlib.contextmanager
def locked_folder(path: Path) -> Iterator[RunFolder]:
    """The run folder, locked; whether it is new may change until the lock is ours."""
    begun = RunFolder(path).begun
    with contextlib.ExitStack() as lock:
        try:
            folder = lock.enter_context(claimed(path, new=not begun))
        except RunError as error:
            if isinstance(error, Busy) or begun or not RunFolder(path).begun:
                raise
            folder = lock.enter_context(claimed(path, new=False))
        yield folder


def finished(job: Job) -> bool:
    """Whether the run folder is there and complete; a RunError says what to do about one that is damaged."""
    folder = RunFolder(job.path)
    if not folder.begun:
        return False
    try:
        found, wanted = essential(folder.tables()), essential(job.tables)
        changed = sorted(t for t in found.keys() | wanted.keys() if found.get(t) != wanted.get(t))
        if changed not in ([], ["partition"]):  # partition.json is compared in another place
            raise RunError(f"{job.path}/run.toml was changed in {', '.join(changed)}")
        folder.partition()
        done = len(records.read(job.path / "rounds.jsonl"))
        if done > job.tables["run"]["rounds"]:
            raise RunError(f"{job.path}/rounds.jsonl has {done} rounds, more than run.toml says")
        records.read(job.path / "timing.jsonl")
        environment_of(job)
    except CopflError as error:
        raise damaged(job, error) from error
    fitted = job.tables["run"].get("new_clients") and not job.validation
    missing = fitted and not (job.path / new_clients.FILE).is_file()
    return bool(done >= job.rounds) and not missing


def damaged(job: Job, error: CopflError) -> RunError:
    """The error about a run that cannot be used as it is."""
    return RunError(f"{job.title}: {error}. Delete {job.path} to have that run made again")


def started_with(experiment: Experiment) -> Start:
    """Fingerprints of what a run of the experiment begins with, as `environment_of` reads them."""
    initial = experiment.task.initial.detach().cpu().numpy().tobytes()
    return {
        "partition": experiment.federation.partition.fingerprint[:16],
        "samples": experiment.fingerprints()["samples"],
        "weights": hashlib.sha256(initial).hexdigest()[:16],
    }


@dataclass(frozen=True)
class LeanFolder(RunFolder):
    """A run folder without models, and without a checkpoint once the run has ended.

    A comparison has dozens of runs, and the states of ten ResNets take gigabytes.
    """

    start: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 0
    until: int = 0  # the round that it may go on from
    pause: float = PAUSE
    clock: list[float] = field(default_factory=lambda: [time.monotonic()])  # time of the last checkpoint

    def begin(
        self, tables: Tables, partition: Partition, about: Mapping[str, Any], data: bytes | None = None
    ) -> None:
        super().begin(tables, partition, {**about, "start": dict(self.start)}, data)

    def checkpoint(self, state: State, fingerprints: Mapping[str, str]) -> None:
        if state.round == self.rounds:  # the run has ended
            shutil.rmtree(self.path / "checkpoint", ignore_errors=True)
            return
        due = state.round == self.until or time.monotonic() - self.clock[0] >= self.pause
        if due and importlib.util.find_spec("safetensors"):
            super().checkpoint(state, fingerprints)
            self.clock[0] = time.monotonic()

    def save_models(self, *given: Any) -> None:
        """Saves nothing."""


def held(path: Path) -> bool:
    """Whether a process works in this folder."""
    try:
        with locked_folder(path):
            return False
    except RunError as error:
        return isinstance(error, Busy)
