"""A loaded data set: arrays, names and the normalisation of the channels.

Every reader of data returns a `Dataset`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.errors import DataError

KINDS = ("classification", "multilabel", "regression", "next_token", "survival")
CLASSIFICATION, MULTILABEL, REGRESSION, NEXT_TOKEN, SURVIVAL = KINDS
RISK = ("risk",)  # the output of a model of survival
Inputs = Any  # one array [n, ...], or several by name, dict[str, NDArray], with the same first axis
Shape = Any  # of one sample: a tuple of numbers, or one by name


def each(change: Callable[[NDArray[Any]], Any], x: Inputs) -> Any:
    """`change` of the array, or of each of several.

    Args:
        change: Of an array.
        x: An array, or several by name.
    """
    return {name: change(array) for name, array in x.items()} if isinstance(x, dict) else change(x)


def by_name(x: Inputs) -> dict[str, NDArray[Any]]:
    """The arrays by name; a single one is called "x"."""
    return x if isinstance(x, dict) else {"x": x}


def shape_of(x: Inputs) -> Shape:
    return each(lambda array: tuple(array.shape[1:]), x)


def shown(x: Inputs) -> str:
    """The type and shape of one sample, for messages."""
    if isinstance(x, dict):
        return ", ".join(f"{key}: {shown(array)}" for key, array in x.items())
    return "text" if x.dtype.kind == "U" else f"{x.dtype} {list(x.shape[1:])}"


@dataclass(frozen=True, eq=False)
class Samples:
    """One split. Images are uint8 [n, channels, height, width]; other data is of any dtype, [n, ...].

    Targets: classes int64 [n]; labels float [n, k], 0 or 1 (multilabel); values float [n] or [n, k]
    (regression); tokens int64 [n, T] (next_token); time and event float [n, 2], or with the start [n, 3]
    (survival). Text that is not yet tokens is a str array x [n].
    """

    x: Inputs
    y: NDArray[Any]
    group: NDArray[np.int64] | None = None  # [n], the origin of a sample: client, source, domain, corruption
    # [n], equal where samples belong together, such as those of one person, or copies: in train and test no
    # number is the same, and nothing that is held out of training divides them. None: each is alone.
    unit: NDArray[np.int64] | None = None
    time: NDArray[np.float64] | None = (
        None  # [n]: what is held out is later than the rest; None: any samples are
    )
    row: NDArray[np.int64] | None = None  # [n], of a table: the row of its file, from 0

    def __len__(self) -> int:
        return len(self.y)

    def take(self, chosen: NDArray[Any]) -> Samples:
        """The samples of a mask [n], or of indices."""
        facts = (
            None if fact is None else fact[chosen] for fact in (self.group, self.unit, self.time, self.row)
        )
        return Samples(each(lambda array: array[chosen], self.x), self.y[chosen], *facts)

    @property
    def strata(self) -> NDArray[np.int64]:
        """The class of each sample; 0 where targets are not classes."""
        has_classes = self.y.ndim == 1 and self.y.dtype.kind == "i"
        return self.y if has_classes else np.zeros(len(self), np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Both splits, the names of the targets and groups, and the normalisation of the channels."""

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]  # names of the classes, labels, targets or tokens
    groups: tuple[str, ...] = ()  # names of the values in Samples.group
    mean: tuple[float, ...] = ()  # per channel, of pixels scaled to 0..1; empty: x is used as it is
    std: tuple[float, ...] = ()
    augment: bool = False  # random crop (4 pixels of zero padding) and horizontal flip in training
    note: str = ""  # for readers of results: a substitute, a part of the published set, ...
    warnings: tuple[str, ...] = ()  # what the owner should look at before training, and what to do
    kind: str = CLASSIFICATION  # of the targets: see Samples
    table: Any = (
        None  # of a table, its columns and how they became numbers: copfl.data.tables.encoders.TableInfo
    )
    groups_are_clients: bool = True  # by nature; false where they are only a fact, such as a corruption
    # Train samples of which encoders and scales are learned; None: all. See `copfl.data.tables.learned_from`.
    learned: NDArray[np.int64] | None = None
    # Of a table whose encoders are learned, its cells: copfl.data.tables.tables.Cells.
    cells: Any = None
    origin: str = (
        ""  # the digest of the data set whose encoders these samples have learned again; "": its own
    )

    def __repr__(self) -> str:
        sizes = f"{len(self.train):,} train and {len(self.test):,} test samples"
        return f"Dataset {self.name}: {sizes}, {shown(self.train.x)}, {self.kind}"

    @cached_property
    def digest(self) -> str:
        """The hash of the samples, and of how they become a network's inputs."""
        if self.origin:
            return self.origin
        content = hashlib.sha256()
        for samples in (self.train, self.test):
            for name, array in by_name(samples.x).items():
                content.update(f"{name} {array.dtype.str} {array.shape}".encode())
                content.update(np.ascontiguousarray(array).tobytes())
            for own in (samples.y, samples.group, samples.unit, samples.time):
                content.update(b"" if own is None else own.tobytes())
        facts = (
            self.kind,
            self.classes,
            self.groups,
            self.mean,
            self.std,
            self.augment,
            self.groups_are_clients,
        )
        content.update(repr(facts).encode())
        return content.hexdigest()

    @property
    def natural(self) -> bool:
        """Whether the data has clients by nature, so that by_group is the usual partition."""
        return self.groups_are_clients and bool(self.groups) and self.train.group is not None

    @property
    def target_scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each value to predict, over the learned samples; empty for other targets."""
        if self.kind != REGRESSION:
            return (), ()
        y = self.train.y if self.learned is None else self.train.y[self.learned]
        values = np.asarray(y, np.float64).reshape(len(y), -1)
        std = values.std(axis=0)
        return tuple(values.mean(axis=0).tolist()), tuple(np.where(std > 1e-12, std, 1.0).tolist())

    def check_test_classes(self) -> None:
        """Raises a DataError if a class has test samples but no train sample in the whole data set."""
        if self.kind == CLASSIFICATION and len(extra := np.setdiff1d(self.test.y, self.train.y)):
            raise DataError(
                f'the class "{self.classes[extra[0]]}" of "{self.name}" has test samples and no train '
                "sample, so no client can learn it; move a sample into the train part, or leave the class out"
            )
