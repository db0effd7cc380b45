"""The run that an entry and a seed need, the folder that it has in the comparison, and how it is carried out there."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from copfl import __version__
from copfl.data.partition import Partition
from copfl.engine import simulate
from copfl.errors import CopflError, RunError
from copfl.experiment import records
from copfl.experiment.components import resolve
from copfl.experiment.config import Tables
from copfl.experiment.folder import RunFolder, claimed
from copfl.experiment.run import Experiment, execute, prepare, reopen

FREE = {
    "data": {"dir", "code"},
    "model": {"code"},
    "run": {"checkpoint_every", "save_models"},
}  # where things are, not what they are
PAUSE = 60.0  # seconds between checkpoints: a run that is quicker than that is begun again instead


class Job(NamedTuple):
    """One run of a comparison."""

    label: str  # of its entry
    seed: int
    tables: Tables  # all of them, with every default
    path: Path


def job_of(folder: Path, label: str, layers: Sequence[Tables], seed: int) -> Job:
    """The run of these layers and this seed. Its folder is called after it, and found again by what it is of."""
    tables = resolve([*layers, {"run": {"seed": seed}}], {})
    digest = digest_of(tables)
    known = sorted(folder.glob(f"*-{digest}"))  # under another label it is the same run
    name = re.sub(r"[^\w.=-]+", "-", label).strip("-.")[:60]
    return Job(label, seed, tables, known[0] if known else folder / f"{name}-seed{seed}-{digest}")


def digest_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Ten hexadecimal digits that differ where two runs may differ in their numbers."""
    kept = _without(tables, FREE)
    file = str(kept["partition"].get("name", ""))
    if file.endswith(".json"):  # what it holds counts, not where it lies
        kept["partition"] = {"sha256": Partition.load(file).fingerprint}
    text = json.dumps([__version__, kept], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _without(tables: Mapping[str, Mapping[str, Any]], *dropped: Mapping[str, set[str]]) -> Tables:
    """The tables without some keys, as a file gives them back: without what is None, and with lists for tuples."""
    gone = {(title, key) for part in dropped for title, keys in part.items() for key in keys}
    kept = {
        title: {k: v for k, v in t.items() if v is not None and (title, k) not in gone}
        for title, t in tables.items()
    }
    plain: Tables = json.loads(json.dumps(kept, default=str))
    return plain


def finished(job: Job) -> bool:
    """Whether the run is there and whole; a RunError says what to do about one that is damaged."""
    folder = RunFolder(job.path)
    if not folder.begun:
        return False
    try:
        # What was left open is decided when the run begins, by what suits the machine.
        left_open = {"device", "chunk"} | {key for key, value in job.tables["run"].items() if value == "auto"}
        found, wanted = (
            _without(tables, FREE, {"run": left_open}) for tables in (folder.tables(), job.tables)
        )
        for other in (found, wanted):
            other["partition"] = {}  # partition.json says it better
        if found != wanted:
            odd = sorted(t for t in found.keys() | wanted.keys() if found.get(t) != wanted.get(t))
            raise RunError(f"{job.path}/run.toml was changed in {', '.join(odd)}")
        folder.partition()
        done = len(records.read(job.path / "rounds.jsonl"))
        if done > job.tables["run"]["rounds"]:
            raise RunError(f"{job.path}/rounds.jsonl has {done} rounds, more than run.toml says")
        records.read(job.path / "timing.jsonl")
        start_of(job)
    except CopflError as error:
        raise damaged(job, error) from error
    return bool(done == job.tables["run"]["rounds"])


def damaged(job: Job, error: CopflError) -> RunError:
    """The error about a run that cannot be used as it is."""
    return RunError(f"{job.label}, seed {job.seed}: {error}. Delete {job.path} to have that run made again")


def start_of(job: Job) -> dict[str, str]:
    """Fingerprints of what the run began with: the partition, the samples and the first weights."""
    path = job.path / "environment.json"
    try:
        start: dict[str, str] = json.loads(path.read_text("utf-8"))["start"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} does not say what the run began with ({error!r})") from error
    return start


def carry_out(job: Job) -> None:
    """Does what is left of the run; nothing if it is finished."""
    if finished(job):
        return
    with claimed(job.path, new=not RunFolder(job.path).begun) as held:
        try:
            experiment = reopen(held) if held.begun else prepare([job.tables])
            execute(
                experiment,
                LeanFolder(job.path, start=started_with(experiment), rounds=experiment.loop.rounds),
            )
        except RunError as error:
            raise damaged(job, error) from error


def started_with(experiment: Experiment) -> dict[str, str]:
    """Fingerprints of what a run of the experiment begins with, as `start_of` gives them back."""
    first = experiment.task.initial.detach().cpu().numpy().tobytes()
    return {
        "partition": experiment.federation.partition.fingerprint[:16],
        "samples": experiment.fingerprints()["samples"],
        "first": hashlib.sha256(first).hexdigest()[:16],
    }


@dataclass(frozen=True)
class LeanFolder(RunFolder):
    """A run folder with what a comparison reads and no more: no models, and no checkpoint once the run has ended.

    A comparison has dozens of runs, and the states of ten ResNets take gigabytes.
    """

    start: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 0
    pause: float = PAUSE
    clock: list[float] = field(default_factory=lambda: [time.monotonic()])  # when there was a checkpoint last

    def begin(
        self, tables: Mapping[str, Mapping[str, Any]], partition: Partition, about: Mapping[str, Any]
    ) -> None:
        super().begin(tables, partition, {**about, "start": dict(self.start)})

    def checkpoint(self, state: simulate.State, fingerprints: Mapping[str, str]) -> None:
        if state.round == self.rounds:  # the run has ended, so its checkpoint goes
            shutil.rmtree(self.path / "checkpoint", ignore_errors=True)
            return
        possible = importlib.util.find_spec("safetensors") is not None
        due = time.monotonic() - self.clock[0] >= self.pause
        if due and possible:
            super().checkpoint(state, fingerprints)
            self.clock[0] = time.monotonic()

    def save_models(self, *given: Any) -> None:
        """Nothing is saved."""


def check_common(jobs: Sequence[Job]) -> None:
    """Nothing, if runs of one seed on the same data began with the same partition, samples and first weights."""
    seen: dict[str, tuple[Job, str]] = {}
    for job in jobs:
        start, tables = start_of(job), job.tables
        where = [job.seed, tables["data"], tables["partition"], tables["run"]["clients"]]
        weights = [*where, tables["model"], tables["run"]["precision"]]
        for what, group in (("partition", where), ("samples", where), ("first", weights)):
            key = json.dumps([what, group], sort_keys=True, default=str)
            other, fingerprint = seen.setdefault(key, (job, start[what]))
            if fingerprint != start[what]:
                raise RunError(
                    f"seed {job.seed}: the {what.replace('first', 'first weights')} of {job.path} are not those of "
                    f"{other.path}, so they cannot be compared; the data changed between them: delete the older one"
                )
