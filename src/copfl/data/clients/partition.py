"""A partition of a data set among clients, as a record and as a file; schemes.py makes them.

Runs, comparisons and searches hold samples out of it here.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl import foreign
from copfl.data.held_out import Sides, drawn, latest
from copfl.data.samples import CLASSIFICATION, MULTILABEL, Dataset, Samples
from copfl.errors import DataError, UsageError, at_least, raised_as
from copfl.files import write_bytes

Indices = NDArray[np.int64]
Parts = Sequence[Indices]  # the samples of each client

STREAM = 0x70617274  # "part": separates these draws from every other use of the same seed
FORMAT = "copfl partition 1"
INDICES = (
    "a pair (train, test): each is a list of the indices of every client's samples, into dataset.train and "
    "dataset.test"
)
FIELDS = {"scheme": str, "keywords": dict, "test_from": str, "notes": list, "train": list, "test": list}
NAMES_IN_FILES = {"alpha": "concentration"}  # of options, in this format and in the fingerprint


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every client; ``SCHEMES[p.scheme](dataset, p.clients, **p.keywords)`` repeats it."""

    train: tuple[Indices, ...]  # per client, indices into Dataset.train
    test: tuple[Indices, ...]  # per client, indices into Dataset.test, or into Dataset.train: see test_from
    scheme: str = "own"
    keywords: Mapping[str, Any] = field(default_factory=dict)  # the scheme's options and the seed
    test_from: str = "test"  # "test" | "train": a validation part, see hold_out
    notes: tuple[str, ...] = ()  # where the data set has fewer samples than the options ask for
    labels: Indices | None = None  # [clients, classes], each client's label of each class; None: the class
    # Per client, indices into Dataset.train that it does not train on: they choose its round. (): none.
    validation: tuple[Indices, ...] = ()

    def __post_init__(self) -> None:
        if self.test_from not in ("test", "train"):
            raise DataError(f'test_from must be "test" or "train", not "{self.test_from}"')
        if not self.train or len(self.train) != len(self.test):
            raise DataError(f"a partition of {len(self.train)} train parts and {len(self.test)} test parts")
        if self.validation and len(self.validation) != len(self.train):
            parts = f"{len(self.train)} train parts and {len(self.validation)} validation parts"
            raise DataError(f"a partition of {parts}")
        sides = [side for side in (self.train, self.test, self.validation) if side]
        sorted_as_usual = all(map(_sorted, sides))
        for client, (train, *others) in enumerate(zip(*sides, strict=True)):
            if not len(train):
                raise DataError(f"client {client} has no train samples; use fewer clients or more data")
            for part in (train, *others) if not sorted_as_usual else ():
                valid = part.dtype == np.int64 and part.ndim == 1 and (part >= 0).all()
                if not valid or len(np.unique(part)) < len(part):
                    raise DataError(f"client {client}: indices must be distinct int64 numbers from 0 on")
        if self.scheme == "concept_shift" and self.labels is None:
            raise DataError("a partition by concept_shift needs the labels of each client's classes")
        if self.labels is not None and (
            self.labels.ndim != 2
            or len(self.labels) != self.clients
            or (np.sort(self.labels, axis=1) != np.arange(self.labels.shape[1])).any()
        ):
            raise DataError("the labels of each client must be a permutation of the classes")

    @property
    def clients(self) -> int:
        return len(self.train)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all fields: equal partitions have equal fingerprints."""
        return hashlib.sha256(_canonical(self._record()).encode()).hexdigest()

    def _record(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme,
            "keywords": {NAMES_IN_FILES.get(name, name): value for name, value in self.keywords.items()},
            "test_from": self.test_from,
            "notes": list(self.notes),
            "train": [part.tolist() for part in self.train],
            "test": [part.tolist() for part in self.test],
            **({} if self.labels is None else {"labels": self.labels.tolist()}),
            **({"validation": [part.tolist() for part in self.validation]} if self.validation else {}),
        }

    def save(self, path: Path | str) -> None:
        """Writes the file, atomically."""
        text = _canonical({"format": FORMAT, "sha256": self.fingerprint, "partition": self._record()})
        write_bytes(Path(path), f"{text}\n".encode())

    @classmethod
    def load(cls, path: Path | str) -> Partition:
        """The partition that was saved there."""
        expected = "a partition.json, as a run folder has it, was expected"
        with raised_as(DataError, f"cannot read the partition {path}: {{}}; {expected}", OSError):
            text = Path(path).read_bytes()
        try:
            content = foreign.json_of(text)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise DataError(f'it has no "format": "{FORMAT}"')
            loaded = _from_record(content["partition"])
            if loaded.fingerprint != content["sha256"]:
                raise DataError("it was changed after it was saved: its SHA-256 differs")
        except (DataError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{path} is not a valid partition ({error!r}); make it again") from error
        return loaded

    def tested(self, dataset: Dataset) -> Samples:
        """The split that the test indices refer to."""
        return dataset.test if self.test_from == "test" else dataset.train

    def check(self, dataset: Dataset) -> None:
        """Raises a DataError if the data set lacks a sample of the partition."""
        sides = (
            ("train", self.train, dataset.train),
            ("test", self.test, self.tested(dataset)),
            *([("validation", self.validation, dataset.train)] if self.validation else []),
        )
        for name, parts, split in sides:
            last = int(np.concatenate(parts).max(initial=-1))
            if last >= len(split):
                problem = f'the {name} part names sample {last}, but "{dataset.name}" has {len(split)} there'
                raise DataError(f"{problem}; the partition was made for another data set")
        if self.labels is not None and self.labels.shape[1] != len(dataset.classes):
            counts = (
                f'labels of {self.labels.shape[1]} classes, but "{dataset.name}" has {len(dataset.classes)}'
            )
            raise DataError(f"the partition has {counts}; it was made for another data set")

    def label_counts(self, dataset: Dataset) -> Indices:
        """Each client's train samples by its labels, [clients, classes]; [clients, 0] without classes."""
        self.check(dataset)
        if dataset.kind == MULTILABEL:
            return np.stack([dataset.train.y[part].sum(axis=0).astype(np.int64) for part in self.train])
        if dataset.kind != CLASSIFICATION:
            return np.zeros((self.clients, 0), np.int64)
        counts = count_by(self.train, dataset.train.y, len(dataset.classes))
        if self.labels is not None:
            np.put_along_axis(counts, self.labels, counts.copy(), axis=1)
        return counts


def of_indices(value: Any, who: str) -> Partition:
    """The partition that a user gave, by itself or as indices.

    Args:
        value: A Partition, or the indices of each client, see INDICES.
        who: Gave it, for the error.
    """
    if isinstance(value, Partition):
        return value
    try:
        train, test = ([np.asarray(part) for part in side] for side in value)
    except (TypeError, ValueError):
        train, test = [], []
    parts = [*train, *test]
    if not train or not all((part.ndim == 1 and part.dtype.kind in "iu") or not part.size for part in parts):
        raise UsageError(
            f"{who} is {type(value).__name__}, which says not who has which samples; it must be {INDICES}"
        )
    of_train, of_test = (tuple(part.astype(np.int64).reshape(-1) for part in side) for side in (train, test))
    return Partition(of_train, of_test)


def distinct(parts: Parts) -> tuple[Indices, ...]:
    """Each part sorted, without repeated samples."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    samples = np.concatenate(parts).astype(np.int64)
    span = int(samples.max(initial=0)) + 1
    distinct_keys = np.unique(owner * span + samples)  # one sort for all: many clients have few samples each
    sizes = np.bincount(distinct_keys // span, minlength=len(parts))
    return tuple(np.split(distinct_keys % span, np.cumsum(sizes)[:-1]))


def _sorted(parts: Parts) -> bool:
    """Whether every part has distinct int64 numbers from 0 on in rising order."""
    if any(part.dtype != np.int64 or part.ndim != 1 for part in parts):
        return False
    whole, sizes = np.concatenate(parts), np.array([len(part) for part in parts])
    starts = np.cumsum(sizes)[:-1]
    within = np.ones(max(len(whole) - 1, 0), bool)
    within[starts[(starts > 0) & (starts < len(whole))] - 1] = False
    return bool((whole >= 0).all() and (np.diff(whole) > 0)[within].all())


def _canonical(record: object) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def _from_record(record: dict[str, Any]) -> Partition:
    for name, kind in FIELDS.items():
        if not isinstance(record[name], kind):
            raise DataError(f'"{name}" is not a {kind.__name__}')
    if not all(isinstance(note, str) for note in record["notes"]):
        raise DataError('"notes" are not all texts')
    todays = {old: name for name, old in NAMES_IN_FILES.items()}
    train, test, validation = (
        tuple(np.array(part) if len(part) else np.empty(0, np.int64) for part in record.get(side, ()))
        for side in ("train", "test", "validation")
    )
    keywords = {todays.get(name, name): value for name, value in record["keywords"].items()}
    labels = np.array(record["labels"], np.int64) if "labels" in record else None
    notes = tuple(record["notes"])
    return Partition(train, test, record["scheme"], keywords, record["test_from"], notes, labels, validation)


def count_by(parts: Parts, labels: Indices, kinds: int) -> Indices:
    """The number of samples of each label in each part, [parts, kinds].

    Args:
        parts: Indices of the samples in each part.
        labels: Of all samples.
        kinds: The number of labels.
    """
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    key = owner * kinds + labels[np.concatenate(parts)]
    return np.bincount(key, minlength=len(parts) * kinds).reshape(len(parts), kinds)


def hold_out(partition: Partition, fraction: float, dataset: Dataset, seed: int) -> Partition:
    """The partition with a validation part from its train part as test part: every class in proportion.

    A client with two samples or more has at least one in each part; a single sample stays in the train part.
    No client trains on a validation sample of another: a sample that several clients have is held out from
    all of them or from none. There, a client's validation part may be larger or smaller, or empty.

    Args:
        partition: Who has which samples.
        fraction: Of each client's training samples.
        dataset: Whose samples they are.
        seed: Of the draw.
    """
    rng = generator(seed, 1)
    train, test = _split(partition, fraction, dataset, lambda _: rng)
    notes = (*partition.notes, f"validation: {fraction} of each client's train samples, seed {seed}")
    return replace(partition, train=train, test=test, test_from="train", notes=notes)


def with_validation(partition: Partition, fraction: float, dataset: Dataset, seed: int) -> Partition:
    """The partition with validation parts taken from its train parts: every class in proportion.

    The part of a client that shares no sample with another is that of `validation_part`.

    Args:
        partition: Who has which samples.
        fraction: Of each client's training samples.
        dataset: Whose samples they are.
        seed: Of the draw.
    """
    train, validation = _split(
        partition, fraction, dataset, lambda n: _validation_rng(seed, n), partition.labels
    )
    if not any(map(len, validation)):
        raise DataError("no client has two train samples, so none can be held out for validation")
    notes = (
        *partition.notes,
        f"validation: {fraction} of each client's train samples, which no client trains on",
    )
    return replace(partition, train=train, validation=validation, notes=notes)


def validation_part(samples: Samples, labels: Indices, fraction: float, seed: int, client: int) -> Sides:
    """Which of a client's training samples stay, and which are for validation: what a node can compute.

    Args:
        samples: The client's.
        labels: The class of each of them; 0 where targets are not classes.
        fraction: Of the samples.
        seed: Of the run.
        client: Its number.
    """
    nothing = np.zeros(len(labels), bool)
    if not len(labels):
        return Sides(~nothing, nothing)
    return _held_out(samples, labels, _wanted(fraction, len(labels)), _validation_rng(seed, client))


def _validation_rng(seed: int, client: int) -> np.random.Generator:
    return generator(seed, 4, client)


def _wanted(fraction: float, samples: int) -> int:
    """How many of a client's samples are held out: at least one, and not all."""
    return max(1, min(round(fraction * samples), samples - 1)) if samples > 1 else 0


def _held_out(samples: Samples, strata: Indices, count: int, rng: np.random.Generator) -> Sides:
    """About so many samples: every (size / count)-th of a random list in class order.

    What belongs together stays together. With a time, the later samples are held out.
    """
    order = rng.permutation(len(strata))
    unit = np.arange(len(strata)) if samples.unit is None else samples.unit
    if samples.time is not None:
        sides = latest(samples.time, unit, count)
        return sides if sides.train.any() else Sides(~sides.train, np.zeros(len(strata), bool))
    if samples.unit is not None:
        held_out = drawn(strata, unit, order, count)
        return Sides(~held_out, held_out)
    held_out = np.zeros(len(strata), bool)
    order = order[np.argsort(strata[order], kind="stable")]
    positions = (np.arange(count) * len(order) + rng.integers(len(order))) // max(count, 1)
    held_out[order[positions]] = True
    return Sides(~held_out, held_out)


def _split(
    partition: Partition,
    fraction: float,
    dataset: Dataset,
    rng_of: Callable[[int], np.random.Generator],
    labels: Indices | None = None,
) -> tuple[tuple[Indices, ...], tuple[Indices, ...]]:
    """Each client's train part without this fraction, and the fraction.

    `rng_of` is that of a client. `labels` are those of a Partition, by which its samples are then in
    proportion.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"the fraction to hold out is {fraction}; it must be between 0 and 1")
    partition.check(dataset)
    strata, unit = dataset.train.strata, dataset.train.unit
    facts = replace(dataset.train, x=strata)  # without the samples themselves, which may be large
    decided, held_out, left_out = np.zeros((3, len(dataset.train)), bool)

    def with_their_units(chosen: Indices) -> NDArray[Any]:
        return chosen if unit is None else np.isin(unit, unit[chosen])

    rngs = [rng_of(client) for client in range(partition.clients)]
    for client, part in enumerate(partition.train):
        free = part[~decided[part]]  # that no earlier client has
        count = min(max(_wanted(fraction, len(part)) - int(held_out[part].sum()), 0), len(free))
        if len(free):
            classes = strata[free] if labels is None else labels[client][strata[free]]
            sides = _held_out(facts.take(free), classes, count, rngs[client])
            held_out[free[sides.test]] = True
            # Others that belong to held-out samples are held out, too; earlier ones are left out.
            (held_out if facts.time is None else left_out)[with_their_units(free[sides.test])] = True
        decided[with_their_units(part)] = True
    left_out &= ~held_out
    for client, part in enumerate(partition.train):
        if (held_out | left_out)[part].all():  # by other clients' draws; a client needs a sample to train on
            in_validation = with_their_units(rngs[client].choice(part, 1))
            held_out[in_validation] = left_out[in_validation] = False
    train = tuple(np.sort(part[~(held_out | left_out)[part]]) for part in partition.train)
    return train, tuple(np.sort(part[held_out[part]]) for part in partition.train)


def generator(seed: int, *purpose: int) -> np.random.Generator:
    """Draws that depend on the seed and the purpose alone.

    Args:
        seed: Of the run.
        purpose: Numbers; other purposes have other draws.
    """
    at_least(0, seed=seed)
    return np.random.default_rng([seed, STREAM, *purpose])
