"""One run as data: its settings, its identity, its folder and what it began with.

A folder may be locked, finished or damaged; it lacks what a comparison does not need.
"""

import contextlib
import importlib.util
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from copfl import foreign
from copfl.core.evaluation import EVAL_MODELS
from copfl.core.selection import has_ended
from copfl.data.clients.partition import Partition
from copfl.engine.rounds import State
from copfl.errors import CopflError, RunError, raised_as
from copfl.experiment import records
from copfl.experiment.final import FINAL
from copfl.experiment.folder import RunFolder, claimed
from copfl.experiment.models.new_clients import NEW_CLIENTS
from copfl.files import Busy
from copfl.measures.metrics import metrics_of
from copfl.settings.identity import codes, essential, identity
from copfl.settings.named_code import changed_modules
from copfl.settings.schema import Run
from copfl.settings.toml import Tables

PAUSE = 60.0  # seconds between checkpoints: a shorter run starts again instead
Start = dict[str, str]  # fingerprints of what a run began with
STARTED = ("partition", "samples", "weights")


def accuracies(eval_models: str, metric: str = "accuracy") -> tuple[str, ...]:
    """The names of the metric for the models that such an evaluation has.

    Args:
        eval_models: Which models a run evaluates, as of the setting.
        metric: Its name.
    """
    return tuple(f"{metric}{model}" for model in EVAL_MODELS[eval_models])


class Job(NamedTuple):
    label: str  # of its row
    run: Run  # its settings, complete
    path: Path = Path()
    validation: float = 0.0  # fraction of the training samples that it is tested on; 0: on the test samples
    last: int | None = None  # evaluations that a value is the mean of; None: see `stats.averaged`
    until: int = 0  # the round after which it stops, with a checkpoint to go on from; 0: the last one

    @property
    def seed(self) -> int:
        return self.run.run.seed

    @property
    def rounds(self) -> int:
        """That it has when it is finished."""
        return self.until or self.run.run.rounds

    @property
    def title(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def id(self) -> str:
        """What it is, whatever the machine and the models that are evaluated."""
        return identity(self.run, self.validation)


def placed(job: Job, folder: Path) -> Job:
    """The job with its run folder below `folder`: the one that is there under any label, or a new one.

    A run that was stopped must evaluate the same models when it continues, so `eval_models` counts here.

    Args:
        job: The run.
        folder: Of the run folders.
    """
    digest = identity(job.run, job.validation, job.run.run.eval_models)
    known = sorted(folder.glob(f"*-{digest}"))
    name = re.sub(r"[^\w.=-]+", "-", job.label).strip("-.")[:60]
    return job._replace(path=known[0] if known else folder / f"{name}-seed{job.seed}-{digest}")


def edited_since(job: Job) -> list[str]:
    """The user's modules that were edited since a run with these settings, in the same folder of runs."""
    if not (own := codes(job.run)):
        return []
    wanted = essential(job.run)
    for file in sorted(job.path.parent.glob(f"*-seed{job.seed}-*/run.toml")):
        with contextlib.suppress(CopflError):  # damaged, and no concern of this run
            earlier = Run.of(RunFolder(file.parent).tables())
            if essential(earlier) == wanted and (before := codes(earlier)) != own:
                kinds = before.keys() | own.keys()
                edited = [changed_modules(before.get(kind), own.get(kind)) for kind in kinds]
                return sorted({module for modules in edited for module in modules})
    return []


# Folders


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
        stored, wanted = essential(Run.of(folder.tables())), essential(job.run)
        changed = sorted(t for t in stored.keys() | wanted.keys() if stored.get(t) != wanted.get(t))
        if changed not in ([], ["partition"]):  # partition.json is compared in another place
            raise RunError(f"{job.path}/run.toml was changed in {', '.join(changed)}")
        folder.partition()
        rounds = records.read(job.path / "rounds.jsonl")
        done = len(rounds)
        if done > job.run.run.rounds:
            raise RunError(f"{job.path}/rounds.jsonl has {done} rounds, more than run.toml says")
        records.read(job.path / "timing.jsonl")
        environment = environment_of(job)
    except CopflError as error:
        raise damaged(job, error) from error
    fitted = job.run.run.new_clients and not job.validation
    missing = fitted and not (job.path / NEW_CLIENTS.file).is_file()
    settings = job.run.run
    if job.rounds == settings.rounds and settings.participants < len(settings.split_clients[0]):
        missing = missing or not (job.path / FINAL.file).is_file()
    best = None
    if settings.patience:
        best = records.best_rounds(rounds, metrics_of(environment)[0], settings.clients)
    return has_ended(done, job.rounds, best, settings.patience) and not missing


def damaged(job: Job, error: CopflError) -> RunError:
    """The error about a run that cannot be used as it is.

    Args:
        job: The run.
        error: What is wrong with it.
    """
    return RunError(f"{job.title}: {error}. Delete {job.path} to have that run made again")


@dataclass(frozen=True)
class LeanFolder(RunFolder):
    """A run folder without models, and without a checkpoint once the run has ended.

    A comparison has dozens of runs, and the states of ten ResNets take gigabytes.
    """

    keeps_models: ClassVar[bool] = False
    start: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 0
    until: int = 0  # the round that it may go on from
    pause: float = PAUSE
    clock: list[float] = field(default_factory=lambda: [time.monotonic()])  # time of the last checkpoint

    def begin(
        self, tables: Tables, partition: Partition, about: Mapping[str, Any], data: bytes | None = None
    ) -> None:
        """Writes what the run began with; beside the others, the fingerprints that make it comparable.

        Args:
            tables: Its settings.
            partition: Who has which samples.
            about: Facts of the process for environment.json.
            data: The samples, where the run keeps them.
        """
        super().begin(tables, partition, {**about, "start": dict(self.start)}, data)

    def checkpoint(self, state: State, fingerprints: Mapping[str, str]) -> None:
        """Writes the state where it is due, and removes the last one where the run has ended.

        Args:
            state: After a round.
            fingerprints: Of the settings and the samples.
        """
        if state.round == self.rounds:  # the run has ended
            shutil.rmtree(self.path / "checkpoint", ignore_errors=True)
            return
        due = state.round == self.until or time.monotonic() - self.clock[0] >= self.pause
        if due and importlib.util.find_spec("safetensors"):
            super().checkpoint(state, fingerprints)
            self.clock[0] = time.monotonic()


def held(path: Path) -> bool:
    """Whether a process works in this folder."""
    try:
        with locked_folder(path):
            return False
    except RunError as error:
        return isinstance(error, Busy)


def environment_of(job: Job) -> dict[str, Any]:
    """The content of environment.json, if it has what the run began with."""
    path = job.path / "environment.json"
    lacking = f"{path} does not contain what the run began with ({{}})"
    with raised_as(RunError, lacking, OSError, *foreign.DAMAGE):
        content: dict[str, Any] = foreign.read_json(path)
        start: Start = {what: str(content["start"][what]) for what in STARTED}
        _ = metrics_of(content)[0]
        return {**content, "start": start}
