"""Metrics of finished runs, and checks that they can be compared.

`read_record` reads a run folder after its job; tables and pictures see records only.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl import foreign
from copfl.comparison.jobs.job import Job, accuracies, environment_of
from copfl.errors import DataError, RunError, raised_as
from copfl.experiment import records
from copfl.experiment.final import FINAL
from copfl.experiment.folder import RunFolder
from copfl.experiment.models.new_clients import NEW_CLIENTS, NewClients
from copfl.experiment.records import FinalEvaluation
from copfl.measures.metrics import ACCURACY, MetricInfo, metrics_of
from copfl.settings.identity import essential
from copfl.settings.schema import Run
from copfl.settings.toml import Tables
from copfl.stats import LEVEL, Difference, Numbers, averaged, difference, mean_of_known, worst_of

WHERE = ("copfl", "python", "torch", "numpy", "device")  # of environment.json, for the record


class Record(NamedTuple):
    """What is kept of a run; nan where nothing was measured or defined, or of a malicious client."""

    tables: Tables  # the essential settings
    validation: float
    last: int  # evaluations that its values are the mean of, of a client with all of them
    rounds: list[int]  # those with an evaluation, from 1
    curves: dict[str, list[float]]  # by metric, its mean over the clients at each evaluation
    # By metric, each client's mean over its last evaluations; with run.select="best", of its best round. Of one that
    # no round evaluated, the value at the end.
    clients: dict[str, list[float]]
    cost: dict[str, float]  # bytes per client and round, seconds per round, outputs that are not finite
    start: Mapping[str, str] = {}  # fingerprints of the partition, the samples and the initial weights
    data: str = ""  # the data set's own note
    where: Mapping[str, str] = {}
    # By metric, each client's best evaluation; none in older records.
    best: Mapping[str, list[float]] = {}
    new: NewClients | None = None  # the clients that did not train
    metrics: tuple[MetricInfo, ...] = (ACCURACY,)  # the first is primary
    names: Sequence[str] = ()  # of the clients, their numbers where they have none
    final_evaluation: FinalEvaluation | None = None  # of the clients that no round evaluated

    @property
    def metric(self) -> MetricInfo:
        return self.metrics[0]

    @property
    def run(self) -> Run:
        """Its settings; those that do not change what is learned have their defaults."""
        return Run.of(self.tables)

    @property
    def seed(self) -> int:
        return int(self.tables["run"]["seed"])

    @property
    def same_clients(self) -> bool:
        """Whether a client is the same one in every seed: by nature, or as a file or a program says."""
        partition = self.run.partition
        is_kept = partition.name == "by_group" or partition.name.endswith(".json")
        return is_kept or bool(partition.description)

    @property
    def length(self) -> int:
        """Its rounds."""
        return int(self.tables["run"]["rounds"])

    @property
    def title(self) -> str:
        """Such as "cifar10, 10 clients, copfl, mamo, seed 0"."""
        data, algorithm, optimizer = (
            str(self.tables.get(title, {}).get("name", "-")) for title in ("data", "algorithm", "optimizer")
        )
        clients = self.tables["run"]["clients"]
        return f"{Path(data).stem}, {clients} clients, {algorithm}, {optimizer}, seed {self.seed}"

    def mean(self, name: str = "", statistic: str = "last") -> float:
        """The mean over the clients; nan where the record does not have what the statistic needs.

        Args:
            name: Of the metric and the model; "" for the primary one, of the personal models.
            statistic: "last", the last evaluations; "best", each client's best; "best_round", the best
                round of all.
        """
        name = name or self.metric.name
        if statistic == "best_round":
            return self.metric.best(self.curves[name])
        values = self.clients if statistic == "last" else self.best
        return float(mean_of_known(np.array(values[name]))) if name in values else math.nan

    @property
    def worst(self) -> float:
        """The mean over the worst tenth of the clients, at least one."""
        return worst_of(np.array(self.clients[self.metric.name]), self.metric.higher_is_better)

    @property
    def counted(self) -> tuple[int, int]:
        """The first and the last round whose evaluations are in its mean."""
        return self.rounds[-self.last :][0], self.rounds[-1]


def read_record(job: Job) -> Record:
    """The record of a finished run; a RunError if its metrics cannot be right."""
    damage = f"{job.title}: its files are damaged ({{}}); delete {job.path} to have that run made again"
    with raised_as(RunError, damage, OSError, *foreign.DAMAGE):
        lines = records.read(job.path / "rounds.jsonl")[: job.rounds]
        timing = [line["seconds"] for line in records.read(job.path / "timing.jsonl")[: job.rounds]]
        folder = RunFolder(job.path)
        partition, ran = folder.partition(), folder.tables()["run"]
        tested = np.array([len(test_samples) > 0 for test_samples in partition.test])
        if not tested.any():
            raise DataError(f"{job.title}: no client has test samples; use another partition")
        environment = environment_of(job)
        metrics = metrics_of(environment)
        primary = metrics[0].name
        evaluations = [line for line in lines if primary in line["per_client"]]
        evaluated = _evaluated(job, metrics, evaluations, tested)
        malicious = np.nan_to_num(records.table(lines, "malicious", partition.clients)).any(0)
        tables = {name: np.where(malicious, math.nan, values) for name, values in evaluated.values.items()}
        # Of few clients in a round, none may be tested.
        shown = np.flatnonzero(~np.isnan(tables[primary]).all(axis=1))
        if evaluated.undefined and not len(shown):
            raise DataError(
                f"{job.title}: the {metrics[0].title} of no client's test samples is defined, such as when each "
                "client has one class; name another metric, or use another partition"
            )
        train_losses, test_losses = (
            [float(evaluations[evaluation]["mean"].get(name, math.nan)) for evaluation in shown]
            for name in ("loss", "test_loss")
        )
        best = np.fmax if metrics[0].higher_is_better else np.fmin
        highest = {name: best.reduce(tables[name]).tolist() for name in accuracies("all", primary)}
        notes = [environment.get("data", ""), *environment.get("partition", [])]
        final = {name: last_evaluations(values, job.last) for name, values in tables.items()}
        if job.run.run.select == "best":
            best_rounds = records.best_rounds(lines, metrics[0], partition.clients).rounds
            rounds = [line["round"] for line in evaluations]
            final = {
                name: _of_rounds(best_rounds, rounds, tables[name], value) for name, value in final.items()
            }
        at_end = FINAL.read(job.path, len(lines), partition.clients)
        if at_end is not None:
            final = {
                name: _completed(values, name, at_end, metrics, tested) for name, values in final.items()
            }
        return Record(
            tables=essential(job.run),
            validation=job.validation,
            last=averaged(len(shown)) if job.last is None else job.last,
            rounds=[evaluations[evaluation]["round"] for evaluation in shown],
            curves={name: mean_of_known(values[shown], 1).tolist() for name, values in tables.items()}
            | {"loss": train_losses, "test_loss": test_losses},
            clients={name: values.tolist() for name, values in final.items()},
            best={name: values for name, values in highest.items() if not all(map(math.isnan, values))},
            cost={
                "bytes_up": _per_client(lines, "bytes_up"),
                "bytes_down": _per_client(lines, "bytes_down"),
                "seconds": float(np.median(timing[1:] or timing)),  # the first one also warms up
                "broken": evaluated.broken,
                **({"undefined": evaluated.undefined} if evaluated.undefined else {}),
            },
            start=environment["start"],
            data="; ".join(note for note in notes if note),
            where={key: str(environment[key]) for key in WHERE if key in environment}
            | {key: str(ran[key]) for key in ("engine", "precision") if key in ran},
            new=NEW_CLIENTS.read(job.path),
            metrics=metrics,
            names=environment.get("client_names", ()),
            final_evaluation=at_end,
        )


class _Evaluated(NamedTuple):
    """What the evaluations of a run measured, by the name of the metric and the model."""

    values: dict[str, Numbers]  # [evaluations, clients], nan where there is none
    broken: int  # of the primary metric, outputs that were not finite: they have the worst value
    undefined: int  # of the primary metric, values that a client's test samples do not define


def _evaluated(
    job: Job, metrics: Sequence[MetricInfo], evaluations: list[dict[str, Any]], tested: NDArray[np.bool_]
) -> _Evaluated:
    """The metrics of every model; a RunError if they cannot be right.

    Args:
        job: The run.
        metrics: Its metrics, the primary one first.
        evaluations: The lines of the evaluated rounds.
        tested: Which clients have test samples [clients].
    """
    result, broken, undefined = {}, 0, 0
    for metric, name in [(m, name) for m in metrics for name in accuracies("all", m.name)]:
        values = records.table(evaluations, name, len(tested))
        losses = records.table(evaluations, name.replace(metric.name, "test_loss", 1), len(tested))
        if metric.fraction and ((values < 0) | (values > 1)).any():  # nan is neither
            raise RunError(
                f"{job.title}: {name} is between {np.nanmin(values):.3g} and {np.nanmax(values):.3g} and "
                f"must be a fraction, so something went wrong in the run; remove {job.path} and run it again"
            )
        for row, loss, line in zip(values, losses, evaluations, strict=True):
            if name not in line["per_client"]:  # this model was not evaluated
                continue
            missing = np.isin(np.arange(len(row)), line["clients"]) & tested & np.isnan(row)
            wrong_output = missing & np.isnan(loss)
            row[wrong_output] = metric.worst_value
            if name == metrics[0].name:
                broken += int(wrong_output.sum())
                undefined += int((missing & ~wrong_output).sum())
        result[name] = values
    return _Evaluated(result, broken, undefined)


def _of_rounds(
    best_rounds: NDArray[np.int64], rounds: Sequence[int], values: Numbers, otherwise: Numbers
) -> Numbers:
    """Each client's value of the round that it takes; of one that always diverged and has none, `otherwise`."""
    evaluations = np.minimum(np.searchsorted(rounds, best_rounds), len(values) - 1)
    return np.where(best_rounds > 0, values[evaluations, np.arange(len(best_rounds))], otherwise)


def _completed(
    values: Numbers,
    name: str,
    at_end: FinalEvaluation,
    metrics: Sequence[MetricInfo],
    tested: NDArray[np.bool_],
) -> Numbers:
    """A metric of all clients, with those of the end; the worst value of a model whose output was not finite."""
    (metric,) = (m for m in metrics if name in accuracies("all", m.name))
    of_end, loss = (
        at_end.completed(np.full(len(tested), math.nan), one)[at_end.clients]
        for one in (name, name.replace(metric.name, "test_loss", 1))
    )
    whole = values.copy()
    is_broken = np.isnan(of_end) & np.isnan(loss) & tested[at_end.clients] & (name in at_end.values)
    whole[at_end.clients] = np.where(is_broken, metric.worst_value, of_end)
    return whole


def last_evaluations(values: Numbers, last: int | None = None) -> Numbers:
    """The mean of each client's last evaluations, of values [evaluations, clients] with nan for none.

    Without a number, the last third of those that the client has: one that is seldom selected has few.

    Args:
        values: [evaluations, clients], nan where there is none.
        last: How many count; None: the last third.
    """
    result = np.full(values.shape[1], math.nan)
    for client, column in enumerate(values.T):
        known = column[~np.isnan(column)]
        if len(known):
            result[client] = known[-(averaged(len(known)) if last is None else last) :].mean()
    return result


def _per_client(lines: list[dict[str, Any]], name: str) -> float:
    """The mean over all clients of all rounds."""
    return float(np.mean([value for line in lines for value in line["per_client"][name]]))


def paired(runs: Sequence[Record], others: Sequence[Record], name: str, level: float = LEVEL) -> Difference:
    """The paired difference of two rows in a metric, over the same clients and seeds.

    Args:
        runs: Of a row, one of each seed.
        others: Of the row that it is compared with, with the same seeds.
        name: Of the metric and the model.
        level: Of the intervals.
    """
    left, right = ([np.array(run.clients[name]) for run in row] for row in (runs, others))
    return difference(left, right, level, runs[0].same_clients)


# Tuning


class TuningTrial(NamedTuple):
    """Settings that an entry tried: a cell of the tuning grid, or a draw of a search."""

    settings: Tables
    accuracy: float  # or another primary metric, on the validation parts: mean over clients and tuning seeds
    fraction: float = 1.0  # of the rounds, that it trained for


class Tuned(NamedTuple):
    """The settings that an entry tried; the best of those with all rounds is chosen, of equals the first."""

    trials: list[TuningTrial]  # none, where nothing in the grid concerns it
    metric: MetricInfo = ACCURACY
    space: str = ""  # of a search

    @property
    def complete(self) -> list[TuningTrial]:
        """Those that trained for all rounds."""
        return [trial for trial in self.trials if trial.fraction == 1]

    @property
    def chosen(self) -> Tables:
        best = max(self.complete, key=lambda trial: self.metric.score(trial.accuracy), default=None)
        return {} if best is None else best.settings
