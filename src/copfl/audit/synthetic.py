"""A federation of digits with four clients that are known to be odd: what do the scores say, and who pays for it?

wrong labels   40 % of its training labels are wrong
free rider     sends noise as long as an honest update
duplicate      holds the very samples of another client
rare classes   alone holds two of the ten classes

Everybody is tested on right labels. The free rider works out its score like everybody, from what it sends; there is one
more that lies: it sends the same kind of noise, and the score that honest training would have had.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.algorithms.copfl import COPFL
from copfl.algorithms.fedce import FedCE
from copfl.core.algorithm import AnyAlgorithm, ClientOutput
from copfl.core.task import Data, Plan, Task
from copfl.data import datasets
from copfl.data.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.experiment.run import Experiment, prepare
from copfl.parts import Cowa, Mamo
from copfl.wrappers.attacks import Attacked
from copfl.wrappers.base import Wrapper

WRONG, RIDER, DOUBLE, RARE, TWIN = range(5)
ODD = {"wrong labels": WRONG, "free rider": RIDER, "duplicate": DOUBLE, "rare classes": RARE}
NAMES = [*ODD, "its twin", "plain 5", "plain 6", "plain 7"]
PLAIN = [TWIN, 5, 6, 7]  # those whose accuracy says who pays
CLASSES, SAMPLES = 4, 8  # of a client, and of each class to train on; tested on all there are
NOISE = 0.4  # of the labels are wrong
ROUNDS, LONG = 15, 60  # LONG: until wrong labels are known by heart
BATCH, LR, WIDTH = 8, 5e-3, 32

PUBLISHED, HELD_OUT, FEDCE = "COWA as published", "trust=held_out", "FedCE"
VARIANTS: dict[str, AnyAlgorithm] = {
    PUBLISHED: COPFL(Mamo(lr=LR)),
    "prefer=agreement": COPFL(Mamo(lr=LR), contribution=Cowa(prefer="agreement")),
    HELD_OUT: COPFL(Mamo(lr=LR), contribution=Cowa(trust="held_out")),
    "equal weights": COPFL(Mamo(lr=LR), contribution=Cowa(score="none")),
    FEDCE: FedCE(Mamo(lr=LR)),
}


def federation(digits: Dataset, seed: int, odd: bool = True) -> tuple[Dataset, Partition]:
    """The data and who holds them; with `odd` False the same clients, all of them in order."""
    rng, count = np.random.default_rng(seed), len(digits.classes)
    y, common, rare = digits.train.y.copy(), list(range(count - 2)), [count - 2, count - 1]
    pools = [list(rng.permutation(np.flatnonzero(y == label))) for label in range(count)]
    train, test, deck = [], [], list[int]()
    for client in range(len(NAMES)):
        deck = deck if len(deck) >= CLASSES else rng.permutation(common).tolist()
        hand, deck = deck[:CLASSES], deck[CLASSES:]
        hand = hand[: CLASSES - len(rare)] + rare if client == RARE else hand
        train.append(np.array([pools[label].pop() for label in hand for _ in range(SAMPLES)], np.int64))
        test.append(np.flatnonzero(np.isin(digits.test.y, hand)))
    if odd:
        wrong = rng.permutation(train[WRONG])[: round(NOISE * len(train[WRONG]))]
        y[wrong] = (y[wrong] + rng.integers(1, count, len(wrong))) % count
        train[DOUBLE], test[DOUBLE] = train[TWIN], test[TWIN]
    name = "planted digits" if odd else "the same digits, nothing planted"
    changed = dataclasses.replace(digits, train=Samples(digits.train.x, y), name=name)
    return changed, Partition(tuple(train), tuple(test), "planted", {"seed": seed})


@dataclass(frozen=True, eq=False)
class Aimless(Task):
    """The task with every gradient of a rider turned into noise of the same length."""

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
        return super().client_update(Aimless(**fields, rides=down.rides), client, down, data, plan)


@cache
def _digits() -> Dataset:
    return datasets.load("digits")


def experiment(variant: str, seed: int, kind: str = "odd", rounds: int = ROUNDS) -> Experiment:
    """A variant on the federation; kind is "odd", "clean", or "lied": the free rider sends another's score as well."""
    dataset, partition = federation(_digits(), seed, odd=kind != "clean")
    algorithm = VARIANTS[variant]
    if kind != "clean":
        algorithm = (
            Attacked(algorithm, "noise", (RIDER,), 1.0, seed) if kind == "lied" else FreeRider(algorithm)
        )
    tables = {
        "run": {"rounds": rounds, "batch": BATCH, "seed": seed, "engine": "vmap", "mkldnn": "on"},
        "model": {"name": "mlp", "width": WIDTH},
    }
    return prepare([tables], algorithm=algorithm, data=dataset, partition=partition)
