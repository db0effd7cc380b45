"""The clients' data on a device: one pool per split, and the rows of the pool that each client has.

`prepare` makes it of a data set and its partition; the engines take their rows from it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.task import Data
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Inputs, Samples, Shape, each, shape_of
from copfl.errors import UsageError


class Split:
    """One split: the assigned samples in one pool on the device; `rows` gives padded rows of some clients."""

    def __init__(
        self,
        samples: Samples,
        indices: Sequence[NDArray[np.int64]],
        device: torch.device | str,
        labels: NDArray[np.int64] | None = None,
    ) -> None:
        used, positions = np.unique(np.concatenate(indices), return_inverse=True)
        self.sizes = np.array([len(index) for index in indices], np.int64)
        self.indices = np.split(positions.astype(np.int64), np.cumsum(self.sizes)[:-1])
        if not len(used):  # padding needs a sample even where no client has one
            samples, used = Samples(each(_zero, samples.x), _zero(samples.y)), np.zeros(1, np.int64)
        used_samples = samples.take(used)
        self.x: Any = tensors(used_samples.x, device)  # a tensor, or several by name
        self.y: Tensor = tensors(used_samples.y, device)
        self.unit = used_samples.unit  # what belongs together; None: each is alone
        self.labels = labels  # as of a Partition
        # The clients and the width that were asked for last, with the answer.
        self._last: tuple[tuple[tuple[tuple[int, ...], ...], int], list[Data]] | None = None

    def rows(self, ids: Sequence[int] | NDArray[np.int64], width: int = 1) -> Data:
        """These clients' samples, a row per client, padded to the largest of them, or to this width.

        Args:
            ids: Of the clients.
            width: The least that samples are padded to.
        """
        return self.groups([ids], width)[0]

    def groups(self, groups: Sequence[Sequence[int] | NDArray[np.int64]], width: int = 1) -> list[Data]:
        """The samples of each group of clients, a row per client, padded to the largest of its group.

        Args:
            groups: The clients of each.
            width: To which all are padded at least.
        """
        key = tuple(tuple(int(n) for n in ids) for ids in groups), width
        if self._last is None or self._last[0] != key:  # the same with full participation
            self._last = None  # frees the memory of the former rows first
            self._last = key, [self._padded(ids, width) for ids in key[0]]
        return self._last[1]

    def _padded(self, ids: tuple[int, ...], width: int) -> Data:
        sizes = self.sizes[list(ids)]
        index = np.zeros((len(ids), int(sizes.max(initial=width))), np.int64)
        for position, client in enumerate(ids):
            index[position, : sizes[position]] = self.indices[client]
        device = self.y.device
        chosen = torch.from_numpy(index).to(device)
        x = tree.each(lambda t: t[chosen], self.x)
        y = self.y[chosen]
        if self.labels is not None:
            y = torch.from_numpy(self.labels[list(ids)]).to(device).gather(1, y)
        return Data(x, y, torch.from_numpy(sizes).to(device))

    def units(self, client: int) -> NDArray[np.int64] | None:
        """What of a client's samples belongs together, as of Samples; None: each is alone."""
        return None if self.unit is None else self.unit[self.indices[client]]

    def targets(self, client: int) -> Tensor:
        """The targets of a client's samples, with its own labels of the classes."""
        y = self.y[self.indices[client]]
        return y if self.labels is None else torch.from_numpy(self.labels[client]).to(y.device)[y]


class FederatedData:
    """The samples of every client: to train on, to test on and, where the partition has them, to validate."""

    def __init__(self, dataset: Dataset, partition: Partition, device: torch.device | str = "cpu") -> None:
        partition.check(dataset)
        self.dataset, self.partition = dataset, partition
        self.train = Split(dataset.train, partition.train, device, partition.labels)
        self.test = Split(partition.tested(dataset), partition.test, device, partition.labels)
        self.validation: Split | None = None
        if partition.validation:
            self.validation = Split(dataset.train, partition.validation, device, partition.labels)

    @property
    def splits(self) -> list[Split]:
        """Train, test and, where there is one, validation."""
        return [self.train, self.test, *([] if self.validation is None else [self.validation])]

    @property
    def clients(self) -> int:
        return len(self.train.sizes)

    @property
    def shape(self) -> Shape:
        """The shape of one sample; of several arrays, one by name."""
        return shape_of(self.dataset.train.x)

    def unassigned(self, count: int) -> Any:
        """Up to `count` train samples that no client has, evenly spaced in the data set, without labels."""
        tested = self.partition.test if self.partition.test_from == "train" else ()
        assigned = np.concatenate([*self.partition.train, *self.partition.validation, *tested])
        free = np.setdiff1d(np.arange(len(self.dataset.train)), assigned)
        chosen = free[np.linspace(0, max(len(free) - 1, 0), min(count, len(free))).astype(np.int64)]
        return tensors(each(lambda array: array[chosen], self.dataset.train.x), self.train.y.device)


def _zero(array: NDArray[Any]) -> NDArray[Any]:
    return np.zeros_like(array, shape=(1, *array.shape[1:]))


def tensors(x: Inputs, device: torch.device | str = "cpu") -> Any:
    """The array, or each of several, as a tensor on the device.

    Args:
        x: The samples.
        device: Where they are put.
    """

    def tensor(array: NDArray[Any]) -> Tensor:
        if array.dtype.kind == "U":
            raise UsageError("the samples are texts; use a model that tokenises them (`copfl list models`)")
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return each(tensor, x)
