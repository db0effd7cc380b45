"""The schemes that partition a data set among clients: by class, by group, by size, or at random.

    split = SCHEMES["classes"](dataset, clients=10, seed=0, per_client=2)

A scheme is a function of (dataset, clients, seed, options); its randomness comes from the seed alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from copfl.data.clients.dividing import class_slots, drawn, equal_parts, log_gamma, proportional, shuffled_by
from copfl.data.clients.groups import group_of
from copfl.data.clients.partition import Indices, Partition, Parts, count_by, distinct, generator
from copfl.data.samples import CLASSIFICATION, Dataset
from copfl.errors import DataError, UsageError, at_least, how_to_set, one_of
from copfl.tables import listed


class Assigned(NamedTuple):
    """What a scheme decides."""

    train: Parts
    test: Parts
    notes: Sequence[str] = ()
    labels: Indices | None = None  # as of a Partition


SCHEMES: dict[str, Callable[..., Partition]] = {}
OVERLAPPING_SCHEMES = {"overlapping"}  # those that assign a train sample to several clients
UNTESTED_SCHEMES = {"by_group"}  # those in which a client may train without test samples
MOST_SHOWN = 5  # names in a note


def _scheme(assign: Callable[..., Assigned]) -> Callable[..., Partition]:
    """The scheme of SCHEMES that records its options and gives every client sorted, distinct test samples."""

    @functools.wraps(assign)
    def scheme(dataset: Dataset, clients: int, seed: int, **options: Any) -> Partition:
        at_least(1, clients=clients)
        keywords = {"seed": int(seed), **(assign.__kwdefaults__ or {}), **options}
        if not keywords.get("samples", True):  # all: as before there was such an option
            del keywords["samples"]
        available, minimum = len(dataset.train), keywords.get("minimum", 1)
        if not available or not len(dataset.test):
            sizes = f"{available} train and {len(dataset.test)} test samples"
            raise DataError(f'"{dataset.name}" has {sizes}; both splits need at least one')
        if clients * minimum > available and assign.__name__ not in OVERLAPPING_SCHEMES:
            needed = f"{clients} clients with at least {minimum} train samples each need {clients * minimum}"
            limit = f'"{dataset.name}" has {available}; use at most {available // minimum} clients'
            raise DataError(f"{needed}, but {limit}")
        assigned = assign(dataset, clients, seed, **options)
        for client, part in enumerate(assigned.test):
            if not len(part) and assign.__name__ not in UNTESTED_SCHEMES:
                missing = f"client {client} has no test samples of its classes or groups"
                raise DataError(f"{missing}; use fewer clients or more data")
        train, test = distinct(assigned.train), distinct(assigned.test)
        notes, labels = tuple(assigned.notes), assigned.labels
        return Partition(train, test, assign.__name__, keywords, notes=notes, labels=labels)

    SCHEMES[assign.__name__] = scheme
    return scheme


@_scheme
def classes(
    dataset: Dataset,
    clients: int,
    seed: int,
    *,
    per_client: int = 2,
    train_per_class: int = 50,
    test_per_class: int = 100,
    distinct: bool = True,
    group_per_client: bool = False,
) -> Assigned:
    """A few classes for each client; the clients per class differ by at most one.

    No train image is assigned twice. Neither is a test image if a class has enough of them; otherwise all its
    clients are tested on the same ones.

    Args:
        dataset: The samples.
        clients: How many there are.
        seed: Of the assignment.
        per_client: Classes of a client.
        train_per_class: Train samples of each class of a client.
        test_per_class: Test samples of each class of a client.
        distinct: Whether the classes of a client are different ones.
        group_per_client: Whether client n has images of group n mod G only.
    """
    at_least(1, per_client=per_client, train_per_class=train_per_class, test_per_class=test_per_class)
    _needs_classes(dataset, "classes")
    kinds = len(dataset.classes)
    if distinct and per_client > kinds:
        limit = f'{kinds}, the number of classes of "{dataset.name}"'
        raise UsageError(
            f"per_client={per_client} must be at most {limit}; or set {how_to_set('partition.distinct', False)}"
        )
    rng = generator(seed)
    # Paper: follows FedSelect, which may assign the same class to a client twice. We swap until no client has
    # that; distinct=False restores it.
    slots = class_slots(rng, clients, per_client, kinds, distinct)
    group = None
    if group_per_client:
        present = np.unique(group_of(dataset, dataset.train))
        group = present[np.arange(clients) % len(present)]
    train, train_notes = _fill_slots(rng, dataset, "train", slots, group, train_per_class)
    test, test_notes = _fill_slots(rng, dataset, "test", slots, group, test_per_class)
    return Assigned(train, test, train_notes + test_notes)


@_scheme
def concept_shift(
    dataset: Dataset,
    clients: int,
    seed: int,
    *,
    per_client: int = 2,
    train_per_class: int = 50,
    test_per_class: int = 100,
) -> Assigned:
    """``classes`` with other labels at every client: a permutation of its classes, in train and test.

    The same input has another label at another client. `Partition.labels` has the permutations.

    Args:
        dataset: The samples.
        clients: How many there are.
        seed: Of the assignment.
        per_client: Classes of a client.
        train_per_class: Train samples of each class of a client.
        test_per_class: Test samples of each class of a client.
    """
    options = {"per_client": per_client, "train_per_class": train_per_class, "test_per_class": test_per_class}
    split = classes(dataset, clients, seed, **options)
    labels, rng = np.tile(np.arange(len(dataset.classes)), (clients, 1)), generator(seed, 2)
    for labels_of_client, part in zip(labels, split.train, strict=True):
        present = np.unique(dataset.train.y[part])
        labels_of_client[present] = rng.permutation(present)
    return Assigned(split.train, split.test, split.notes, labels)


@_scheme
def dirichlet(
    dataset: Dataset,
    clients: int,
    seed: int,
    *,
    alpha: float = 0.3,
    minimum: int = 2,
    test: str = "same",
    samples: int = 0,
) -> Assigned:
    """Every class divided in Dirichlet(alpha) proportions; ``minimum`` train samples or more per client.

    Args:
        dataset: The samples.
        clients: How many there are.
        seed: Of the assignment.
        alpha: The smaller, the more the clients differ.
        minimum: Train samples that every client has.
        test: "same" follows the client's train labels, "iid" is an equal part of the test split.
        samples: The number of train samples that are divided, drawn at random; 0: all.
    """
    at_least(0, samples=samples)
    at_least(1e-100, alpha=alpha)  # below, the logarithms overflow
    at_least(1, minimum=minimum)
    one_of(("same", "iid"), test=test)
    _needs_classes(dataset, "dirichlet")
    rng, shape = generator(seed), (len(dataset.classes), clients)
    used = np.arange(len(dataset.train))
    if samples:
        used = np.sort(rng.permutation(len(used))[:samples])
    parts = proportional(rng, dataset.train.y[used], log_gamma(rng, alpha, shape), minimum)
    train = [used[part] for part in parts]
    if test == "iid":
        test_parts = equal_parts(rng, np.arange(len(dataset.test)), clients)
        return Assigned(train, test_parts, _test_note(dataset, clients))
    counts = count_by(train, dataset.train.y, len(dataset.classes)).T
    usable = np.flatnonzero((counts.sum(axis=1) > 0)[dataset.test.y])  # of classes that are trained on
    if not len(usable):
        iid = how_to_set("partition.test", "iid")
        raise DataError(f'"{dataset.name}" has no test samples of its train classes; {iid} needs none')
    parts = proportional(rng, dataset.test.y[usable], np.log(np.maximum(counts, 1e-300)), 1)
    return Assigned(train, [usable[part] for part in parts], _test_note(dataset, clients))


@_scheme
def iid(dataset: Dataset, clients: int, seed: int) -> Assigned:
    """Random parts of equal size; sizes differ by at most one sample.

    Args:
        dataset: The samples.
        clients: How many there are.
        seed: Of the assignment.
    """
    rng = generator(seed)
    train, test = (
        equal_parts(rng, np.arange(len(split)), clients) for split in (dataset.train, dataset.test)
    )
    return Assigned(train, test, _test_note(dataset, clients))


@_scheme
def quantity(dataset: Dataset, clients: int, seed: int, *, alpha: float = 0.5, minimum: int = 2) -> Assigned:
    """Random parts with sizes in Dirichlet(alpha) proportions, of at least ``minimum`` train samples.

    Args:
        dataset: The samples.
        clients: How many there are.
        seed: Of the assignment.
        alpha: The smaller, the more the sizes differ.
        minimum: Train samples that every client has.
    """
    at_least(1e-100, alpha=alpha)
    at_least(1, minimum=minimum)
    rng = generator(seed)
    log_weights = log_gamma(rng, alpha, (1, clients))
    train, test = (
        proportional(rng, np.zeros(len(split), np.int64), log_weights, least)
        for split, least in ((dataset.train, minimum), (dataset.test, 1))
    )
    return Assigned(train, test, _test_note(dataset, clients))


@_scheme
def by_group(dataset: Dataset, clients: int, seed: int) -> Assigned:
    """One group (client, source, domain) per client; groups are divided, or joined, if numbers differ.

    Args:
        dataset: The samples.
        clients: How many there are.
        seed: Of the assignment.
    """
    rng, splits = generator(seed), (dataset.train, dataset.test)
    present = np.unique(group_of(dataset, dataset.train))
    train: list[list[Indices]] = [[] for _ in range(clients)]
    test: list[list[Indices]] = [[] for _ in range(clients)]
    notes, untested = list[str](), list[str]()
    if clients < len(present):
        notes.append(
            f"{len(present)} groups are joined to {clients} clients; leave out the number of clients for one "
            "each"
        )
    if clients == 1:
        notes.append("there is one client, so nothing is federated")
    if untrained := np.setdiff1d(group_of(dataset, dataset.test), present).tolist():
        names = listed([f'"{dataset.groups[group]}"' for group in untrained], MOST_SHOWN)
        notes.append(f"groups with test samples and no train sample are left out: {names}")
    for position, group in enumerate(present):
        members = range(position % clients, clients, len(present))  # may have other groups too
        pools = [np.flatnonzero(group_of(dataset, split) == group) for split in splits]
        name = dataset.groups[group]
        if len(pools[0]) < len(members):
            problem = f'group "{name}" has {len(pools[0])} train samples for {len(members)} clients'
            raise DataError(f"{problem}; use fewer clients")
        if not len(pools[1]):
            untested.append(f'"{name}"')
        elif len(pools[1]) < len(members):
            notes.append(f'test: {len(pools[1])} samples of group "{name}" serve {len(members)} client(s)')
        for parts, pool in zip((train, test), pools, strict=True):
            for client, part in zip(members, equal_parts(rng, pool, len(members)), strict=True):
                parts[client].append(part)
    if len(untested) == len(present):
        raise DataError("no group has a test sample; give some, or use another partition, such as iid")
    if untested:
        names = listed(untested, MOST_SHOWN)
        notes.append(f"groups with train samples and no test sample train, and are not tested: {names}")
    return Assigned(_joined(train), _joined(test), notes)


@_scheme
def overlapping(
    dataset: Dataset, clients: int, seed: int, *, train_size: int = 20, test_size: int = 10
) -> Assigned:
    """Random samples for each client, drawn from all: for more clients than the data set has samples for.

    Clients have samples in common. Each sample is used about equally often.

    Args:
        dataset: The samples.
        clients: How many there are.
        seed: Of the assignment.
        train_size: Train samples of a client.
        test_size: Test samples of a client.
    """
    at_least(1, train_size=train_size, test_size=test_size)
    rng = generator(seed)
    sides = ((dataset.train, train_size, "train_size"), (dataset.test, test_size, "test_size"))
    train, test = (drawn(rng, len(split), clients, size, name) for split, size, name in sides)
    return Assigned(train, test, [f"{clients} clients share {len(dataset.train)} train samples"])


def _needs_classes(dataset: Dataset, scheme: str) -> None:
    if dataset.kind != CLASSIFICATION:
        others = ["iid", "quantity", *(["by_group"] if dataset.groups else [])]
        choices = " or ".join(how_to_set("partition.name", other, "--partition") for other in others)
        raise DataError(
            f'the partition "{scheme}" assigns classes, but the targets of "{dataset.name}" are of the kind '
            f"{dataset.kind}; use {choices}"
        )


def _test_note(dataset: Dataset, clients: int) -> list[str]:
    few = clients > len(dataset.test)
    return [f"test: {clients} clients share {len(dataset.test)} samples"] if few else []


def _joined(parts: Sequence[Sequence[Indices]]) -> list[Indices]:
    return [np.concatenate([np.empty(0, np.int64), *pieces]) for pieces in parts]


def _fill_slots(
    rng: np.random.Generator, dataset: Dataset, side: str, slots: Indices, group: Indices | None, size: int
) -> tuple[list[Indices], list[str]]:
    """Each client's samples of its classes (in its group), ``size`` per class or all there are; and notes."""
    split = dataset.train if side == "train" else dataset.test
    client, label = np.repeat(np.argwhere(slots), slots[slots > 0], axis=0).T  # of each slot
    groups, sample_key, slot_key, kind = 1, split.y, label, "classes"
    if group is not None:
        groups, kind = len(dataset.groups), "classes of a group"
        sample_key, slot_key = split.y * groups + group_of(dataset, split), label * groups + group[client]
    count = slots.shape[1] * groups
    pools, slots_of = shuffled_by(rng, sample_key, count), shuffled_by(rng, slot_key, count)
    parts: list[list[Indices]] = [[] for _ in slots]
    short, shared = [], 0
    for key, (pool, members) in enumerate(zip(pools, slots_of, strict=True)):
        if not len(members):
            continue
        available = len(pool) // len(members)
        common = side == "test" and available < size
        drawn = min(size, len(pool) if common else available)
        shared += common and len(members) > 1
        if drawn < size:
            short.append((drawn, len(pool), len(members), key))
        for rank, slot in enumerate(members):
            start = 0 if common else rank * drawn
            parts[client[slot]].append(pool[start : start + drawn])
    notes = []
    if shared:
        # The words are part of the fingerprint of a partition, and so of stored runs.
        notes = [f"test: {shared} {kind} have too few samples for parts of their own; clients share them"]
    if short:
        drawn, available, many, key = min(short)
        what = f'class "{dataset.classes[key // groups]}"'
        if group is not None:
            problem = f'{available} {side} samples of {what} in group "{dataset.groups[key % groups]}"'
            remedy = f"lower {side}_per_class to {drawn}" if drawn else "use fewer clients"
            raise DataError(f"{problem} are too few for {many} client(s) with {size} each; {remedy}")
        few = f"{len(short)} {kind} have fewer than {size} samples per client"
        notes.append(f"{side}: {few}, {what} only {drawn}")
    return _joined(parts), notes
