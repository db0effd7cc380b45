"""What runs began with, without which they cannot be compared.

A run notes it when it begins (`started_with`); a comparison checks it before it compares (`Starts`).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from copfl.comparison.jobs.job import Start
from copfl.errors import RunError
from copfl.experiment.experiment import Experiment
from copfl.settings.toml import Tables

NAMES = {"partition": "partitions", "samples": "samples", "weights": "initial weights"}


@dataclass(frozen=True)
class Starts:
    """What the runs on the same clients began with; they can be compared only if it is the same."""

    advice: str  # what to do about a run that began with something else
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)  # by group: a fingerprint, and whose it is

    def check(self, title: str, settings: Tables, validation: float, start: Mapping[str, str]) -> None:
        """Nothing, if the run began with the same as those on the same data, partition and seed.

        Args:
            title: The run in words, for the error.
            settings: Its essential settings.
            validation: The fraction of the training samples that it is tested on.
            start: The fingerprints of what it began with.
        """
        run = settings["run"]
        clients = [settings["data"], settings["partition"], run["clients"], run["seed"], validation]
        weights = [*clients, settings["model"], settings.get("adapter"), run.get("precision")]
        for what, group in (("partition", clients), ("samples", clients), ("weights", weights)):
            group_key = json.dumps([what, group], sort_keys=True)
            known, other = self.seen.setdefault(group_key, (start[what], title))
            if start[what] != known:
                raise RunError(
                    f"{title} and {other} began with different {NAMES[what]}, so they cannot be compared: "
                    f"the data, the kind of processor or the version of torch changed; {self.advice}"
                )


def started_with(experiment: Experiment) -> Start:
    """Fingerprints of what a run of the experiment begins with, as `environment_of` reads them."""
    initial = experiment.task.initial.detach().cpu().numpy().tobytes()
    return {
        "partition": experiment.federation.partition.fingerprint[:16],
        "samples": experiment.fingerprints()["samples"],
        "weights": hashlib.sha256(initial).hexdigest()[:16],
    }
