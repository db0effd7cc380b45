"""The samples of a run as features of the model's frozen front, computed once and kept: core.front.

`prepare` asks for it where a part of the model is frozen.
"""

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.front import MEMORY, Front, bytes_of, cached_samples, front_of, tail_task
from copfl.core.task import Data, Task
from copfl.data.clients.federation import FederatedData, Split


class Cached(Split):
    """A split whose samples are features; they are computed when all are needed for the first time."""

    def __init__(self, split: Split, task: Task, front: Front) -> None:
        vars(self).update({name: value for name, value in vars(split).items() if name != "x"})
        self.split, self.task, self.front, self._last = split, task, front, None

    @cached_property
    def x(self) -> Tensor:
        return cached_samples(self.task, self.front, self.split.x)

    def rows(self, ids: Sequence[int] | NDArray[np.int64], width: int = 1) -> Data:
        """As of any split. One client's, as in the trial of an engine, do not need all others'."""
        if "x" in self.__dict__ or len(ids) > 1 or len(self.sizes) == 1:
            return super().rows(ids, width)
        data = self.split.rows(ids, width)
        x = cached_samples(self.task, self.front, tree.row(data.x, 0))
        return data._replace(x=x[None])

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which then needs neither the front nor the samples."""
        return {"x": self.x} | {k: v for k, v in vars(self).items() if k not in ("split", "task", "front")}


class TrainedPart(NamedTuple):
    """What the rounds train: the task and its samples, or its tail and their features."""

    task: Task
    federation: FederatedData
    front: Front | None = None
    bytes: int = 0  # of the features

    def compute(self) -> None:
        """Computes the features now, before the rounds."""
        for split in self.federation.splits:
            assert split.x is not None

    def about(self) -> dict[str, Any]:
        """For environment.json: the module whose input is kept, and the bytes."""
        return {} if self.front is None else {"cached_features": {"of": self.front.cut, "bytes": self.bytes}}


def training_of(task: Task, federation: FederatedData, cache: str) -> TrainedPart:
    """The tail and the features, where the model has a front that can be cached within the memory limit.

    Args:
        task: With the whole model.
        federation: The samples.
        cache: "on", "off", or "auto" for what fits into memory.
    """
    first = federation.train.rows([0])
    plain = TrainedPart(task, federation)
    if cache == "off" or federation.dataset.augment or not int(first.size):
        return plain
    data = tree.row(first, 0)
    front = front_of(task, data)
    if front is None:
        return plain
    size = bytes_of(task, front, data.x) * sum(len(s.y) for s in federation.splits)
    if size > MEMORY[task.device.type] and cache != "on":
        return plain
    with_features = copy.copy(federation)
    with_features.train, with_features.test, *validation = (
        Cached(split, task, front) for split in federation.splits
    )
    with_features.validation = validation[0] if validation else None
    return TrainedPart(tail_task(task, front), with_features, front, size)
