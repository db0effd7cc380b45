"""A loaded data set: arrays, names and the normalisation of the channels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Samples:
    """One split. Images are uint8 [n, channels, height, width]; other data is of any dtype, [n, ...]."""

    x: NDArray[np.generic]
    y: NDArray[np.int64]  # [n], 0 <= y < number of classes
    group: NDArray[np.int64] | None = None  # [n], the origin of a sample: source, domain, corruption

    def __len__(self) -> int:
        return len(self.y)

    def take(self, chosen: NDArray[np.bool_]) -> Samples:
        """The samples of a mask [n]."""
        return Samples(self.x[chosen], self.y[chosen], None if self.group is None else self.group[chosen])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Both splits, the names of the classes and groups, and the normalisation of the channels."""

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    groups: tuple[str, ...] = ()  # names of the values in Samples.group
    mean: tuple[float, ...] = ()  # per channel, of pixels scaled to 0..1; empty: x is used as it is
    std: tuple[float, ...] = ()
    augment: bool = False  # random crop (4 pixels of zero padding) and horizontal flip in training
    note: str = ""  # for readers of results: a substitute, a part of the published set, ...
