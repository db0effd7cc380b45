"""The protocol of the bench: the runs that a row is made of, and what is measured in one of them.

In every setting each algorithm tries the same rates of Adam and steps of the server, on validation samples
and one seed. The best of them trains on all training samples with the other seeds, and is evaluated on test
samples. A client's value is the mean of its last evaluations.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.bench.settings import FULL, QUICK, SETTINGS, BenchSetting, arrays, samples_per_client
from copfl.comparison.jobs.starts import started_with
from copfl.comparison.results.results import last_evaluations
from copfl.comparison.rows import entries
from copfl.comparison.rows.entries import Entry
from copfl.comparison.rows.entry_settings import OPTIMIZER, row_settings
from copfl.errors import UsageError
from copfl.experiment import records
from copfl.experiment.experiment import Experiment
from copfl.experiment.preparation import prepare
from copfl.experiment.result import Result
from copfl.experiment.training import execute
from copfl.settings.complete import complete
from copfl.settings.identity import digest
from copfl.settings.toml import Tables
from copfl.settings.user_code import as_dataset
from copfl.stats import Numbers

SERVERS = ("mean", "momentum", "fedexp")
RATES = (1e-3, 3e-3, 1e-2)  # of Adam
TUNING_SEED = 0
SEEDS = (1, 2, 3)
VALIDATION = 0.25  # of each client's training samples
FEW = 80  # training samples of a client, below which a batch is small
SMALL_BATCH, BATCH = 8, 32
CHUNK = 64  # clients in a batch of the engine: fixed, as it decides on rounding


class Suite(NamedTuple):
    """Settings that an algorithm is measured in. A change of them or of the protocol is another version."""

    name: str
    settings: tuple[str, ...]
    version: str = "1"

    @property
    def hash(self) -> str:
        """Of all that is the same for every row."""
        protocol = [SERVERS, RATES, TUNING_SEED, SEEDS, VALIDATION, FEW, SMALL_BATCH, BATCH, CHUNK]
        described = {name: dataclasses.asdict(SETTINGS[name]) for name in self.settings}
        return digest([self.name, self.version, protocol, described])


SUITES = {"quick": Suite("quick", QUICK), "full": Suite("full", FULL)}


class BenchJob(NamedTuple):
    """One run of a row."""

    algorithm: str  # such as "fedprox:mu=0.1" or "mymodule:FedMine"
    setting: str
    server: str
    lr: float
    seed: int
    tuning: bool  # on validation samples

    @property
    def title(self) -> str:
        return f"{self.algorithm}, {self.setting}, {self.server} {self.lr:g}, seed {self.seed}"


class BenchMachine(NamedTuple):
    """Where runs are computed, and where their data are."""

    device: str = "cpu"
    files: Path | None = None


class MeasuredRun(NamedTuple):
    """What a run gave."""

    job: BenchJob
    accuracy: list[float | None]  # of each client; None: it has no test samples, or is malicious
    bytes: float  # that a client sends and receives in a round
    seconds: float  # of one core; on a GPU, by the clock on the wall
    start: str  # a hash of the partition, the samples and the initial weights
    hash: str  # of every number of every round and client

    @property
    def value(self) -> float:
        """The mean over the clients."""
        return float(np.mean([value for value in self.accuracy if value is not None]))


def entry_of(text: str) -> Entry:
    """The algorithm with its own options; what the protocol decides cannot be set."""
    entry = entries.entry_of(text)
    for table, options in entry.settings.items():
        for key in options:
            if table not in ("algorithm", entry.name):
                raise UsageError(
                    f"{text}: {table}.{key} is part of the protocol, which is the same for every row; set "
                    "only options of the algorithm, such as fedprox:mu=0.1"
                )
    return entry


def tuning_jobs(algorithm: str, suite: Suite, machine: BenchMachine) -> tuple[list[BenchJob], dict[str, str]]:
    """The runs on validation samples, and the server's steps that the algorithm refuses, with the reason.

    UsageError if it cannot train in some setting.

    Args:
        algorithm: Its name with options.
        suite: The settings.
        machine: The device and the data.
    """

    def jobs_of(setting: str, server: str) -> list[BenchJob]:
        return [BenchJob(algorithm, setting, server, lr, TUNING_SEED, True) for lr in RATES]

    entry_of(algorithm)  # an error in its name or options is none of a setting
    for setting in suite.settings:
        try:
            experiment_of(jobs_of(setting, "mean")[0], machine)
        except UsageError as error:
            raise UsageError(f"{algorithm} cannot train in the setting {setting}: {error}") from error
    refused: dict[str, str] = {}
    for server in SERVERS[1:]:
        try:
            experiment_of(jobs_of(suite.settings[0], server)[0], machine)
        except UsageError as error:
            refused[server] = str(error)
    accepted = [server for server in SERVERS if server not in refused]
    planned = [jobs_of(*pair) for pair in itertools.product(suite.settings, accepted)]
    return list(itertools.chain.from_iterable(planned)), refused


def final_jobs(tuning: list[MeasuredRun]) -> list[BenchJob]:
    """The runs on test samples: in each setting with the best server and rate, of equals the first."""
    best: dict[str, MeasuredRun] = {}
    for run in tuning:
        before = best.get(run.job.setting)
        if before is None or run.value > before.value:
            best[run.job.setting] = run
    return [run.job._replace(seed=seed, tuning=False) for run in best.values() for seed in SEEDS]


def experiment_of(job: BenchJob, machine: BenchMachine) -> Experiment:
    """The run of a job, ready to train.

    Args:
        job: The run.
        machine: The device and the data.
    """
    setting = SETTINGS[job.setting]
    (scheme, scheme_options), (model, model_options) = setting.partition, setting.model
    base: Tables = {
        "run": {
            "rounds": setting.rounds,
            "batch": batch_of(setting, machine.files),
            "device": machine.device,
            "engine": "vmap" if machine.device == "cpu" else "auto",  # on a GPU a CUDA graph
            "chunk": CHUNK,
            "threads": 1,
            "workers": 1,
            "eval_models": "final",
            "save_models": False,
            **({"clients": setting.clients} if setting.clients else {}),
        },
        "partition": {"name": scheme, **scheme_options},
        "model": {"name": model, **model_options},
        "optimizer": {"name": OPTIMIZER},
        **setting.extra,
    }
    row = row_settings(entry_of(job.algorithm), base)
    of_job: Tables = {"optimizer": {"lr": job.lr}, "server": {"name": job.server}, "run": {"seed": job.seed}}
    run = complete(
        *row.with_settings(of_job), values={"data": as_dataset(arrays(setting.data, machine.files))}
    )
    return prepare(run, validation=VALIDATION if job.tuning else 0.0)


def batch_of(setting: BenchSetting, files: Path | None) -> int:
    """Samples in a training step, the same for every algorithm.

    Args:
        setting: The federation.
        files: The folder of the data sets that are downloaded.
    """
    return setting.batch or (SMALL_BATCH if samples_per_client(setting, files) < FEW else BATCH)


def measured(job: BenchJob, machine: BenchMachine) -> MeasuredRun:
    """Trains the run.

    Args:
        job: The run.
        machine: The device and the data.
    """
    experiment = experiment_of(job, machine)
    # Runs beside it slow down a CPU, not its clock.
    clock = time.perf_counter if experiment.cuda else time.process_time
    started = clock()
    result = execute(experiment, None)
    seconds = clock() - started
    every_number = hashlib.sha256(b"".join(map(records.encoded, result.records)))
    accuracy = [None if math.isnan(value) else value for value in _accuracy(result).tolist()]
    sent = [result.metric_or_nan(name) for name in ("bytes_up", "bytes_down")]
    return MeasuredRun(
        job,
        accuracy,
        float(sum(np.nanmean(values) for values in sent)),
        round(seconds, 2),
        digest(started_with(experiment)),
        every_number.hexdigest()[:16],
    )


def _accuracy(result: Result) -> Numbers:
    """Each client's mean over its last evaluations; an output that is not finite counts as 0.

    A round counts for the clients that took part in it. Who was in none has the value of the model that it gets.
    """
    partition = result.experiment.federation.partition
    is_tested = np.array([len(test_samples) > 0 for test_samples in partition.test])
    is_malicious = np.nan_to_num(result.metric_or_nan("malicious")).any(0)
    evaluated = ["accuracy" in record["per_client"] for record in result.records]
    took_part = ~np.isnan(result.metric("healthy")[evaluated])
    accuracy = last_evaluations(np.where(took_part, np.nan_to_num(result.accuracy[evaluated]), math.nan))
    if (final := result.final_evaluation) is not None:
        accuracy = final.completed(accuracy, "accuracy")
        accuracy[final.clients] = np.nan_to_num(accuracy[final.clients])
    return np.where(is_tested & ~is_malicious, accuracy, math.nan)


def as_json(run: MeasuredRun) -> dict[str, Any]:
    """The measurement as one flat object."""
    return {**run.job._asdict(), **{name: value for name, value in run._asdict().items() if name != "job"}}


def from_json(content: dict[str, Any]) -> MeasuredRun:
    """The measurement of such an object."""
    job = BenchJob(*(content[name] for name in BenchJob._fields))
    return MeasuredRun(job, *(content[name] for name in MeasuredRun._fields[1:]))
