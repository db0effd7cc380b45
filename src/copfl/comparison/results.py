"""What a finished run shows: a value per client, its curve, and what it cost."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.comparison.jobs import Job
from copfl.core.algorithm import EVAL_MODELS
from copfl.errors import DataError, RunError
from copfl.experiment import records
from copfl.experiment.folder import RunFolder
from copfl.stats import Numbers


def accuracies(eval_models: str) -> tuple[str, ...]:
    """The accuracies that such looks find."""
    return tuple(f"accuracy{model}" for model in EVAL_MODELS[eval_models])


ACCURACIES = accuracies("all")
LAST = 5  # looks that a value is the mean of
WORST = 0.1  # share of the clients


class Outcome(NamedTuple):
    """One run. Accuracies are means over each client's last looks; nan without any, or where it lies."""

    clients: dict[str, Numbers]  # by accuracy, [clients]
    rounds: NDArray[np.int64]  # the rounds with a look, from 1
    curve: Numbers  # the mean personal accuracy of each of them
    bytes_up: float  # per client and round
    bytes_down: float
    seconds: float  # of a round, the median
    broken: int  # looks at a model that gave no finite answer; they count as accuracy 0

    def mean(self, accuracy: str) -> float:
        """Over the clients; nan if no such model was tried."""
        values = self.clients[accuracy]
        return math.nan if np.isnan(values).all() else float(np.nanmean(values))

    @property
    def worst(self) -> float:
        """The mean over the worst tenth of the clients, at least one."""
        return worst_of(self.clients["accuracy"])

    @property
    def best(self) -> float:
        """The best round of the curve: what is reported where people choose the round by its test accuracy."""
        return float(self.curve.max())


def outcome_of(job: Job, last: int = LAST) -> Outcome:
    """What the run of this job found."""
    lines = records.read(job.path / "rounds.jsonl")
    timing = [line["seconds"] for line in records.read(job.path / "timing.jsonl")]
    partition = RunFolder(job.path).partition()
    tested = np.array([len(part) > 0 for part in partition.test])
    if not tested.any():
        raise DataError(
            f"{job.label}, seed {job.seed}: no client has samples to be tested on; use another partition"
        )
    looks = [line for line in lines if "accuracy" in line["per_client"]]
    liars = np.nan_to_num(records.table(lines, "malicious", partition.clients)).any(0)
    tables, broken = {}, 0
    for name in ACCURACIES:
        values = records.table(looks, name, partition.clients)
        if ((values < 0) | (values > 1)).any():  # nan is neither
            raise RunError(
                f"{job.label}, seed {job.seed}: {name} lies between {np.nanmin(values):.3g} and "
                f"{np.nanmax(values):.3g} and must be a share, so something went wrong in the run itself; remove "
                f"{job.path} and run it again"
            )
        for row, line in zip(values, looks, strict=True):
            if name not in line["per_client"]:  # this model was not tried
                continue
            wrong = np.isin(np.arange(len(row)), line["clients"]) & tested & np.isnan(row)
            row[wrong] = 0.0
            broken += int(wrong.sum()) if name == "accuracy" else 0
        tables[name] = np.where(
            liars, math.nan, values
        )  # what an attack makes of its own clients is nobody's concern
    shown = ~np.isnan(tables["accuracy"]).all(1)  # of a few clients in a round, none may have test samples
    return Outcome(
        clients={name: last_looks(values, last) for name, values in tables.items()},
        rounds=np.array([line["round"] for line in looks])[shown],
        curve=np.nanmean(tables["accuracy"][shown], 1),
        bytes_up=_per_client(lines, "bytes_up"),
        bytes_down=_per_client(lines, "bytes_down"),
        seconds=float(np.median(timing[1:] or timing)),  # the first one also warms up
        broken=broken,
    )


def last_looks(values: Numbers, last: int) -> Numbers:
    """The mean of each client's last looks, of values [looks, clients] with nan where there was none."""
    result = np.full(values.shape[1], math.nan)
    for client, column in enumerate(values.T):
        known = column[~np.isnan(column)][-last:]
        if len(known):
            result[client] = known.mean()
    return result


def worst_of(values: Numbers) -> float:
    """The mean over the worst tenth, at least one."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[: max(1, math.ceil(WORST * len(known) - 1e-9))].mean())


def _per_client(lines: list[dict[str, Any]], name: str) -> float:
    """The mean over all turns of all rounds."""
    return float(np.mean([value for line in lines for value in line["per_client"][name]]))
