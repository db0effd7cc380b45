"""Runs that take a moment, to be audited: two overlapping clouds, a few clients, a few rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from copfl.core.algorithm import AnyAlgorithm
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.experiment.experiment import Experiment
from copfl.experiment.folder import claimed
from copfl.experiment.preparation import prepare
from copfl.experiment.training import execute
from copfl.settings.complete import complete
from tests.comparison.small import base, clouds

SIZES = (8, 6, 10, 7)


def experiment(algorithm: AnyAlgorithm, sizes: tuple[int, ...] = SIZES, **run: Any) -> Experiment:
    """The algorithm on clients of these sizes; of fewer sizes, the first of the same clients."""
    rng = np.random.default_rng(0)
    y = np.arange(sum(SIZES)) % 2
    samples = Samples((rng.normal(size=(len(y), 4)) + y[:, None]).astype(np.float32), y)
    parts = tuple(np.split(np.arange(len(y), dtype=np.int64), np.cumsum(SIZES)[:-1]))[: len(sizes)]
    loop = {"rounds": 3, "batch": 4, "engine": "sequential", "precision": "fp64", **run}
    return prepare(
        complete(
            {"run": loop, "model": {"name": "mlp", "width": 4}},
            values={
                "algorithm": algorithm,
                "data": Dataset("clouds", samples, samples, ("a", "b")),
                "partition": Partition(parts, parts, "by hand"),
            },
        )
    )


def run_folder(path: Path, **run: Any) -> Path:
    """The folder of a run of CO-PFL that has ended."""
    tables = base(clouds(path.parent / f"{path.name}.npz"), **{"clients": 3, "engine": "vmap", **run})
    with claimed(path, new=True) as folder:
        execute(
            prepare(
                complete(
                    {**tables, "algorithm": {"name": "copfl"}, "optimizer": {"name": "mamo", "lr": 0.05}}
                )
            ),
            folder,
        )
    return path
