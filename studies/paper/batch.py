"""Runs what an experiment lacks, through `comparison.runner`, and adds a record of each run.

On a GPU the seeds of one cell, and its learning rates, train as one batch. Several processes may work on one
experiment; each leaves the runs of the others alone. A run that has a record is not run again.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copfl.comparison.jobs.job import Job, Start, placed
from copfl.comparison.jobs.runner import Runner
from copfl.comparison.jobs.submission import TimeIsUp
from copfl.comparison.results import results
from copfl.comparison.results.results import Record
from copfl.errors import CopflError, RunError
from copfl.experiment import records as rounds_file
from copfl.experiment.progress import span
from copfl.files import Busy
from copfl.settings.identity import essential
from copfl.settings.toml import Tables
from studies.paper.experiments import Plan
from studies.paper.findings import tuned
from studies.paper.records import Store

logger = logging.getLogger("copfl.reproduce")


@dataclass
class Batch:
    """A batch of runs: where they run, and where their records go."""

    experiment: str
    store: Store
    folder: Path  # of the run folders
    machine: Tables  # [run] and [data] of this machine: the device, the folder of the data sets
    runner: Runner

    def __post_init__(self) -> None:
        self.runner = dataclasses.replace(self.runner, known=self._known, check=self._check)

    def _known(self, job: Job) -> bool:
        self.store.refresh()
        return self.store.get(job) is not None

    def _check(self, job: Job, start: Start, note: str) -> None:
        title = f"{job.title} ({note})" if note else job.title
        self.store.starts.check(title, essential(job.run), job.validation, start)

    def run(self, plans: Sequence[Plan]) -> tuple[int, list[str]]:
        """How many jobs are left when all are done or time is up, and the errors.

        Cells are finished one after another, over all seeds, so that an incomplete table is of use; with an
        executor, which has many workers, all at once.
        """
        problems: dict[str, str] = {}
        at_once = self.runner.executor is not None
        waiting, tried = [list(plans)] if at_once else [[plan] for plan in plans], -1
        try:
            while waiting and len(waiting) != tried:  # as long as other processes finish their cells
                tried, waiting = len(waiting), [cells for cells in waiting if not self._run(cells, problems)]
            if waiting:
                held = sum(bool(missing(plan, self.store)) for cells in waiting for plan in cells)
                logger.info(f"{held} cells are left to other processes, which work on them")
        except TimeIsUp:
            logger.info("the time is up")
        return count_left(plans, self.store), list(problems.values())

    def _run(self, cells: Sequence[Plan], problems: dict[str, str]) -> bool:
        """Whether every job of the cells was run, or tried; not, if another process works on one of them."""
        complete = True
        for _ in range(2):  # the tuning jobs, then those with the settings that they chose
            self.store.refresh()
            by_id = {job.id: job for plan in cells for job in missing(plan, self.store)}
            jobs = [job for id, job in by_id.items() if id not in problems]
            ready = [placed(job._replace(run=job.run.replaced(self.machine)), self.folder) for job in jobs]
            for job, error, seconds in self.runner.run(ready):
                if isinstance(error, Busy):
                    complete = False
                    continue
                if error is None:
                    error = self._recorded(job, seconds)
                if error is not None:
                    problems[job.id] = f"{job.title}: {error}"
                    logger.info(f"failed: {problems[job.id]}")
            if not complete:
                break
        return complete

    def _recorded(self, job: Job, seconds: float) -> CopflError | None:
        if self._known(job):  # another process was faster
            return None
        try:
            record = record_of(job)
            self.store.add(record, self.experiment)
        except CopflError as error:
            return error
        logger.info(f"{job.title}: {100 * record.mean():.1f} % in {span(seconds)}")
        return None


def missing(plan: Plan, store: Store) -> list[Job]:
    """The jobs of a cell that have no record; the tuning jobs first, for the others depend on them."""
    best = tuned(plan, store)[1]
    jobs = [trial.job for trial in plan.trials()] if best is None else plan.jobs(best)
    return [job for job in jobs if store.get(job) is None]


def count_left(plans: Sequence[Plan], store: Store) -> int:
    """The number of missing jobs, those that wait for tuning included."""
    left: set[tuple[str, str]] = set()
    for plan in plans:
        jobs = missing(plan, store)
        left |= {("", job.id) for job in jobs}
        if any(
            job.validation for job in jobs
        ):  # at rates not known yet: not those that another protocol names
            left |= {(plan.protocol, job.id) for job in plan.jobs({})}
    return len(left)


# Records


def record_of(job: Job) -> Record:
    """The record of the job's finished run folder, if no mask in it is wrong."""
    if wrong := overgrown(job.run.algorithm.options, rounds_file.read(job.path / "rounds.jsonl")):
        advice = "such a run gets no record: remove its folder, and it is run again"
        raise RunError(f"{job.path}: {wrong}; {advice}")
    return results.read_record(job)


def overgrown(algorithm: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str | None:
    """The mask that grew by more than `rate` of its candidates, which no correct run does; or None.

    Candidates are the shared parameters, or with `candidates = "all"` every parameter: all of its top may be new.
    A faulty top-k kernel that selects too many entries on a busy GPU shows itself here.
    """
    rate, before = algorithm.get("rate", 1.0), dict[int, float]()
    rate = 1.0 if algorithm.get("criterion") == "held_out" else rate  # whole groups, whatever their size
    for line in rounds:
        fractions = line["per_client"].get("personal_fraction")
        for id, fraction in zip(line["clients"], fractions, strict=True) if fractions else ():
            old = before.get(id, 0.0)
            among = 1.0 if algorithm.get("candidates") == "all" else 1 - old
            if fraction > old + rate * among + 1e-3:  # counts are rounded
                grew = f"the mask of client {id} grew from {old:.1%} to {fraction:.1%} of the parameters"
                return f"in round {line['round']} {grew}, more than rate={rate} allows"
            before[id] = fraction
    return None
