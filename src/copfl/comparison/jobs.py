"""One run as data: its settings, its identity and its folder. Nothing here trains or reads a run folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from copfl.experiment.config import Tables
from copfl.experiment.identity import identity

LAST = 5  # evaluations that a value is the mean of


class Job(NamedTuple):
    """One run."""

    label: str  # of its row
    tables: Tables  # all of them, with every default
    path: Path = Path()
    validation: float = 0.0  # fraction of the training samples that it is tested on; 0: on the test samples
    last: int = LAST

    @property
    def seed(self) -> int:
        return int(self.tables["run"]["seed"])

    @property
    def title(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def id(self) -> str:
        """What it is, whatever the machine and the models that are evaluated."""
        return identity(self.tables, self.validation)


def placed(job: Job, folder: Path) -> Job:
    """The job with its run folder below `folder`: the one that is there under any label, or a new one.

    A run that was stopped must evaluate the same models when it continues, so `eval_models` counts here.
    """
    digest = identity(job.tables, job.validation, job.tables["run"]["eval_models"])
    known = sorted(folder.glob(f"*-{digest}"))
    name = re.sub(r"[^\w.=-]+", "-", job.label).strip("-.")[:60]
    return job._replace(path=known[0] if known else folder / f"{name}-seed{job.seed}-{digest}")
