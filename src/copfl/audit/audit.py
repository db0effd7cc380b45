"""One run audited: what each client is worth, what the scores say, and what the two have in common."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl import __version__, stats
from copfl.audit import games, replay
from copfl.audit.games import DEFAULT, Sampling
from copfl.errors import RunError, UsageError
from copfl.experiment import records
from copfl.experiment.folder import RunFolder
from copfl.experiment.run import Experiment, OnRound, Result, prepare
from copfl.files import write_bytes
from copfl.report.run_data import AUDIT_FORMAT
from copfl.report.sections import CONTRIBUTIONS
from copfl.stats import Correlation

Numbers = NDArray[np.float64]
FORMAT = AUDIT_FORMAT
LAST = 5  # looks that an accuracy is the mean of

REFERENCES = CONTRIBUTIONS
SCORES = {"weight": "weight", "gradient_score": "gradient part", "prediction_score": "prediction part"}


class Cache:
    """What was worked out already, a small file each, so that a stopped audit goes on where it was."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.memory = folder, dict[str, Any]()

    def recall(self, name: str) -> Any:
        """What was noted under this name; None if nothing was."""
        if self.folder is None:
            return self.memory.get(name)
        try:
            return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or cut short: it is worked out again
            return None

    def note(self, name: str, content: Any) -> None:
        if self.folder is None:
            self.memory[name] = content
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self.folder / f"{name}.json", json.dumps(content).encode(), durable=False)


@dataclass(frozen=True, eq=False)
class Seed:
    """What one seed's runs show, [clients] each. A score is the mean over rounds of share times clients: 1 is even."""

    seed: int
    same: bool  # whether the servers that were rebuilt are the run's own, bit by bit
    repeated: bool | None  # whether the run came out as its folder says; None where it has no folder
    accuracy: Numbers  # after training, on the client's own test samples
    broadcast: Numbers  # of the broadcast alone
    scores: dict[str, Numbers]  # by score, and by "algorithm score" of those run beside it
    values: dict[str, Numbers]  # by reference
    errors: dict[str, Numbers]  # standard errors of the values
    next_round: dict[str, float]  # by score: rank correlation from one round to the next
    halves: dict[str, float]  # and of the first half of the rounds with the second
    orders: int  # that Shapley values were sampled from, in all rounds; 0: every set was valued


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found."""

    title: str
    clients: int
    rounds: int
    names: list[str]  # of the clients
    sampling: Sampling
    seeds: list[Seed]

    @property
    def scores(self) -> list[str]:
        return list(self.seeds[0].scores)

    @property
    def references(self) -> list[str]:
        return [name for name in REFERENCES if name in self.seeds[0].values]

    def mean(self, kind: str, name: str) -> Numbers:
        """Over the seeds, [clients]; kind is "scores", "values" or "errors"."""
        found = np.stack([getattr(seed, kind)[name] for seed in self.seeds])
        return np.sqrt((found**2).sum(0)) / len(found) if kind == "errors" else _mean(found)

    def correlation(self, measure: stats.Measure, score: str, reference: str) -> Correlation:
        """Of the score with the reference, over the clients."""
        return stats.correlation(
            measure, [s.scores[score] for s in self.seeds], [s.values[reference] for s in self.seeds]
        )

    def over_seeds(self, kind: str, name: str) -> float:
        """How alike the seeds rank the clients; nan of one seed."""
        return stats.agreement(np.stack([getattr(seed, kind)[name] for seed in self.seeds]))

    def over_rounds(self, name: str) -> tuple[float, float]:
        """How alike a score ranks the clients from one round to the next, and in the two halves of the run."""
        return (
            float(_mean(np.array([s.next_round[name] for s in self.seeds]))),
            float(_mean(np.array([s.halves[name] for s in self.seeds]))),
        )


Tick = Callable[[int], None]  # so many more rounds are done


def run_audit(
    path: Path,
    *,
    seeds: Sequence[int] = (),
    beside: Sequence[str] | None = None,
    retrain: bool = True,
    sampling: Sampling = DEFAULT,
    notes: Path | None = None,
    start: Callable[[int], Tick] | None = None,
    **values: Any,
) -> Audit:
    """The audit of the run in this folder; with `seeds`, of the same clients under those seeds as well.

    `beside` names algorithms whose scores are tried on the same clients; FedCE's by default, or CO-PFL's. `start` is
    told how many rounds will be run and gives what to call as they are. What was passed to `run` as a value
    (`algorithm`, `data`, `model`) is passed again.
    """
    folder = RunFolder(path)
    tables, partition = folder.tables(), folder.partition()
    done, planned = len(records.read(path / "rounds.jsonl")), int(tables["run"]["rounds"])
    if done < planned:
        raise RunError(
            f"{path} has {done} of {planned} rounds; `copfl resume {path}` ends it, then it can be audited"
        )
    if (tried := tables["run"].get("eval_models", "all")) != "all":
        raise UsageError(
            f'{path} evaluated less than an audit needs (eval_models="{tried}"); run it again with '
            "--set run.eval_models=all"
        )
    own = str(tables["algorithm"].get("name", ""))
    if beside is None:
        beside = [] if not own else ["copfl"] if own == "fedce" else ["fedce"]
    if beside and not own:
        raise UsageError(
            "the run's algorithm is a Python value, so nothing can be run beside it; leave out --beside"
        )
    seed = int(tables["run"]["seed"])
    seeds = list(dict.fromkeys([seed, *seeds]))
    # One process, and states in memory: the result is the same, and the door stands open.
    here = {"workers": 1, "store": "memory"}

    def experiment(seed: int, algorithm: str | None = None) -> Experiment:
        layers = [tables, {"run": {**here, "seed": seed}}]
        if algorithm is not None and algorithm != own:  # with the run's optimizer: the score is what differs
            layers += [{"algorithm": {"name": algorithm}}, {"optimizer": tables["optimizer"]}]
        return prepare(layers, partition=partition, **values)

    first = experiment(seed)
    fingerprints = {**first.fingerprints(), "rounds": planned, "copfl": __version__, "format": FORMAT}
    mark = hashlib.sha256(json.dumps(fingerprints, sort_keys=True).encode()).hexdigest()[:12]
    book = Cache((notes or path / "audit") / mark)
    found = audit(
        experiment,
        seeds,
        beside={name: partial(experiment, algorithm=name) for name in beside},
        retrain=retrain,
        sampling=sampling,
        notebook=book,
        start=start,
    )
    wanted = records.table(records.read(path / "rounds.jsonl"), "weight", first.clients)
    weights = _numbers(book.recall(f"seed-{seed}-run-{planned}")["figures"]["weight"])
    known = bool(np.array_equal(wanted, weights, equal_nan=True))
    return dataclasses.replace(
        found, seeds=[dataclasses.replace(s, repeated=known) if s.seed == seed else s for s in found.seeds]
    )


def audit(
    make: Callable[[int], Experiment],
    seeds: Sequence[int],
    *,
    beside: Mapping[str, Callable[[int], Experiment]] | None = None,
    retrain: bool = True,
    sampling: Sampling = DEFAULT,
    notebook: Cache | None = None,
    start: Callable[[int], Tick] | None = None,
    names: Sequence[str] | None = None,
    title: str = "",
) -> Audit:
    """The audit of the runs that `make` gives for each seed."""
    book, others = notebook or Cache(None), beside or {}
    first = make(seeds[0])
    runs = 1 + (first.clients if retrain else 0) + len(others)
    tick = (lambda rounds: None) if start is None else start(len(seeds) * runs * first.loop.rounds)
    found = []
    for seed in seeds:
        e = first if seed == seeds[0] else make(seed)
        found.append(_one_seed(e, seed, others, retrain, sampling, book, tick))
    return Audit(
        title or first.title,
        first.clients,
        first.loop.rounds,
        list(names or [f"client {n}" for n in range(first.clients)]),
        sampling,
        found,
    )


def _one_seed(
    e: Experiment,
    seed: int,
    others: Mapping[str, Callable[[int], Experiment]],
    retrain: bool,
    sampling: Sampling,
    book: Cache,
    tick: Tick,
) -> Seed:
    def run(experiment: Experiment, gone: Sequence[int], name: str) -> Any:
        """The figures of a run that nothing from those who are gone reaches."""
        return noted(
            book,
            f"seed-{seed}-{name}",
            e.loop.rounds,
            tick,
            lambda on: figures_of(replay.without(experiment, gone, on)),
        )

    whole = _watched(e, seed, sampling, book, tick)
    figures = {name: _numbers(rows) for name, rows in whole["figures"].items()}
    for name, make in others.items():
        beside = run(make(seed), [], f"beside-{name}")
        figures |= {f"{name} {score}": _numbers(rows) for score, rows in beside["figures"].items()}
    accuracy, broadcast = _numbers(whole["accuracy"]), _numbers(whole["broadcast"])
    shapley = [np.array(part) for part in (whole["shapley"]["value"], whole["shapley"]["error"])]
    values = {f"shapley_{way}": shapley[0][:, place] for place, way in enumerate(("global", "personal"))}
    errors = {f"shapley_{way}": shapley[1][:, place] for place, way in enumerate(("global", "personal"))}
    if retrain:
        for name in ("leave_one_out_others", "leave_one_out_global"):
            values[name], errors[name] = np.zeros(e.clients), np.zeros(e.clients)
        for n in range(e.clients):
            left = run(e, [n], f"without-{n}")
            gain = np.delete(accuracy - _numbers(left["accuracy"]), n)
            values["leave_one_out_others"][n], errors["leave_one_out_others"][n] = _with_error(gain)
            gain = broadcast - _numbers(left["broadcast"])
            values["leave_one_out_global"][n], errors["leave_one_out_global"][n] = _with_error(gain)
    shares = {name: even_shares(rows) for name, rows in figures.items()}
    return Seed(
        seed,
        bool(whole["same"]),
        None,
        accuracy,
        broadcast,
        {name: _mean(rows) for name, rows in shares.items()},
        values,
        errors,
        {name: stats.successive_agreement(rows) for name, rows in shares.items()},
        {name: _halves(rows) for name, rows in shares.items()},
        int(whole["shapley"]["orders"]),
    )


def noted(book: Cache, name: str, rounds: int, tick: Tick, work: Callable[[OnRound], Any]) -> Any:
    """What the work of so many rounds gives, or gave when it was done before."""
    known = book.recall(f"{name}-{rounds}")
    if known is not None:
        tick(rounds)
        return known
    found = work(lambda round, seconds: tick(1))
    book.note(f"{name}-{rounds}", found)
    return found


def _watched(e: Experiment, seed: int, sampling: Sampling, book: Cache, tick: Tick) -> Any:
    """The run, and the Shapley values of its rounds; each round's are noted as they are found."""
    label = hashlib.sha256(repr(sampling).encode()).hexdigest()[:8]
    run, values = f"seed-{seed}-run-{e.loop.rounds}", f"seed-{seed}-shapley-{label}-{e.loop.rounds}"
    known, total = book.recall(run), book.recall(values)
    if known is not None and total is not None:
        tick(e.loop.rounds)
        return {**known, "shapley": total}
    value, square, orders = np.zeros((e.clients, 2)), np.zeros((e.clients, 2)), 0

    def see(number: int, moment: replay.RoundSnapshot) -> None:
        nonlocal orders
        name = f"seed-{seed}-shapley-{label}-round-{number}"
        found = book.recall(name)
        if found is None:
            how = sampling._replace(seed=sampling.seed + number)
            shares = games.shapley(moment.worth, moment.players, how)
            found = {"value": shares.value.tolist(), "error": shares.error.tolist(), "orders": shares.orders}
            book.note(name, found)
        players = moment.players
        value[players] += np.array(found["value"])
        square[players] += np.array(found["error"]) ** 2
        orders += int(found["orders"])
        tick(1)

    seen = replay.watched(e, see)
    known = {**figures_of(seen.result), "same": seen.same}
    total = {"value": value.tolist(), "error": np.sqrt(square).tolist(), "orders": orders}
    book.note(run, known)
    book.note(values, total)
    return {**known, "shapley": total}


def figures_of(result: Result) -> dict[str, Any]:
    """What an audit needs of a run: accuracies, the mean of the last looks, and the scores of every round."""
    names = [name for name in result.records[-1]["per_client"] if name == "weight" or name.endswith("_score")]
    return {
        "accuracy": _plain(_last(result.accuracy)),
        "broadcast": _plain(_last(result.accuracy_global)),
        "figures": {
            name: [_plain(row) for row in result.metric(name)] for name in sorted(names, reverse=True)
        },
    }


def _last(table: Numbers) -> Numbers:
    """Each client's mean over the last looks at it."""
    looks = table[~np.isnan(table).all(1)]
    return _mean(looks[-LAST:]) if len(looks) else np.full(table.shape[1], np.nan)


def _plain(row: Numbers) -> list[float | None]:
    return [None if math.isnan(v) else float(v) for v in row]


def _numbers(rows: Any) -> Numbers:
    return np.array(rows, np.float64)  # None becomes nan


def even_shares(rows: Numbers) -> Numbers:
    """Scores as shares of their round, times the clients in it: 1 where everybody counts the same."""
    known = ~np.isnan(rows)
    total = np.where(known, rows, 0).sum(1, keepdims=True)
    count = known.sum(1, keepdims=True)
    return np.where(known, np.divide(rows * count, total, out=np.ones_like(rows), where=total > 0), np.nan)


def _halves(rows: Numbers) -> float:
    half = len(rows) // 2
    return stats.agreement(np.stack([_mean(rows[:half]), _mean(rows[half:])])) if half else math.nan


def _mean(rows: Numbers) -> Numbers:
    """Over the first axis, of what is known; nan where nothing is."""
    known = ~np.isnan(rows)
    count = known.sum(0)
    total = np.where(known, rows, 0).sum(0)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def _with_error(gains: Numbers) -> tuple[float, float]:
    """The mean of the clients' gains and its standard error."""
    gains = gains[~np.isnan(gains)]
    if not len(gains):
        return math.nan, math.nan
    return float(gains.mean()), float(gains.std(ddof=1) / math.sqrt(len(gains))) if len(
        gains
    ) > 1 else math.nan
