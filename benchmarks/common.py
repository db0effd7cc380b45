"""The federation of the benchmarks. Needs torch, numpy and copfl only."""

from __future__ import annotations

from typing import Any

import numpy as np

from copfl import models
from copfl.core.task import Task, task_of
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.parts.phases import Phases
from copfl.parts.pwpm import Pwpm

MEAN, STD, CLASSES = 0.5, 0.25, 10  # per channel, of pixels in 0..1
# The form of CO-PFL that is measured, whatever its defaults are: personal and shared entries train in turn, and masks
# grow. The plain loop of plain.py does the same; a round of one phase would be compared with a round of two.
TWO_PHASES: dict[str, Any] = {
    "growth": Pwpm(budget=0.5, head="shared"),
    "phases": Phases(training="in_turn"),
}


def federation(x: Any, y: Any, size: int, device: str = "cpu", augment: bool = False) -> FederatedData:
    """Consecutive samples assigned to clients, `size` to each; a client's first sample is its test sample."""
    samples, channels = Samples(x, y), x.shape[1]
    train = tuple(np.arange(len(y), dtype=np.int64).reshape(-1, size))
    dataset = Dataset(
        "benchmark",
        samples,
        samples,
        tuple(map(str, range(CLASSES))),
        mean=(MEAN,) * channels,
        std=(STD,) * channels,
        augment=augment,
    )
    return FederatedData(dataset, Partition(train, tuple(part[:1] for part in train), "by hand", {}), device)


def random_images(clients: int, size: int) -> tuple[Any, Any]:
    """Images uint8 [clients * size, 3, 32, 32] of noise, and labels: the pixels do not affect the time."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * size, 3, 32, 32), dtype=np.uint8)
    return x, rng.integers(0, CLASSES, len(x))


def task(model: str, shape: tuple[int, ...], device: str = "cpu", public: Any = None, **options: Any) -> Task:
    """The task of a model for normalised samples of this shape."""
    return task_of(
        models.build(model, shape, CLASSES, 0, **options),
        CLASSES,
        mean=(MEAN,) * shape[0],
        std=(STD,) * shape[0],
        device=device,
        public=public,
    )
