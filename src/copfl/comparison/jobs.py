"""One run as data: its settings, its identity, its folder and what it began with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from copfl.core.evaluation import EVAL_MODELS
from copfl.errors import RunError
from copfl.experiment.config import Tables
from copfl.experiment.identity import essential, identity

LAST = 5  # evaluations that a value is the mean of
Start = dict[str, str]  # fingerprints of what a run began with: "partition", "samples", "weights"


def accuracies(eval_models: str, metric: str = "accuracy") -> tuple[str, ...]:
    """The names of the metric for the models that such an evaluation has."""
    return tuple(f"{metric}{model}" for model in EVAL_MODELS[eval_models])


NAMES = {"partition": "partitions", "samples": "samples", "weights": "initial weights"}


class Job(NamedTuple):
    label: str  # of its row
    tables: Tables  # all of them, with every default
    path: Path = Path()
    validation: float = 0.0  # fraction of the training samples that it is tested on; 0: on the test samples
    last: int = LAST
    until: int = 0  # the round after which it stops, with a checkpoint to go on from; 0: the last one

    @property
    def seed(self) -> int:
        return int(self.tables["run"]["seed"])

    @property
    def rounds(self) -> int:
        """That it has when it is finished."""
        return self.until or int(self.tables["run"]["rounds"])

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


@dataclass(frozen=True)
class Starts:
    """What the runs on the same clients began with; they can be compared only if it is the same."""

    advice: str  # what to do about a run that began with something else
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)  # by group: a fingerprint, and whose it is

    def check(self, title: str, tables: Tables, validation: float, start: Mapping[str, str]) -> None:
        """Nothing, if the run began with the same as those on the same data, partition and seed."""
        kept = essential(tables)
        run = kept["run"]
        clients = [kept["data"], kept["partition"], run["clients"], run["seed"], validation]
        weights = [*clients, kept["model"], kept.get("adapter"), run.get("precision")]
        for what, group in (("partition", clients), ("samples", clients), ("weights", weights)):
            group_key = json.dumps([what, group], sort_keys=True)
            known, other = self.seen.setdefault(group_key, (start[what], title))
            if start[what] != known:
                raise RunError(
                    f"{title} and {other} began with different {NAMES[what]}, so they cannot be compared: "
                    f"the data, the kind of processor or the version of torch changed; {self.advice}"
                )
