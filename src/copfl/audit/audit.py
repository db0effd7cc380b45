"""The audit of one run: the contribution of each client, the scores, and their rank correlations."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl import __version__, stats
from copfl.audit import replay
from copfl.audit.shapley import DEFAULT, Sampling, shapley
from copfl.core.metrics import ACCURACY, MetricInfo
from copfl.data.schemes import client_titles, names_of_clients
from copfl.errors import RunError, UsageError
from copfl.experiment import records
from copfl.experiment.folder import RunFolder
from copfl.experiment.run import Experiment, OnRound, Result, prepare, train_rounds
from copfl.files import write_bytes
from copfl.report import contributions
from copfl.report.contributions import UNIT, Contributions, relative_weights
from copfl.report.run_charts import CONTRIBUTIONS
from copfl.report.run_data import AUDIT_FORMAT
from copfl.settings.complete import complete
from copfl.settings.identity import digest
from copfl.stats import Numbers, averaged, mean_of_known
from copfl.tables import Table, as_markdown, interval, number, plain, with_spread

BENEFIT = "benefit"  # a score, too: what the correlations with the measured contributions say of it
SCORES = {
    "weight": "weight",
    "gradient_score": "gradient part",
    "prediction_score": "prediction part",
    BENEFIT: "benefit to the others",
}
MEASURES = {"Spearman": stats.spearman, "Kendall": stats.kendall}

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
            return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or damaged: it is computed again
            return None

    def put(self, name: str, content: Any) -> Any:
        if self.folder is not None:
            write_bytes(self.folder / f"{name}.json", json.dumps(content).encode(), durable=False)
        return content

    def run(self, name: str, rounds: int, work: Callable[[OnRound], Result | Metrics]) -> Metrics:
        """The metrics of a run, which `work` carries out if they are not stored."""
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
    samples = [len(part) for part in partition.train]
    names = list(map(str, range(len(samples))))
    found = contributions.contributions(result.records, names, samples, result.gains, result.primary)
    more = {} if found is None else {"contributions": contributions.as_json(found)}
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
        """Over the seeds; [clients] of "scores", "values" and "errors", one of "next_round" and "halves"."""
        found = np.stack([getattr(seed, kind)[name] for seed in self.seeds])
        return np.sqrt((found**2).sum(0)) / len(found) if kind == "errors" else mean_of_known(found)

    def correlation(self, measure: stats.Measure, score: str, contribution: str) -> stats.Correlation:
        """Of a score with a contribution, over the clients."""
        left, right = [s.scores[score] for s in self.seeds], [s.values[contribution] for s in self.seeds]
        return stats.correlation(measure, left, right)

    def between_seeds(self, kind: str, name: str) -> float:
        """The rank correlation of the clients between seeds; nan of one seed."""
        return stats.agreement(np.stack([getattr(seed, kind)[name] for seed in self.seeds]))


def run_audit(
    path: Path,
    *,
    seeds: Sequence[int] = (),
    baselines: Sequence[str] | None = None,
    cache: Path | None = None,
    values: Mapping[str, Any] | None = None,
    **how: Any,
) -> Audit:
    """The audit of the run in this folder; with `seeds`, of the same clients under those seeds as well.

    `baselines` are algorithms whose scores are computed on the same clients; default: FedCE, or CO-PFL for
    FedCE. `values` that were passed to `run` (`algorithm`, `data`, `model`) are passed again; `how`: see
    `audit`.
    """
    folder = RunFolder(path)
    tables, partition = folder.tables(), folder.partition()
    lines, rounds = records.read(path / "rounds.jsonl"), int(tables["run"]["rounds"])
    if len(lines) < rounds:
        missing = f"{path} has {len(lines)} of {rounds} rounds"
        raise RunError(f"{missing}; `copfl resume {path}` completes it, then audit it")
    if (evaluated := tables["run"].get("eval_models", "all")) != "all":
        less = f'{path} evaluated less than an audit needs (eval_models="{evaluated}")'
        raise UsageError(f"{less}; run it again with --set run.eval_models=all")
    own, seed = str(tables["algorithm"].get("name", "")), int(tables["run"]["seed"])
    if baselines is None:
        baselines = [] if not own else ["copfl"] if own == "fedce" else ["fedce"]
    if baselines and not own:
        raise UsageError(
            "the run's algorithm is a Python value, so it has no baselines; use --baselines none"
        )

    def make(seed: int, algorithm: str | None) -> Experiment:
        # One process, with states in memory: the numbers are the same, and uploads can be intercepted.
        layers = [tables, {"run": {"workers": 1, "store": "memory", "seed": seed}}]
        if algorithm not in (None, own):  # with the run's optimizer, so that only the score differs
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

    found = []
    for seed in seeds:
        e = first if seed == seeds[0] else make(seed, None)
        observe = partial(_observed, e, f"seed-{seed}-shapley-{digest(sampling)}", sampling, stored)
        run = stored.run(f"seed-{seed}-run-{digest(sampling)}", rounds, observe)
        reproduced = None
        if recorded is not None and seed == seeds[0]:
            weights = np.array(run["scores"]["weight"], np.float64)
            reproduced = bool(np.array_equal(recorded, weights, equal_nan=True))
        for name in baselines:
            scores = stored.run(f"seed-{seed}-{name}", rounds, partial(baseline, seed, name))["scores"]
            run["scores"] |= {f"{name} {score}": rows for score, rows in scores.items()}
        without = []
        for client in range(first.clients) if retrain else ():
            work = partial(replay.without, _without_halves(e), [client])
            without.append(stored.run(f"seed-{seed}-without-{client}", rounds, work))
        found.append(_one_seed(seed, run, without, reproduced, e.task.metrics[0]))
    data, partition = first.federation.dataset, first.federation.partition
    clients = list(names) or client_titles(names_of_clients(data, partition))
    metric = MetricInfo(**first.task.metrics[0].as_json())
    return Audit(title or first.title, rounds, clients, sampling, found, metric)


def _without_halves(e: Experiment) -> Experiment:
    """The same experiment without the cost of the halves."""
    settings = dataclasses.replace(e.settings, benefit=False)
    return dataclasses.replace(e, run=dataclasses.replace(e.run, run=settings))


def _observed(e: Experiment, name: str, sampling: Sampling, cache: Cache, on_round: OnRound) -> Metrics:
    """The metrics of the run and the Shapley values of each round, which are also in the cache."""
    rounds = []

    def observe(number: int, snapshot: replay.RoundSnapshot) -> None:
        one = cache.get(f"{name}-round-{number}")
        if one is None:
            players = snapshot.players
            # Of a metric without a fixed range, gains are relative to its value before the round.
            scale = 1.0 if e.task.metrics[0].fraction else float(np.abs(snapshot.value([frozenset()])).max())
            how = sampling._replace(seed=sampling.seed + number, truncate=sampling.truncate * scale)
            found = shapley(snapshot.value, players, how)
            one = cache.put(f"{name}-round-{number}", plain({"players": players, **found._asdict()}))
        rounds.append(one)
        cache.tick(1)

    result, exact = replay.observed(e, observe)
    return {**metrics_of(result), "exact": exact, "shapley": rounds}


def _one_seed(
    seed: int, run: Metrics, without: Sequence[Metrics], reproduced: bool | None, metric: MetricInfo
) -> Seed:
    accuracies = {name: np.array(run[name], np.float64) for name in ("accuracy", "accuracy_global")}
    clients = len(accuracies["accuracy"])
    value, square = np.zeros((clients, 2)), np.zeros((clients, 2))
    for one in run["shapley"]:
        value[one["players"]] += np.array(one["value"])
        square[one["players"]] += np.array(one["error"]) ** 2
    values = {"shapley_global": value[:, 0], "shapley_personal": value[:, 1]}
    errors = {"shapley_global": np.sqrt(square[:, 0]), "shapley_personal": np.sqrt(square[:, 1])}
    for client, left in enumerate(without):
        gains = {name: metric.gain(own, np.array(left[name], np.float64)) for name, own in accuracies.items()}
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
        orders=sum(int(one["orders"]) for one in run["shapley"]),
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


# Tables, Markdown, JSON


def label(score: str) -> str:
    """Such as "weight", or "fedce: gradient part"."""
    algorithm, _, name = score.rpartition(" ")
    return f"{algorithm}: {SCORES.get(name, name)}" if algorithm else SCORES.get(name, name)


def tables_of(found: Audit, details: bool = True) -> list[Table]:
    """The tables of an audit; Kendall's correlations are details."""
    measures = [_correlations(found, name) for name in MEASURES if details or name == "Spearman"]
    return [_clients(found), *_contributed(found), *measures, _stability(found)]


def _contributed(found: Audit) -> list[Table]:
    """The benefit with its interval beside the other numbers of each client, a table for each seed that measured it."""
    tables = []
    for seed in found.seeds:
        if seed.contributions is not None:
            table = contributions.table(seed.contributions._replace(names=found.names))
            tables.append(table._replace(title=f"{table.title}, seed {seed.seed}"))
    return tables


NOTES = {
    "clients": "weight: 1 is an equal weight, mean over rounds; rank 1 is the largest. Leave-one-out: the "
    "gain in the others' personal models, or in the global model on all test samples, over training "
    "without the client. Shapley: its Shapley value of each round's uploads, summed over the rounds, for the "
    "global model and for the personal models. ± standard error over clients and sampled orders.",
    "benefit": "Benefit: to the others, in thousandths of their loss per round, from random halves of the uploads.",
    "correlations": "+1: the same order, -1: the reverse, 0: no relation. In brackets the central 95 % of "
    "the values when the clients are resampled: an interval that contains 0 is inconclusive.",
    "stability": "Of the clients' ranks in a round and the next, in the two halves, and under two seeds.",
    "not reproduced": "The run was not reproduced here with the numbers of its folder (another machine or "
    "version?): the repetition is audited.",
    "one seed": " One seed was run; --seeds 0,1,2 measures the variation between seeds.",
}


def _clients(found: Audit) -> Table:
    weight = found.mean("scores", "weight")
    rank, metric = stats.ranked(-weight), found.metric
    accuracy = mean_of_known(np.stack([seed.accuracy for seed in found.seeds]))
    means = [(found.mean("values", name), found.mean("errors", name)) for name in found.contributions]
    errors = [seed.contributions.benefit.error for seed in found.seeds if seed.contributions is not None]
    benefits: list[list[str]] = [[] for _ in found.names]
    if errors:
        pairs = zip(
            found.mean("scores", BENEFIT), np.sqrt(np.square(errors).sum(0)) / len(errors), strict=True
        )
        benefits = [[with_spread(UNIT * value, UNIT * error, "+.2f")] for value, error in pairs]
    rows = []
    for n, name in enumerate(found.names):
        gains = [metric.text(value[n], error[n], sign="+") for value, error in means]
        own = metric.text(accuracy[n])
        rows.append([name, number(weight[n], ".2f"), number(rank[n], "g"), *benefits[n], *gains, own])
    head = [
        "",
        "weight",
        "rank",
        *(["benefit"] if errors else []),
        *(CONTRIBUTIONS[name] for name in found.contributions),
        metric.title,
    ]
    title = f"Contribution of each client in {metric.gains}, {found.title}"
    about = f"{NOTES['clients']} {NOTES['benefit']}" if errors else NOTES["clients"]
    return Table(title, head, rows, [about + _seeds(found)])


def _correlations(found: Audit, measure: str) -> Table:
    def cell(score: str, contribution: str) -> str:
        value, low, high = found.correlation(MEASURES[measure], score, contribution)
        return number(value, "+.2f") + ("" if math.isnan(value) else f" {interval(low, high, '+.2f')}")

    title = f"{measure}'s rank correlation between the scores and the measured contributions"
    head = ["", *(CONTRIBUTIONS[name] for name in found.contributions)]
    rows = [[label(score), *(cell(score, name) for name in found.contributions)] for score in found.scores]
    return Table(title, head, rows, [NOTES["correlations"] + _seeds(found)])


def _stability(found: Audit) -> Table:
    rows = []
    for name in (*found.scores, *found.contributions):
        kind = "values" if name in CONTRIBUTIONS else "scores"
        parts = ("next_round", "halves")
        rounds = [float(found.mean(part, name)) if kind == "scores" else None for part in parts]
        numbers = [*rounds, found.between_seeds(kind, name)]
        rows.append([CONTRIBUTIONS.get(name) or label(name), *(number(value, "+.2f") for value in numbers)])
    note = NOTES["stability"] + (NOTES["one seed"] if len(found.seeds) < 2 else "")
    head = ["", "from round to round", "first half, second half", "between seeds"]
    return Table("Stability of the ranks: Spearman's rank correlation", head, rows, [note])


def _seeds(found: Audit) -> str:
    seeds = ", ".join(str(seed.seed) for seed in found.seeds)
    return f" Means over the seeds {seeds}." if len(found.seeds) > 1 else ""


def remarks(found: Audit) -> list[str]:
    """Remarks on the method that a reader needs."""
    lines = []
    if not all(seed.exact for seed in found.seeds):
        lines += [
            "The servers rebuilt from the uploads are not the run's bit for bit; expect small differences."
        ]
    if any(seed.reproduced is False for seed in found.seeds):
        lines += [NOTES["not reproduced"]]
    metric, least = found.metric, found.sampling.truncate
    points = f"{100 * least:g} points" if metric.fraction else f"{100 * least:g} % of the {metric.title}"
    if orders := sum(seed.orders for seed in found.seeds):
        return [*lines, f"Shapley values come from {orders} sampled orders, truncated within {points}."]
    return [*lines, f"Shapley values are exact within each round; rounds that gain under {points} count 0."]


def _as_json(found: Contributions | None) -> dict[str, Any] | None:
    return None if found is None else contributions.as_json(found)


def as_json(found: Audit) -> dict[str, Any]:
    """All results; numbers that are not finite are null."""
    kinds = {"scores": found.scores, "values": found.contributions, "errors": found.contributions}
    content = {
        "format": AUDIT_FORMAT,
        "title": found.title,
        "clients": found.names,
        "rounds": found.rounds,
        "sampling": found.sampling._asdict(),
        "metric": found.metric.as_json(),
        "seeds": [seed._asdict() | {"contributions": _as_json(seed.contributions)} for seed in found.seeds],
        "mean": {kind: {name: found.mean(kind, name) for name in names} for kind, names in kinds.items()},
        "correlations": [
            {
                "score": score,
                "contribution": name,
                **{measure.lower(): found.correlation(f, score, name) for measure, f in MEASURES.items()},
            }
            for score in found.scores
            for name in found.contributions
        ],
        "between_seeds": {
            name: found.between_seeds(kind, name) for kind in ("scores", "values") for name in kinds[kind]
        },
        "remarks": remarks(found),
    }
    return dict(plain(content))


def write(folder: Path, found: Audit, content: Any) -> list[Path]:
    """The paths of audit.json and audit.md, once they are written."""
    parts = [f"# Audit: {found.title}", *map(as_markdown, tables_of(found)), *remarks(found)]
    texts = {"audit.json": json.dumps(content, indent=1), "audit.md": "\n\n".join(parts)}
    for name, text in texts.items():
        write_bytes(folder / name, f"{text}\n".encode(), durable=False)
    return [folder / name for name in texts]
