"""Who holds what: the record of a split among clients, its file, its counts and its picture."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError

Indices = NDArray[np.int64]
Parts = tuple[Indices, ...]

FORMAT = "copfl partition 1"
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, eq=False)
class Table:
    """Counts per client and class, and per client and group where the samples have one."""

    train: Indices  # [clients, classes]
    test: Indices
    train_groups: Indices | None  # [clients, groups]
    test_groups: Indices | None


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every client. ``partition(p.scheme, dataset, p.clients, **p.keywords)`` makes it again."""

    train: Parts  # per client, indices into Dataset.train
    test: Parts  # per client, indices into Dataset.test, or into Dataset.train where test_from says so
    scheme: str
    keywords: Mapping[str, Any] = field(default_factory=dict)  # for the record, the seed among them
    test_from: str = "test"  # "test" | "train": a validation part, see hold_out
    notes: tuple[str, ...] = ()  # where the data fell short of what was asked

    def __post_init__(self) -> None:
        if self.test_from not in ("test", "train"):
            raise DataError(f'a partition tests on "test" or "train", not on "{self.test_from}"')
        if not self.train or len(self.train) != len(self.test):
            raise DataError(f"a partition of {len(self.train)} train parts and {len(self.test)} test parts")
        for client, (train, test) in enumerate(zip(self.train, self.test, strict=True)):
            if not len(train):
                raise DataError(f"client {client} has no train samples; use fewer clients or more data")
            for part in (train, test):
                if (
                    part.dtype != np.int64
                    or part.ndim != 1
                    or (part < 0).any()
                    or len(np.unique(part)) < len(part)
                ):
                    raise DataError(f"client {client}: indices are distinct int64 numbers from 0 on")

    @property
    def clients(self) -> int:
        return len(self.train)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything in it: equal partitions have equal fingerprints."""
        return hashlib.sha256(_canonical(self._record()).encode()).hexdigest()

    def _record(self) -> dict[str, Any]:
        parts = {
            "train": [part.tolist() for part in self.train],
            "test": [part.tolist() for part in self.test],
        }
        record = {"scheme": self.scheme, "keywords": dict(self.keywords), "test_from": self.test_from}
        return {**record, "notes": list(self.notes), **parts}

    def save(self, path: Path | str) -> None:
        """None, once the whole file is there; until then what was there before stays."""
        path = Path(path)
        text = _canonical({"format": FORMAT, "sha256": self.fingerprint, "partition": self._record()})
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise DataError(f"cannot write the partition {path}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):  # after a success it is no longer there
                temporary.unlink()

    @classmethod
    def load(cls, path: Path | str) -> Partition:
        """The partition that was saved there."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"cannot read the partition {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path} is cut short or damaged, not JSON ({error}); make the partition again"
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DataError(f'{path} is not a partition of this version of copfl (no "format": "{FORMAT}")')
        try:
            restored = _restored(content["partition"])
            intact = restored.fingerprint == content["sha256"]
        except (DataError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{path} holds no valid partition ({error!r}); make it again") from error
        if not intact:
            raise DataError(
                f"{path} was changed after it was saved (its SHA-256 differs); make the partition again"
            )
        return restored

    def tested(self, dataset: Dataset) -> Samples:
        """The split that the test indices refer to."""
        return dataset.test if self.test_from == "test" else dataset.train

    def check(self, dataset: Dataset) -> None:
        """None, if the data set has all these samples; a DataError if it was made for another."""
        for name, parts, split in (
            ("train", self.train, dataset.train),
            ("test", self.test, self.tested(dataset)),
        ):
            last = max((int(part.max()) for part in parts if len(part)), default=-1)
            if last >= len(split):
                raise DataError(
                    f'the partition\'s {name} part names sample {last}, but "{dataset.name}" has {len(split)} there; '
                    "it was made for another data set"
                )

    def table(self, dataset: Dataset) -> Table:
        """How many samples of each class, and of each group, every client holds."""
        self.check(dataset)
        sides = ((self.train, dataset.train), (self.test, self.tested(dataset)))
        train, test = (count_by(parts, split.y, len(dataset.classes)) for parts, split in sides)
        groups = group_count(dataset)
        by_group = (None if s.group is None else count_by(parts, s.group, groups) for parts, s in sides)
        return Table(train, test, *by_group)

    def draw(self, dataset: Dataset, width: int = 80) -> str:
        """A picture of at most ``width`` (but 40) columns: a row per client, a column per class."""
        return _drawing(self, dataset, max(width, 40))


def group_count(dataset: Dataset) -> int:
    """How many groups there are, with a name or without."""
    named = [split.group for split in (dataset.train, dataset.test) if split.group is not None and len(split)]
    return max([len(dataset.groups), *(int(group.max()) + 1 for group in named)])


def name_of(names: Sequence[str], number: int) -> str:
    """The name of a class or group, or its number where it has none."""
    return names[number] if number < len(names) else str(number)


def _canonical(record: object) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def _restored(record: dict[str, Any]) -> Partition:
    """The partition of a record, whatever its arrays; Partition itself checks those."""
    expected = {"scheme": str, "keywords": dict, "test_from": str, "notes": list, "train": list, "test": list}
    for name, kind in expected.items():
        if not isinstance(record[name], kind):
            raise DataError(f'"{name}" is not a {kind.__name__}')
    if not all(isinstance(note, str) for note in record["notes"]):
        raise DataError('"notes" are not all texts')
    train, test = (
        tuple(np.array(part) if len(part) else np.empty(0, np.int64) for part in record[side])
        for side in ("train", "test")
    )
    return Partition(
        train, test, record["scheme"], record["keywords"], record["test_from"], notes=tuple(record["notes"])
    )


def count_by(parts: Sequence[Indices], labels: Indices, kinds: int) -> Indices:
    """How many samples of each kind are in each part, [parts, kinds]."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    key = owner * kinds + labels[np.concatenate(parts)]
    return np.bincount(key, minlength=len(parts) * kinds).reshape(len(parts), kinds)


def _drawing(split: Partition, dataset: Dataset, width: int, rows: int = 24) -> str:
    """The picture; beyond ``rows`` clients a summary and some of them."""
    table = split.table(dataset)
    train, test = table.train.sum(axis=1), table.test.sum(axis=1)
    word = "test" if split.test_from == "test" else "validation"
    lines = [f"{split.scheme}: {split.clients} clients, {train.sum()} train and {test.sum()} {word} samples"]
    shown = np.arange(split.clients)
    if split.clients > rows:
        per_client = {
            "train samples": train,
            f"{word} samples": test,
            "classes": (table.train > 0).sum(axis=1),
        }
        for what, values in per_client.items():
            low, middle, high = np.quantile(values, (0, 0.5, 1)).astype(int)
            lines.append(f"{what} per client: {low} to {high}, median {middle}")
        lines.append(f"{rows // 2} of the clients, from the fewest train samples to the most:")
        ranks = np.linspace(0, split.clients - 1, rows // 2).astype(int)
        shown = np.argsort(train, kind="stable")[ranks]
    left = [f"{client:>{len(str(split.clients - 1))}} │" for client in shown]
    right = [f"│ {train[client]}+{test[client]}" for client in shown]
    if table.train_groups is not None:
        for row, client in enumerate(shown):
            own = np.flatnonzero(table.train_groups[client])
            right[row] += (
                f" {name_of(dataset.groups, own[0])[:12]}" if len(own) == 1 else f" {len(own)} groups"
            )
    room = max(1, width - len(left[0]) - max(map(len, right)))
    kinds = len(dataset.classes)
    merged = -(-kinds // room)  # classes in a column
    counts = np.add.reduceat(table.train[shown], np.arange(0, kinds, merged), axis=1)
    cell = max(1, min(room // counts.shape[1], 8))
    level = -(-8 * counts // counts.max())  # rounded up: what is there is seen
    gap = " " if cell > 1 else ""
    if cell > 3:
        names = [name[: cell - 1] for name in dataset.classes]
        names = names if len(set(names)) == kinds else [str(kind) for kind in range(kinds)]
        lines.append(" " * len(left[0]) + "".join(f"{name:{cell}}" for name in names) + f"  train+{word}")
    for row, start, end in zip(level, left, right, strict=True):
        lines.append(start + "".join(BLOCKS[size] * (cell - len(gap)) + gap for size in row) + end)
    column = f"a column is {merged} classes" if merged > 1 else "a column is a class"
    lines.append(f"{column}, █ is {counts.max()} train samples")
    lines += split.notes
    return "\n".join(
        short for line in lines for short in (textwrap.wrap(line, width) if len(line) > width else [line])
    )
