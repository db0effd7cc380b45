"""The audit of one run: the contribution of each client, the scores, and their rank correlations.

`copfl audit` calls `run_audit`; `synthetic` audits a federation whose truth is known.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl import __version__, foreign, stats
from copfl.audit import replay
from copfl.audit.shapley import DEFAULT, Sampling, shapley
from copfl.data.clients.groups import client_titles, names_of_clients
from copfl.errors import RunError, UsageError, raised_as
from copfl.experiment import records
from copfl.experiment.experiment import Experiment
from copfl.experiment.folder import RunFolder
from copfl.experiment.preparation import prepare
from copfl.experiment.reading import AUDIT_FORMAT
from copfl.experiment.result import Result
from copfl.experiment.training import OnRound, train_rounds
from copfl.files import write_bytes
from copfl.measures.metrics import ACCURACY, MetricInfo
from copfl.report import contributions
from copfl.report.contributions import Contributions, relative_weights
from copfl.report.run_charts import CONTRIBUTIONS
from copfl.settings import named_code
from copfl.settings.complete import complete
from copfl.settings.identity import digest
from copfl.settings.values import modules_of_values
from copfl.stats import Numbers, averaged, mean_of_known
from copfl.tables import plain

BENEFIT = "benefit"  # a score, too: what the correlations with the measured contributions say of it

# Of a run: accuracy, accuracy_global, or another primary metric: [clients]; scores: [rounds, clients] each.
Metrics = dict[str, Any]
Tick = Callable[[int], None]  # takes the number of rounds that are done since the last call


class Cache:
    """Results as small JSON files, so that an interrupted audit continues; without a folder, none is kept."""

    def __init__(self, folder: Path | None = None, tick: Tick = lambda rounds: None) -> None:
        self.folder, self.tick = folder, tick

    def get(self, name: str) -> Any:
        """The result of this name; None if there is none."""
        if self.folder is None:
            return None
        try:
            content = foreign.read_json(self.folder / f"{name}.json")
        except (OSError, ValueError):  # missing or damaged: it is computed again
            return None
        return content if isinstance(content, dict) else None

    def put(self, name: str, content: Any) -> Any:
        """Keeps the metrics of a run.

        Args:
            name: Of the run.
            content: Its metrics.
        """
        if self.folder is not None:
            write_bytes(self.folder / f"{name}.json", json.dumps(content).encode(), durable=False)
        return content

    def run(self, name: str, rounds: int, work: Callable[[OnRound], Result | Metrics]) -> Metrics:
        """The metrics of a run, which `work` carries out if they are not stored.

        Args:
            name: Of the run.
            rounds: That it has.
            work: Carries it out.
        """
        known = self.get(f"{name}-{rounds}")
        if known is not None:
            self.tick(rounds)
            return dict(known)
        done = work(lambda round, seconds: self.tick(1))
        return dict(self.put(f"{name}-{rounds}", metrics_of(done) if isinstance(done, Result) else done))


def metrics_of(result: Result) -> Metrics:
    """The primary metric of a run's last evaluations, and the scores of every round."""

    def last(table: Numbers) -> Numbers:
        known = table[~np.isnan(table).all(1)]
        return mean_of_known(known[-averaged(len(known)) :])

    names = [name for name in result.records[-1]["per_client"] if name == "weight" or name.endswith("_score")]
    scores = {name: result.metric(name) for name in sorted(names, reverse=True)}
    primary = result.primary.name
    content = {f"accuracy{of}": last(result.metric_or_nan(primary + of)) for of in ("", "_global")}
    partition = result.experiment.federation.partition
    samples = [len(train_samples) for train_samples in partition.train]
    names = list(map(str, range(len(samples))))
    contributed = contributions.contributions(result.records, names, samples, result.gains, result.primary)
    more = {} if contributed is None else {"contributions": contributions.as_json(contributed)}
    return dict(plain({**content, "scores": scores, **more}))


class Seed(NamedTuple):
    """The results of one seed, [clients] each. Scores are means over rounds of relative weights."""

    seed: int
    exact: bool  # whether the rebuilt servers are the run's own, bit for bit
    reproduced: bool | None  # whether the run has the numbers of its folder; None where it has no folder
    orders: int  # that Shapley values were sampled from, in all rounds; 0: every set was valued
    scores: dict[str, Numbers]  # by score, and by "algorithm score" of the baselines
    values: dict[str, Numbers]  # contributions, by the names in CONTRIBUTIONS
    errors: dict[str, Numbers]  # standard errors of the values
    next_round: dict[str, float]  # by score: rank correlation from one round to the next
    halves: dict[str, float]  # by score: rank correlation of the first half of the rounds with the second
    accuracy: Numbers  # or another primary metric, after training, on the client's own test samples
    accuracy_global: Numbers  # of the global model
    contributions: Contributions | None = None  # where the run measured the benefit


class Audit(NamedTuple):
    title: str
    rounds: int
    names: list[str]  # of the clients
    sampling: Sampling
    seeds: list[Seed]
    metric: MetricInfo = ACCURACY  # contributions are gains in it

    @property
    def scores(self) -> list[str]:
        return list(self.seeds[0].scores)

    @property
    def contributions(self) -> list[str]:
        return [name for name in CONTRIBUTIONS if name in self.seeds[0].values]

    def mean(self, kind: str, name: str) -> Numbers:
        """Over the seeds; [clients] of "scores", "values" and "errors", one of "next_round" and "halves".

        Args:
            kind: "scores", "values", "errors", "next_round" or "halves".
            name: Of the score or the contribution.
        """
        of_seeds = np.stack([getattr(seed, kind)[name] for seed in self.seeds])
        return np.sqrt((of_seeds**2).sum(0)) / len(of_seeds) if kind == "errors" else mean_of_known(of_seeds)

    def correlation(self, measure: stats.Measure, score: str, contribution: str) -> stats.Correlation:
        """Of a score with a contribution, over the clients.

        Args:
            measure: Of correlation, such as Spearman's.
            score: Its name.
            contribution: Its name.
        """
        left, right = [s.scores[score] for s in self.seeds], [s.values[contribution] for s in self.seeds]
        return stats.correlation(measure, left, right)

    def between_seeds(self, kind: str, name: str) -> float:
        """The rank correlation of the clients between seeds; nan of one seed.

        Args:
            kind: As of `mean`.
            name: Of the score or the contribution.
        """
        return stats.agreement(np.stack([getattr(seed, kind)[name] for seed in self.seeds]))


@named_code.scope()
def run_audit(
    path: Path,
    *,
    seeds: Sequence[int] = (),
    baselines: Sequence[str] | None = None,
    cache: Path | None = None,
    values: Mapping[str, Any] | None = None,
    code: named_code.Modules = (),
    **how: Any,
) -> Audit:
    """The audit of the run in this folder; with `seeds`, of the same clients under those seeds as well.

    Args:
        path: Of the run folder.
        seeds: Further ones.
        baselines: Algorithms whose scores are computed on the same clients; default: FedCE, or CO-PFL for FedCE.
        cache: Where runs that are done are kept.
        values: What was passed to `run` as a value (`algorithm`, `data`, `model`) is passed again.
        code: Modules of yours that the folder may name.
        how: See `audit`.
    """
    named_code.name(code, named_code.modules_in(list(baselines or [])), modules_of_values(values or {}))
    folder = RunFolder(path)
    tables, partition = folder.tables(), folder.partition()
    lines, rounds = records.read(path / "rounds.jsonl"), int(tables["run"]["rounds"])
    if len(lines) < rounds:
        missing = f"{path} has {len(lines)} of {rounds} rounds"
        raise RunError(f"{missing}; `copfl resume {path}` completes it, then audit it")
    if (evaluated := tables["run"].get("eval_models", "all")) != "all":
        less = f'{path} evaluated less than an audit needs (eval_models="{evaluated}")'
        raise UsageError(f"{less}; run it again with --set run.eval_models=all")
    audited, seed = str(tables["algorithm"].get("name", "")), int(tables["run"]["seed"])
    if baselines is None:
        baselines = [] if not audited else ["copfl"] if audited == "fedce" else ["fedce"]
    if baselines and not audited:
        raise UsageError(
            "the run's algorithm is a Python value, so it has no baselines; use --baselines none"
        )

    def make(seed: int, algorithm: str | None) -> Experiment:
        # One process, with states in memory: the numbers are the same, and uploads can be intercepted.
        layers = [tables, {"run": {"workers": 1, "store": "memory", "seed": seed}}]
        if algorithm not in (None, audited):  # with the run's optimizer, so that only the score differs
            layers += [{"algorithm": {"name": algorithm}}, {"optimizer": tables["optimizer"]}]
            layers += [{"run": {"benefit": False}}]  # the baseline is for its scores
        return prepare(complete(*layers, values={"partition": partition, **(values or {})}))

    every_seed = list(dict.fromkeys([seed, *seeds]))
    recorded = records.table(lines, "weight", len(partition.train))
    cache = cache or path / "audit"
    return audit(make, every_seed, baselines=baselines, cache=cache, recorded=recorded, **how)


def audit(
    make: Callable[[int, str | None], Experiment],
    seeds: Sequence[int],
    *,
    baselines: Sequence[str] = (),
    retrain: bool = True,
    sampling: Sampling = DEFAULT,
    cache: Path | None = None,
    start: Callable[[int], Tick] | None = None,
    recorded: Numbers | None = None,
    names: Sequence[str] = (),
    title: str = "",
) -> Audit:
    """The audit of the experiments that `make` returns for a seed, and for a baseline by its name.

    `start` receives the number of rounds to run and returns the function to call as they are done.
    `recorded` are the weights in the folder of the first seed's run, with which its repetition is compared.
    """
    first = make(seeds[0], None)
    rounds = first.settings.rounds
    identity = digest([first.fingerprints(), rounds, __version__, AUDIT_FORMAT])
    runs = 1 + len(baselines) + retrain * first.clients
    tick = (lambda done: None) if start is None else start(len(seeds) * runs * rounds)
    stored = Cache(None if cache is None else cache / identity, tick)

    def baseline(seed: int, name: str, on_round: OnRound) -> Result:
        return train_rounds(make(seed, name), None, on_round)

    by_seed = []
    for seed in seeds:
        e = first if seed == seeds[0] else make(seed, None)
        observe = partial(_observed, e, f"seed-{seed}-shapley-{digest(sampling)}", sampling, stored)
        run = stored.run(f"seed-{seed}-run-{digest(sampling)}", rounds, observe)
        of_baselines = {
            name: stored.run(f"seed-{seed}-{name}", rounds, partial(baseline, seed, name))
            for name in baselines
        }
        without = []
        for client in range(first.clients) if retrain else ():
            work = partial(replay.without, _without_halves(e), [client])
            without.append(stored.run(f"seed-{seed}-without-{client}", rounds, work))
        damaged = (
            f"a result in {stored.folder} is damaged ({{}}); delete that folder, and it is computed again"
        )
        with raised_as(RunError, damaged, *foreign.DAMAGE):
            reproduced = None
            if recorded is not None and seed == seeds[0]:
                weights = np.array(run["scores"]["weight"], np.float64)
                reproduced = bool(np.array_equal(recorded, weights, equal_nan=True))
            for name, other in of_baselines.items():
                run["scores"] |= {f"{name} {score}": rows for score, rows in other["scores"].items()}
            by_seed.append(_one_seed(seed, run, without, reproduced, e.task.metrics[0]))
            if len(by_seed[-1].accuracy) != first.clients:
                raise ValueError("it is of another number of clients")
    data, partition = first.federation.dataset, first.federation.partition
    clients = list(names) or client_titles(names_of_clients(data, partition))
    metric = MetricInfo(**first.task.metrics[0].as_json())
    return Audit(title or first.title, rounds, clients, sampling, by_seed, metric)


def _without_halves(e: Experiment) -> Experiment:
    """The same experiment without the cost of the halves."""
    settings = dataclasses.replace(e.settings, benefit=False)
    return dataclasses.replace(e, run=dataclasses.replace(e.run, run=settings))


def _observed(e: Experiment, name: str, sampling: Sampling, cache: Cache, on_round: OnRound) -> Metrics:
    """The metrics of the run and the Shapley values of each round, which are also in the cache."""
    rounds = []

    def observe(number: int, snapshot: replay.RoundSnapshot) -> None:
        of_round = cache.get(f"{name}-round-{number}")
        if of_round is None:
            players = snapshot.players
            # Of a metric without a fixed range, gains are relative to its value before the round.
            scale = 1.0 if e.task.metrics[0].fraction else float(np.abs(snapshot.value([frozenset()])).max())
            how = sampling._replace(seed=sampling.seed + number, truncate=sampling.truncate * scale)
            values = shapley(snapshot.value, players, how)
            of_round = cache.put(f"{name}-round-{number}", plain({"players": players, **values._asdict()}))
        rounds.append(of_round)
        cache.tick(1)

    result, exact = replay.observed(e, observe)
    return {**metrics_of(result), "exact": exact, "shapley": rounds}


def _one_seed(
    seed: int, run: Metrics, without: Sequence[Metrics], reproduced: bool | None, metric: MetricInfo
) -> Seed:
    accuracies = {name: np.array(run[name], np.float64) for name in ("accuracy", "accuracy_global")}
    clients = len(accuracies["accuracy"])
    value, square = np.zeros((clients, 2)), np.zeros((clients, 2))
    for of_round in run["shapley"]:
        value[of_round["players"]] += np.array(of_round["value"])
        square[of_round["players"]] += np.array(of_round["error"]) ** 2
    values = {"shapley_global": value[:, 0], "shapley_personal": value[:, 1]}
    errors = {"shapley_global": np.sqrt(square[:, 0]), "shapley_personal": np.sqrt(square[:, 1])}
    for client, left in enumerate(without):
        gains = {
            name: metric.gain(with_client, np.array(left[name], np.float64))
            for name, with_client in accuracies.items()
        }
        gains["accuracy"] = np.delete(gains["accuracy"], client)
        for name, kind in (("leave_one_out_others", "accuracy"), ("leave_one_out_global", "accuracy_global")):
            mean, error = _with_error(gains[kind])
            values.setdefault(name, np.zeros(clients))[client] = mean
            errors.setdefault(name, np.zeros(clients))[client] = error
    weights = {name: relative_weights(np.array(rows, np.float64)) for name, rows in run["scores"].items()}

    def halves(rows: Numbers) -> Numbers:
        return np.stack([mean_of_known(half) for half in np.split(rows, [len(rows) // 2]) if len(half)])

    scores = {name: mean_of_known(rows) for name, rows in weights.items()}
    next_round = {name: stats.successive_agreement(rows) for name, rows in weights.items()}
    of_halves = {name: stats.agreement(halves(rows)) for name, rows in weights.items()}
    contributed = None
    if "contributions" in run:
        names = list(map(str, range(clients)))
        contributed = contributions.of_json(run["contributions"], names, metric)
        scores[BENEFIT] = contributed.benefit.value
        next_round[BENEFIT] = of_halves[BENEFIT] = math.nan  # it is of all rounds together
    return Seed(
        seed=seed,
        exact=bool(run["exact"]),
        reproduced=reproduced,
        orders=sum(int(of_round["orders"]) for of_round in run["shapley"]),
        scores=scores,
        values=values,
        errors=errors,
        next_round=next_round,
        halves=of_halves,
        **accuracies,
        contributions=contributed,
    )


def _with_error(gains: Numbers) -> tuple[float, float]:
    """The mean of the clients' gains and its standard error."""
    gains = gains[~np.isnan(gains)]
    if not len(gains):
        return math.nan, math.nan
    mean, spread = stats.spread_of(gains)
    return mean, spread / math.sqrt(len(gains))
