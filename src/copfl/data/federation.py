"""The clients' data on a device: one pool per split, and the rows of it that each client holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core.task import Data
from copfl.data.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError


class Split:
    """One split: samples in one pool on the device, handed out as the padded rows of the clients that are asked for."""

    def __init__(
        self, samples: Samples, indices: Sequence[NDArray[np.int64]], device: torch.device | str
    ) -> None:
        used, place = np.unique(
            np.concatenate(indices), return_inverse=True
        )  # only what somebody holds travels
        cuts = np.cumsum([len(index) for index in indices])[:-1]
        self.indices = np.split(place.astype(np.int64), cuts)
        self.sizes = np.array([len(index) for index in indices], np.int64)
        pool = samples.x[used], samples.y[used]
        if not len(used):  # rows of nobody still need a sample to be filled up with
            pool = np.zeros((1, *samples.x.shape[1:]), samples.x.dtype), np.zeros(1, np.int64)
        self.x, self.y = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in pool)
        self._last: tuple[tuple[int, ...], Data] | None = None

    def rows(self, ids: Sequence[int] | NDArray[np.int64]) -> Data:
        """These clients' samples, a row per client, filled up to the largest of them."""
        key = tuple(int(n) for n in ids)
        if (
            self._last is None or self._last[0] != key
        ):  # with full participation the rows are the same every round
            sizes = self.sizes[list(key)]
            index = np.zeros((len(key), int(sizes.max(initial=1))), np.int64)
            for place, client in enumerate(key):
                index[place, : sizes[place]] = self.indices[client]
            chosen = torch.from_numpy(index).to(self.x.device)
            self._last = key, Data(self.x[chosen], self.y[chosen], torch.from_numpy(sizes).to(self.x.device))
        return self._last[1]


class Federation:
    """Who holds what: the train and test samples of every client."""

    def __init__(self, dataset: Dataset, partition: Partition, device: torch.device | str = "cpu") -> None:
        partition.check(dataset)
        for client, index in enumerate(partition.train):
            if len(index) == 0:
                raise DataError(f"client {client} holds no training samples; lower the number of clients")
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

    def unheld(self, count: int) -> Tensor:
        """Up to `count` training samples that no client holds, without their labels, evenly spread over the set."""
        validation = self.partition.test if self.partition.test_from == "train" else ()
        held = np.concatenate([*self.partition.train, *validation])
        free = np.setdiff1d(np.arange(len(self.dataset.train)), held)
        chosen = free[np.linspace(0, max(len(free) - 1, 0), min(count, len(free))).astype(np.int64)]
        return torch.from_numpy(np.ascontiguousarray(self.dataset.train.x[chosen])).to(self.train.x.device)


def label_counts(data: Data, classes: int) -> Tensor:
    """How many real samples of each class one client holds."""
    valid = torch.arange(data.y.shape[0], device=data.y.device) < data.size
    return (torch.nn.functional.one_hot(data.y, classes) * valid[:, None]).sum(0)
