"""A federation of digits with four anomalous clients: the weight that each gets, and the cost for the others.

wrong labels   40 % of its training labels are wrong
free rider     sends noise with the norm of an honest update
duplicate      has the samples of another client, the duplicated one
rare classes   alone has two of the ten classes

All clients are tested on correct labels. The free rider computes its score like the others, from what it
sends. With a false score, it sends the same kind of noise with the score of honest training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl import stats
from copfl.audit import audit as auditing
from copfl.audit import replay
from copfl.audit.audit import LAST, SCORES, Audit, Cache, Metrics, Tick, relative_weights
from copfl.audit.shapley import DEFAULT, Sampling
from copfl.core.algorithm import AnyAlgorithm, ClientOutput
from copfl.core.task import Data, Plan, Task
from copfl.data import datasets
from copfl.data.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.experiment.run import Experiment, OnRound, Result, execute, prepare
from copfl.stats import Numbers
from copfl.tables import Table, percent_with_spread, plain, with_spread
from copfl.wrappers.attacks import Attacked
from copfl.wrappers.base import Wrapper

TITLE = "Digits with four anomalous clients"
WRONG, RIDER, DUPLICATE, RARE, DUPLICATED = range(5)
ANOMALIES = {"wrong labels": WRONG, "free rider": RIDER, "duplicate": DUPLICATE, "rare classes": RARE}
NAMES = [*ANOMALIES, "duplicated", "regular 5", "regular 6", "regular 7"]
REGULAR = [DUPLICATED, 5, 6, 7]  # the clients whose accuracy measures the cost
CLASSES, SAMPLES = 4, 8  # of a client, and of each class to train on
NOISE = 0.4  # fraction of wrong labels
ROUNDS, LONG = 15, 60  # LONG: until wrong labels are memorised
BATCH, LR, WIDTH = 8, 5e-3, 32

PUBLISHED, HELD_OUT, FEDCE = "COWA as published", "trust=held_out", "FedCE"
VARIANTS: dict[str, dict[str, Any]] = {
    PUBLISHED: {"name": "copfl"},
    "prefer=agreement": {"name": "copfl", "prefer": "agreement"},
    HELD_OUT: {"name": "copfl", "trust": "held_out"},
    "equal weights": {"name": "copfl", "score": "none"},
    FEDCE: {"name": "fedce"},
}
TRUST = (PUBLISHED, HELD_OUT)  # variants that also run with a false score, and until labels are memorised
BASELINES = {
    HELD_OUT: HELD_OUT,
    FEDCE: "fedce",
}  # variants whose weights the audit includes, with their names there


def federation(digits: Dataset, seed: int, anomalous: bool = True) -> tuple[Dataset, Partition]:
    """The data and the partition; with `anomalous` False the same clients without anomalies."""
    rng, count = np.random.default_rng(seed), len(digits.classes)
    y, common, rare = digits.train.y.copy(), list(range(count - 2)), [count - 2, count - 1]
    pools = [list(rng.permutation(np.flatnonzero(y == label))) for label in range(count)]
    train, test, labels = [], [], list[int]()
    for client in range(len(NAMES)):
        labels = labels if len(labels) >= CLASSES else rng.permutation(common).tolist()
        own, labels = labels[:CLASSES], labels[CLASSES:]
        own = own[: CLASSES - len(rare)] + rare if client == RARE else own
        train.append(np.array([pools[label].pop() for label in own for _ in range(SAMPLES)], np.int64))
        test.append(np.flatnonzero(np.isin(digits.test.y, own)))
    if anomalous:
        wrong = rng.permutation(train[WRONG])[: round(NOISE * len(train[WRONG]))]
        y[wrong] = (y[wrong] + rng.integers(1, count, len(wrong))) % count
        train[DUPLICATE], test[DUPLICATE] = train[DUPLICATED], test[DUPLICATED]
    name = "digits with anomalies" if anomalous else "digits without anomalies"
    changed = dataclasses.replace(digits, train=Samples(digits.train.x, y), name=name)
    return changed, Partition(tuple(train), tuple(test), "synthetic", {"seed": seed})


@dataclass(frozen=True, eq=False)
class NoisyTask(Task):
    """The task in which every gradient of a free rider is noise of the same norm."""

    rides: Tensor | None = None  # [] bool

    def gradient(self, *given: Any, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad, value, buffers = super().gradient(*given, **more)
        if self.rides is None:
            return grad, value, buffers
        noise = torch.randn_like(grad) * grad.norm() / len(grad) ** 0.5
        return torch.where(self.rides, noise, grad), value, buffers


class Down(NamedTuple):
    down: Any
    rides: Tensor  # [] bool


@dataclass(frozen=True)
class FreeRider(Wrapper):
    """The algorithm with some clients that take random steps of the length of honest ones.

    Their uploads are noise, and their software scores them like honest uploads.
    """

    riders: tuple[int, ...] = (RIDER,)

    wraps: ClassVar[tuple[str, ...]] = ("down",)

    def downlink(self, server: Any, ids: Tensor) -> Down:
        riders = torch.tensor(self.riders, dtype=ids.dtype, device=ids.device)
        return Down(super().downlink(server, ids), torch.isin(ids, riders))

    def client_update(
        self, task: Task, client: Any, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Any, Any]:
        fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
        return super().client_update(NoisyTask(**fields, rides=down.rides), client, down, data, plan)


@cache
def _digits() -> Dataset:
    return datasets.load("digits")


def experiment(variant: str, seed: int, kind: str = "anomalous", rounds: int = ROUNDS) -> Experiment:
    """A variant on the federation; kind is "anomalous", "clean" or "false_score"."""
    dataset, partition = federation(_digits(), seed, anomalous=kind != "clean")
    tables = {
        "algorithm": VARIANTS[variant],
        "optimizer": {"name": "mamo", "lr": LR},
        "run": {"rounds": rounds, "batch": BATCH, "seed": seed, "engine": "vmap", "mkldnn": "on"},
        "model": {"name": "mlp", "width": WIDTH},
    }
    found = prepare([tables], data=dataset, partition=partition)
    if kind == "clean":
        return found
    algorithm: AnyAlgorithm = FreeRider(found.algorithm)
    if kind == "false_score":
        algorithm = Attacked(found.algorithm, "noise", (RIDER,), 1.0, seed)
    return dataclasses.replace(found, algorithm=algorithm)


class Variant(NamedTuple):
    """The results of one variant. Accuracies are means over the regular clients, [seeds]."""

    name: str
    weights: dict[str, Numbers]  # by score, [seeds, clients]: 1 is an equal weight
    accuracy: dict[str, Numbers]  # "anomalous" and "clean": personal, after training
    accuracy_global: dict[str, Numbers]
    gains: dict[
        str, Numbers
    ]  # by anomaly: personal accuracy minus that of training without the anomalous client
    gains_global: dict[str, Numbers]
    false_score: Numbers | None  # [seeds], the weight of a free rider that sends the score of honest training
    memorised: Numbers | None  # [seeds], the weight of wrong labels that the client's model has memorised


class Study(NamedTuple):
    """All variants, and the audit of the first."""

    seeds: list[int]
    variants: list[Variant]
    audit: Audit


def study(
    seeds: Sequence[int] = (0, 1, 2),
    *,
    variants: Sequence[str] = tuple(VARIANTS),
    rounds: int = ROUNDS,
    long: int = LONG,
    sampling: Sampling = DEFAULT,
    cache: Path | None = None,
    start: Callable[[int], Tick] | None = None,
) -> Study:
    """The study; the first variant is audited, with the weights of the others in BASELINES on its clients."""
    first, *others = variants
    baselines = [name for name in others if name in BASELINES]
    trust = sum(name in TRUST for name in variants)
    runs = 2 * len(baselines) + 1 + len(NAMES) + len(variants) * (2 + len(ANOMALIES)) + trust
    tick = (lambda done: None) if start is None else start(len(seeds) * (runs * rounds + trust * long))
    caches = {
        name: Cache(None if cache is None else cache / "-".join(name.lower().replace("=", " ").split()), tick)
        for name in variants
    }
    found = auditing.audit(
        lambda seed: experiment(first, seed, rounds=rounds),
        seeds,
        baselines={BASELINES[name]: partial(_weights, name, caches[name], rounds) for name in baselines},
        sampling=sampling,
        cache=caches[first],
        names=NAMES,
        title=first,
    )
    return Study(list(seeds), [_variant(name, caches[name], seeds, rounds, long) for name in variants], found)


def _run(
    variant: str, cache: Cache, seed: int, rounds: int, kind: str = "anomalous", gone: int | None = None
) -> Metrics:
    """The metrics of a run, see `experiment`; with `gone`, without the uploads of this client."""

    def work(on_round: OnRound) -> Result:
        e = experiment(variant, seed, kind, rounds)
        return execute(e, None, on_round) if gone is None else replay.without(e, [gone], on_round)

    name = {"anomalous": "run"}.get(kind, kind) if gone is None else f"without-{gone}"
    return cache.run(f"seed-{seed}-{name}", rounds, work)


def _weights(variant: str, cache: Cache, rounds: int, seed: int) -> Metrics:
    return {"scores": {"weight": _run(variant, cache, seed, rounds)["scores"]["weight"]}}


def _variant(name: str, cache: Cache, seeds: Sequence[int], rounds: int, long: int) -> Variant:
    def regular(runs: Sequence[Metrics], what: str) -> Numbers:
        return np.array([np.nanmean(np.array(run[what], np.float64)[REGULAR]) for run in runs])

    def weight(run: Metrics, score: str, last: int = 0) -> Numbers:
        return np.asarray(relative_weights(np.array(run["scores"][score], np.float64))[-last:].mean(0))

    run = partial(_run, name, cache)
    kinds = {kind: [run(seed, rounds, kind) for seed in seeds] for kind in ("anomalous", "clean")}
    without = {
        label: [run(seed, rounds, gone=client) for seed in seeds] for label, client in ANOMALIES.items()
    }
    anomalous = kinds["anomalous"]
    accuracy, accuracy_global = (
        {kind: regular(runs, what) for kind, runs in kinds.items()}
        for what in ("accuracy", "accuracy_global")
    )
    gains, gains_global = (
        {label: regular(anomalous, what) - regular(runs, what) for label, runs in without.items()}
        for what in ("accuracy", "accuracy_global")
    )
    false_score = memorised = None
    if name in TRUST:
        false_score = np.array([weight(run(seed, rounds, "false_score"), "weight")[RIDER] for seed in seeds])
        memorised = np.array([weight(run(seed, long), "weight", LAST)[WRONG] for seed in seeds])
    scores = {score: np.stack([weight(one, score) for one in anomalous]) for score in anomalous[0]["scores"]}
    return Variant(name, scores, accuracy, accuracy_global, gains, gains_global, false_score, memorised)


NOTES = {
    "weights": "Mean ± standard deviation over seeds; in brackets the mean rank, 1 is the largest weight.",
    "trust": "False score: the free rider sends the score of honest training with its noise. Memorised: the "
    f"last {LAST} rounds of a longer run, when the client's model has memorised its wrong labels.",
    "accuracy": "Mean ± standard deviation over seeds. Clean: the same clients with correct labels, honest "
    "updates and their own samples. The global model is evaluated on the regular clients' test samples.",
    "gains": "Their accuracy with the anomalous client minus that of training without it, mean ± standard "
    "deviation over seeds. Negative: they are better without it.",
}


def tables_of(found: Study, details: bool = True) -> list[Table]:
    """The tables of the study and of its audit."""
    limits, accuracies = [], []
    for v in found.variants:
        weight = v.weights["weight"]
        if v.false_score is not None:
            numbers = (weight[:, RIDER], v.false_score, weight[:, WRONG], v.memorised)
            limits.append([v.name, *map(_number, numbers)])
        kinds = [part[kind] for part in (v.accuracy, v.accuracy_global) for kind in ("clean", "anomalous")]
        accuracies.append([v.name, *map(_percent, kinds)])
    head = [
        f"{what}, {kind}" for what in ("personal", "global model") for kind in ("clean", "with anomalies")
    ]
    gains = "Gain of the regular clients from each anomalous client, in points of"
    rows, rows_global = (
        [[v.name, *(_percent(getattr(v, kind)[name], "+.1f") for name in ANOMALIES)] for v in found.variants]
        for kind in ("gains", "gains_global")
    )
    trust = ["", "free rider", "false score", "wrong labels", "memorised"]
    return [
        _weight_table(found),
        Table("Limits of trust: weights", trust, limits, [NOTES["trust"]]),
        Table("Accuracy of the regular clients in %", ["", *head], accuracies, [NOTES["accuracy"]]),
        Table(f"{gains} personal accuracy", ["", *ANOMALIES], rows),
        Table(f"{gains} the global model's accuracy", ["", *ANOMALIES], rows_global, [NOTES["gains"]]),
        *auditing.tables_of(found.audit, details),
    ]


def _weight_table(found: Study) -> Table:
    rows = []
    for variant in found.variants:
        for score, weights in variant.weights.items():
            if score == "weight" or variant.name == PUBLISHED:
                title = variant.name if score == "weight" else f"- its {SCORES[score]}"
                ranks = stats.ranked(-weights).mean(0)
                varied = bool(np.ptp(weights) >= 1e-9)
                shown = (*ANOMALIES.values(), DUPLICATED)
                cells = [_number(weights[:, n]) + f" ({ranks[n]:.1f})" * varied for n in shown]
                rows.append([title, *cells, _number(weights[:, REGULAR[1:]].mean(1))])
    head = ["", *ANOMALIES, "duplicated", "regular"]
    return Table("Weight of each client; 1 is an equal weight", head, rows, [NOTES["weights"]])


def _number(values: Numbers | None) -> str:
    return "-" if values is None else with_spread(*stats.spread_of(values), ".2f")


def _percent(values: Numbers, digits: str = ".1f") -> str:
    return percent_with_spread(*stats.spread_of(values), digits)


def as_json(found: Study) -> dict[str, Any]:
    """All results."""
    return {
        "title": TITLE,
        "seeds": found.seeds,
        "clients": NAMES,
        "variants": [plain(variant._asdict()) for variant in found.variants],
        "audit": auditing.as_json(found.audit),
    }
