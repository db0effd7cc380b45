"""CIFAR-10 as published tables divide it among clients, from the part of it that a data folder has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from copfl.data.clients.partition import Partition
from copfl.data.clients.schemes import SCHEMES
from copfl.data.samples import Dataset, Samples
from copfl.data.sets.datasets import load
from studies.published.table import Federation

TRAIN, TEST = 50_000, 10_000  # published images
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
Indices = NDArray[np.int64]


def cifar(data_dir: Path | None) -> tuple[Dataset, str]:
    """The images of the data folder, and what is missing of the published ones."""
    dataset = load("cifar10", data_dir)
    have = len(dataset.train)
    return dataset, "" if have == TRAIN else f"{have:,} of {TRAIN:,} training images are there"


def by_classes(data_dir: Path | None, clients: int, classes: int, train: int, test: int) -> Federation:
    """Clients with a few classes each, and as many images of each of them.

    Args:
        data_dir: The folder of the data.
        clients: How many there are.
        classes: Of a client.
        train: Training images of a client, where all published ones are there; else in proportion.
        test: Test images of a client.
    """
    dataset, missing = cifar(data_dir)
    count = train * len(dataset.train) // (TRAIN * classes)
    sizes = {"per_client": classes, "train_per_class": count, "test_per_class": test // classes}
    partition = SCHEMES["classes"](dataset, clients, 0, **sizes)
    what = f"so a client has about {count * classes} and not {train}: every number is lower, that of clients alone most"
    return Federation(dataset, partition, f"{missing}, {what}" if missing else "")


def by_labels(
    data_dir: Path | None, clients: int, alpha: float, seed: int, test_share: float = 0.0
) -> Federation:
    """All images, the official test images too, of each class divided by a symmetric Dirichlet distribution.

    Args:
        data_dir: The folder of the data.
        clients: How many there are; those without images on both sides are left out.
        alpha: Of the distribution.
        seed: Of the division.
        test_share: Of a client's images that are test; 0: its official test images are.
    """
    dataset, missing = cifar(data_dir)
    both = [
        np.concatenate(parts)
        for parts in zip(*[(part.x, part.y) for part in (dataset.train, dataset.test)], strict=True)
    ]
    samples = Samples(both[0], both[1])
    rng = np.random.default_rng(seed)
    parts = divided(samples.y, clients, alpha, rng)
    if test_share:
        shuffled = [rng.permutation(part) for part in parts]
        sides = [np.split(part, [round(len(part) * (1 - test_share))]) for part in shuffled]
    else:
        sides = [[part[part < len(dataset.train)], part[part >= len(dataset.train)]] for part in parts]
    kept = [side for side in sides if len(side[0]) and len(side[1])]
    train, test = (tuple(np.sort(side[n]) for side in kept) for n in (0, 1))
    partition = Partition(train, test, f"dirichlet {alpha:g}")
    whole = replace(dataset, train=samples, test=samples, mean=MEAN, std=STD, augment=False)
    have = f"{len(samples):,} of {TRAIN + TEST:,} images"
    what = f"so {have} are divided: every number is lower, that of clients alone most"
    return Federation(whole, partition, f"{missing}, {what}" if missing else "")


def divided(y: Indices, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Each client's samples: of each class, shares that a Dirichlet distribution gives.

    Args:
        y: The classes of the samples.
        clients: How many there are.
        alpha: Of the distribution.
        rng: Of the shares, and of the order.
    """
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for kind in np.unique(y):
        samples = rng.permutation(np.flatnonzero(y == kind))
        counts = rng.multinomial(len(samples), rng.dirichlet(np.full(clients, alpha)))
        for part, own in zip(parts, np.split(samples, np.cumsum(counts)[:-1]), strict=True):
            part.append(own)
    return [np.sort(np.concatenate(part)) for part in parts]
