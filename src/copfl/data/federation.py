"""The clients' data on a device: one pool per split, and the rows of the pool that each client has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core.task import Data
from copfl.data.partition import Partition
from copfl.data.samples import Dataset, Samples


class Split:
    """One split: the assigned samples in one pool on the device; `rows` gives padded rows of some clients."""

    def __init__(
        self, samples: Samples, indices: Sequence[NDArray[np.int64]], device: torch.device | str
    ) -> None:
        used, positions = np.unique(np.concatenate(indices), return_inverse=True)
        self.sizes = np.array([len(index) for index in indices], np.int64)
        self.indices = np.split(positions.astype(np.int64), np.cumsum(self.sizes)[:-1])
        pool = samples.x[used], samples.y[used]
        if not len(used):  # padding needs a sample even where no client has one
            pool = np.zeros((1, *samples.x.shape[1:]), samples.x.dtype), np.zeros(1, np.int64)
        self.x, self.y = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in pool)
        self._last: tuple[tuple[int, ...], Data] | None = None

    def rows(self, ids: Sequence[int] | NDArray[np.int64]) -> Data:
        """These clients' samples, a row per client, padded to the largest of them."""
        key = tuple(int(n) for n in ids)
        if self._last is None or self._last[0] != key:  # all rounds of full participation have the same key
            sizes = self.sizes[list(key)]
            index = np.zeros((len(key), int(sizes.max(initial=1))), np.int64)
            for position, client in enumerate(key):
                index[position, : sizes[position]] = self.indices[client]
            chosen = torch.from_numpy(index).to(self.x.device)
            self._last = key, Data(self.x[chosen], self.y[chosen], torch.from_numpy(sizes).to(self.x.device))
        return self._last[1]


class Federation:
    """The train and test samples of every client."""

    def __init__(self, dataset: Dataset, partition: Partition, device: torch.device | str = "cpu") -> None:
        partition.check(dataset)
        self.dataset, self.partition = dataset, partition
        self.train = Split(dataset.train, partition.train, device)
        self.test = Split(partition.tested(dataset), partition.test, device)

    @property
    def clients(self) -> int:
        return len(self.train.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.dataset.train.x.shape[1:])

    def unassigned(self, count: int) -> Tensor:
        """Up to `count` train samples that no client has, evenly spaced in the data set, without labels."""
        validation = self.partition.test if self.partition.test_from == "train" else ()
        assigned = np.concatenate([*self.partition.train, *validation])
        free = np.setdiff1d(np.arange(len(self.dataset.train)), assigned)
        chosen = free[np.linspace(0, max(len(free) - 1, 0), min(count, len(free))).astype(np.int64)]
        return torch.from_numpy(np.ascontiguousarray(self.dataset.train.x[chosen])).to(self.train.x.device)
