"""A federation of digits with four anomalous clients: the weight that each gets, and the cost for the others.

wrong labels   40 % of its training labels are wrong
free rider     sends noise with the norm of an honest update
duplicate      has the samples of another client, the duplicated one
rare classes   alone has two of the ten classes

All clients are tested on correct labels. The free rider computes its score like the others, from what it
sends. With a false score, it sends the same kind of noise with the score of honest training.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.audit.audit import Audit, audit
from copfl.core.algorithm import AnyAlgorithm, ClientOutput
from copfl.core.random import MALICIOUS, normal
from copfl.core.task import Data, Plan, Task
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.data.sets.datasets import load
from copfl.experiment.experiment import Experiment
from copfl.experiment.preparation import prepare
from copfl.kernels.draws import mixed
from copfl.settings.complete import complete
from copfl.wrappers.attacks import Attacked
from copfl.wrappers.base import RoundWrapper

TITLE = "Digits with four anomalous clients"
WRONG, RIDER, DUPLICATE, RARE, DUPLICATED = 0, 1, 2, 3, 4
ANOMALIES = {"wrong labels": WRONG, "free rider": RIDER, "duplicate": DUPLICATE, "rare classes": RARE}
NAMES = [*ANOMALIES, "duplicated", "regular 5", "regular 6", "regular 7"]
CLASSES, SAMPLES = 4, 8  # of a client, and of each class to train on
NOISE = 0.4  # fraction of wrong labels
ROUNDS, BATCH, LR, WIDTH = 15, 8, 5e-3, 32
GROWING = {
    "head": "shared",
    "budget": 0.5,
    "training": "in_turn",
}  # CO-PFL with masks, as docs/audit.md has it


def federation(digits: Dataset, seed: int, anomalous: bool = True) -> tuple[Dataset, Partition]:
    """The data and the partition; with `anomalous` False the same clients without anomalies.

    Args:
        digits: The data set.
        seed: Of the draws.
        anomalous: Whether some clients have wrong labels, or others' samples.
    """
    rng, count = np.random.default_rng(seed), len(digits.classes)
    y, common, rare = digits.train.y.copy(), list(range(count - 2)), [count - 2, count - 1]
    pools = [list(rng.permutation(np.flatnonzero(y == label))) for label in range(count)]
    train, test, labels = [], [], list[int]()
    for client in range(len(NAMES)):
        labels = labels if len(labels) >= CLASSES else rng.permutation(common).tolist()
        classes, labels = labels[:CLASSES], labels[CLASSES:]
        classes = classes[: CLASSES - len(rare)] + rare if client == RARE else classes
        train.append(np.array([pools[label].pop() for label in classes for _ in range(SAMPLES)], np.int64))
        test.append(np.flatnonzero(np.isin(digits.test.y, classes)))
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

    rides: Tensor = field(kw_only=True)  # [] bool
    key: Tensor = field(kw_only=True)  # [] int64, of the noise of this client in this round
    gradients: Iterator[int] = field(default_factory=itertools.count)  # their numbers, as they are computed

    def gradient(self, *given: Any, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad, value, buffers = super().gradient(*given, **more)
        noise = normal(mixed(self.key, next(self.gradients)), grad) * grad.norm() / len(grad) ** 0.5
        return torch.where(self.rides, noise, grad), value, buffers


class FreeRiderDown(NamedTuple):
    down: Any
    rides: Tensor  # [] bool
    key: Tensor  # [] int64


@dataclass(frozen=True)
class FreeRider(RoundWrapper):
    """The algorithm with some clients that take random steps of the length of honest ones.

    Their uploads are noise, and their software scores them like honest uploads.
    """

    riders: tuple[int, ...] = (RIDER,)
    seed: int = 0

    def downlink(self, server: Any, ids: Tensor) -> FreeRiderDown:
        riders = torch.tensor(self.riders, dtype=ids.dtype, device=ids.device)
        keys = mixed(self.seed, MALICIOUS, server.round, ids)
        return FreeRiderDown(super().downlink(server, ids), torch.isin(ids, riders), keys)

    def client_update(
        self, task: Task, client: Any, down: FreeRiderDown, data: Data, plan: Plan
    ) -> ClientOutput:
        fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
        noisy = NoisyTask(**fields, rides=down.rides, key=down.key)
        return super().client_update(noisy, client, down, data, plan)


def experiment(
    algorithm: Mapping[str, Any], seed: int, kind: str = "anomalous", rounds: int = ROUNDS
) -> Experiment:
    """An algorithm, given as its table, on the federation; kind is "anomalous", "clean" or "false_score".

    Args:
        algorithm: Its table.
        seed: Of the run.
        kind: "anomalous", "clean" or "false_score".
        rounds: Of the run.
    """
    dataset, partition = federation(load("digits"), seed, anomalous=kind != "clean")
    tables = {
        "algorithm": {**(GROWING if algorithm["name"] == "copfl" else {}), **algorithm},
        "optimizer": {"name": "mamo", "lr": LR},
        "run": {"rounds": rounds, "batch": BATCH, "seed": seed, "engine": "vmap"},
        "model": {"name": "mlp", "width": WIDTH},
    }
    prepared = prepare(complete(tables, values={"data": dataset, "partition": partition}))
    if kind == "clean":
        return prepared
    wrapped: AnyAlgorithm = FreeRider(prepared.algorithm, seed=seed)
    if kind == "false_score":
        wrapped = Attacked(prepared.algorithm, "noise", (RIDER,), 1.0, seed)
    return dataclasses.replace(prepared, algorithm=wrapped)


def synthetic_audit(
    seeds: Sequence[int] = (0, 1, 2), baselines: Sequence[str] = ("fedce",), rounds: int = ROUNDS, **how: Any
) -> Audit:
    """The audit of CO-PFL on the federation; `how` as for `audit`.

    Args:
        seeds: A run each.
        baselines: Other algorithms that run, too.
        rounds: Of a run.
        how: As of `audit`.
    """

    def make(seed: int, algorithm: str | None) -> Experiment:
        return experiment({"name": algorithm or "copfl"}, seed, rounds=rounds)

    return audit(make, seeds, baselines=baselines, names=NAMES, title=TITLE, **how)
