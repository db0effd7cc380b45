"""Metrics of finished runs, and checks that they can be compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.comparison.jobs import ACCURACIES, Job, Start
from copfl.errors import DataError, RunError
from copfl.experiment import records
from copfl.experiment.config import Tables
from copfl.experiment.folder import RunFolder
from copfl.stats import Numbers

WORST = 0.1  # fraction of the clients


class Outcome(NamedTuple):
    """One run. Accuracies are means over each client's last evaluations; nan without any or if malicious."""

    clients: dict[str, Numbers]  # by accuracy, [clients]
    rounds: NDArray[np.int64]  # the rounds with an evaluation, from 1
    curve: Numbers  # personal accuracy, without malicious clients; 0 where a model is not finite
    bytes_up: float  # per client and round
    bytes_down: float
    seconds: float  # of a round, the median
    broken: int  # evaluations of a model whose output is not finite; they count as accuracy 0
    highest: Mapping[str, Numbers] = {}  # by accuracy, the highest evaluation of each client, [clients]
    curves: Mapping[str, list[float]] = {}  # by metric, its mean over the clients at each evaluation

    def mean(self, accuracy: str) -> float:
        """Over the clients; nan if no such model was evaluated."""
        values = self.clients[accuracy]
        return math.nan if np.isnan(values).all() else float(np.nanmean(values))

    @property
    def worst(self) -> float:
        """The mean over the worst tenth of the clients, at least one."""
        return worst_of(self.clients["accuracy"])

    @property
    def best(self) -> float:
        """The best round of the curve: what is reported if the round is chosen by its test accuracy."""
        return float(self.curve.max())


def outcome_of(job: Job) -> Outcome:
    """The metrics of a finished run; a RunError if they cannot be right."""
    lines = records.read(job.path / "rounds.jsonl")
    timing = [line["seconds"] for line in records.read(job.path / "timing.jsonl")]
    partition = RunFolder(job.path).partition()
    tested = np.array([len(part) > 0 for part in partition.test])
    if not tested.any():
        raise DataError(f"{job.title}: no client has test samples; use another partition")
    evaluations = [line for line in lines if "accuracy" in line["per_client"]]
    malicious = np.nan_to_num(records.table(lines, "malicious", partition.clients)).any(0)
    tables, broken = {}, 0
    for name in ACCURACIES:
        values = records.table(evaluations, name, partition.clients)
        if ((values < 0) | (values > 1)).any():  # nan is neither
            raise RunError(
                f"{job.title}: {name} is between {np.nanmin(values):.3g} and {np.nanmax(values):.3g} and "
                f"must be a fraction, so something went wrong in the run; remove {job.path} and run it again"
            )
        for row, line in zip(values, evaluations, strict=True):
            if name not in line["per_client"]:  # this model was not evaluated
                continue
            wrong_output = np.isin(np.arange(len(row)), line["clients"]) & tested & np.isnan(row)
            row[wrong_output] = 0.0
            broken += int(wrong_output.sum()) if name == "accuracy" else 0
        tables[name] = np.where(malicious, math.nan, values)
    shown = ~np.isnan(tables["accuracy"]).all(axis=1)  # of few clients in a round, none may be tested
    means = [evaluations[place]["mean"] for place in np.flatnonzero(shown)]
    return Outcome(
        clients={name: last_evaluations(values, job.last) for name, values in tables.items()},
        highest={name: np.fmax.reduce(values) for name, values in tables.items()},  # nan if there is none
        rounds=np.array([line["round"] for line in evaluations])[shown],
        curves={name: [mean.get(name, math.nan) for mean in means] for name in (*ACCURACIES, "loss")},
        curve=np.nanmean(tables["accuracy"][shown], 1),
        bytes_up=_per_client(lines, "bytes_up"),
        bytes_down=_per_client(lines, "bytes_down"),
        seconds=float(np.median(timing[1:] or timing)),  # the first one also warms up
        broken=broken,
    )


def last_evaluations(values: Numbers, last: int) -> Numbers:
    """The mean of each client's last evaluations, of values [evaluations, clients] with nan for none."""
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
    """The mean over all clients of all rounds."""
    return float(np.mean([value for line in lines for value in line["per_client"][name]]))


# What runs began with


def start_of(job: Job) -> Start:
    """Fingerprints of the partition, the samples and the initial weights that the run began with."""
    path = job.path / "environment.json"
    try:
        start: Start = json.loads(path.read_text("utf-8"))["start"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} does not contain what the run began with ({error!r})") from error
    return start


# Tuning


class Trial(NamedTuple):
    """One cell of the tuning grid for one entry."""

    settings: Tables
    accuracy: float  # on the validation parts, mean over clients and tuning seeds


class Tuned(NamedTuple):
    """The settings that an entry tried; the best is chosen, of equals the first."""

    trials: list[Trial]  # none, where nothing in the grid concerns it

    @property
    def chosen(self) -> Tables:
        return max(self.trials, key=lambda trial: trial.accuracy).settings if self.trials else {}
