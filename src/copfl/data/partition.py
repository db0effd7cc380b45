"""Schemes that split a data set among clients: by label, by source, or by chance.

    split = partition("classes", dataset, clients=10, seed=0, per_client=2)
    print(split.draw(dataset))

A scheme is a function of (dataset, clients, seed, keywords); its randomness comes from the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data.assignment import Indices, Partition, Table, count_by, group_count, name_of
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError, UsageError, unknown

__all__ = [
    "SCHEMES",
    "Partition",
    "Table",
    "by_group",
    "classes",
    "dirichlet",
    "hold_out",
    "iid",
    "partition",
]

STREAM = 0x70617274  # "part": keeps these draws apart from every other use of the same seed


def partition(scheme: str, dataset: Dataset, clients: int, seed: int, **keywords: Any) -> Partition:
    """The data set split by the named scheme."""
    if scheme not in SCHEMES:
        raise unknown("partition", scheme, SCHEMES)
    return SCHEMES[scheme](dataset, clients, seed, **keywords)


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
) -> Partition:
    """A few classes for each client, every class with as many clients as any other, give or take one.

    No train image is with two clients. Test images are not either where a class has enough of them; where it has
    not, all holders of the class are tested on the same ones. With ``group_per_client`` client n has images of
    group n mod G only.
    """
    rng = _begin(dataset, clients, seed)
    kinds = len(dataset.classes)
    if min(per_client, train_per_class, test_per_class) < 1:
        raise UsageError("per_client, train_per_class and test_per_class are at least 1")
    if distinct and per_client > kinds:
        raise UsageError(
            f'per_client is at most {kinds}, the number of classes of "{dataset.name}"; got {per_client}'
        )
    # Paper: follows FedSelect, whose deal may give a client the same class twice. We swap until nobody has that;
    # distinct=False restores it.
    held = _deal(rng, clients, per_client, kinds, distinct)
    of_client = None
    if group_per_client:
        present = np.unique(_groups(dataset, dataset.train))
        of_client = present[np.arange(clients) % len(present)]
    train, train_notes = _cut(rng, dataset, "train", held, of_client, train_per_class)
    test, test_notes = _cut(rng, dataset, "test", held, of_client, test_per_class)
    keywords = {"seed": int(seed), "per_client": per_client, "train_per_class": train_per_class}
    keywords |= {"test_per_class": test_per_class, "distinct": distinct, "group_per_client": group_per_client}
    return _finish(train, test, "classes", keywords, train_notes + test_notes)


def dirichlet(
    dataset: Dataset,
    clients: int,
    seed: int,
    *,
    concentration: float = 0.3,
    minimum: int = 2,
    test: str = "same",
) -> Partition:
    """Every class spread over the clients in Dirichlet proportions, nobody below ``minimum`` train samples.

    ``test``: "same" follows the client's own train labels, "iid" is an even share of the test split.
    """
    rng = _begin(dataset, clients, seed)
    if not (math.isfinite(concentration) and concentration >= 1e-100):  # below, the logarithms overflow
        raise UsageError(f"concentration is a number above 0 (from 1e-100 on); got {concentration}")
    if minimum < 1:
        raise UsageError(f"minimum is at least 1; got {minimum}")
    if test not in ("same", "iid"):
        raise unknown("test part", test, ("same", "iid"))
    _enough(dataset, clients, minimum)
    shape = (len(dataset.classes), clients)
    # A Gamma(a) variate is a Gamma(a+1) one times U^(1/a): in logarithms it survives a = 1e-6, where the plain is 0.
    weights = (
        np.log(rng.standard_gamma(concentration + 1, shape)) + np.log(1 - rng.random(shape)) / concentration
    )
    train = _spread(rng, dataset.train.y, weights, minimum)
    if test == "same":
        own = count_by(train, dataset.train.y, len(dataset.classes)).T
        usable = np.flatnonzero(
            (own.sum(axis=1) > 0)[dataset.test.y]
        )  # nobody is tested on a class that nobody trains on
        if not len(usable):
            raise DataError(
                f'"{dataset.name}" has no test samples of its train classes; test="iid" ignores classes'
            )
        spread = _spread(rng, dataset.test.y[usable], np.log(np.maximum(own, 1e-300)), 1)
        tests = [usable[part] for part in spread]
    else:
        tests = _evenly(rng, np.arange(len(dataset.test)), clients)
    keywords = {"seed": int(seed), "concentration": concentration, "minimum": minimum, "test": test}
    return _finish(train, tests, "dirichlet", keywords, _shared_note(dataset, clients))


def iid(dataset: Dataset, clients: int, seed: int) -> Partition:
    """Equal random shares, give or take one sample."""
    rng = _begin(dataset, clients, seed)
    _enough(dataset, clients, 1)
    train, test = (_evenly(rng, np.arange(len(split)), clients) for split in (dataset.train, dataset.test))
    return _finish(train, test, "iid", {"seed": int(seed)}, _shared_note(dataset, clients))


def by_group(dataset: Dataset, clients: int, seed: int) -> Partition:
    """One group (source, domain, corruption) for each client; groups are shared out, or joined, to come out even."""
    rng = _begin(dataset, clients, seed)
    train_group, test_group = _groups(dataset, dataset.train), _groups(dataset, dataset.test)
    present = np.unique(train_group)
    train: list[list[Indices]] = [[] for _ in range(clients)]
    test: list[list[Indices]] = [[] for _ in range(clients)]
    notes: list[str] = []
    for position, group in enumerate(present):
        holders = range(
            position % clients, clients, len(present)
        )  # several, or one that has other groups as well
        ours, theirs = np.flatnonzero(train_group == group), np.flatnonzero(test_group == group)
        name, many = name_of(dataset.groups, group), len(holders)
        if len(ours) < many:
            raise DataError(
                f'group "{name}" has {len(ours)} train samples for {many} clients; use fewer clients'
            )
        if len(theirs) < many:
            notes.append(f'test: {len(theirs)} samples of group "{name}" serve {many} client(s)')
        for parts, pool in ((train, ours), (test, theirs)):
            for client, part in zip(holders, _evenly(rng, pool, many), strict=True):
                parts[client].append(part)
    return _finish(_joined(train), _joined(test), "by_group", {"seed": int(seed)}, notes)


SCHEMES: Mapping[str, Callable[..., Partition]] = {
    "classes": classes,
    "dirichlet": dirichlet,
    "iid": iid,
    "by_group": by_group,
}


def hold_out(partition: Partition, fraction: float, dataset: Dataset, seed: int) -> Partition:
    """A partition whose test part is cut from the train part: every class in proportion, rounded down or up.

    A client with two samples or more keeps one and gives one; a client with one sample keeps it.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"the fraction to hold out is between 0 and 1; got {fraction}")
    partition.check(dataset)
    rng = _generator(seed, 1)
    train, test = [], []
    for part in partition.train:
        size = len(part)
        give = max(1, min(round(fraction * size), size - 1)) if size > 1 else 0
        part = rng.permutation(part)
        part = part[np.argsort(dataset.train.y[part], kind="stable")]
        # Every (size/give)-th sample of the list in class order takes each class in proportion.
        chosen = np.zeros(size, bool)
        chosen[(np.arange(give) * size + rng.integers(size)) // max(give, 1)] = True
        train.append(np.sort(part[~chosen]))
        test.append(np.sort(part[chosen]))
    note = f"validation: {fraction} of each client's train samples, seed {seed}"
    return replace(
        partition, train=tuple(train), test=tuple(test), test_from="train", notes=(*partition.notes, note)
    )


# --- shuffling and dealing


def _generator(seed: int, *purpose: int) -> np.random.Generator:
    if seed < 0:
        raise UsageError(f"a seed is 0 or more; got {seed}")
    return np.random.default_rng([seed, STREAM, *purpose])


def _begin(dataset: Dataset, clients: int, seed: int) -> np.random.Generator:
    """The generator of a scheme, once what all schemes need is there."""
    if clients < 1:
        raise UsageError(f"there is at least 1 client; got {clients}")
    if not len(dataset.train) or not len(dataset.test):
        raise DataError(
            f'"{dataset.name}" has {len(dataset.train)} train and {len(dataset.test)} test samples'
        )
    return _generator(seed)


def _enough(dataset: Dataset, clients: int, minimum: int) -> None:
    have = len(dataset.train)
    if clients * minimum > have:
        raise DataError(
            f"{clients} clients with at least {minimum} train samples each need {clients * minimum}, but "
            f'"{dataset.name}" has {have}; use at most {have // minimum} clients'
        )


def _groups(dataset: Dataset, split: Samples) -> Indices:
    if split.group is None:
        raise DataError(f'"{dataset.name}" has no groups (sources, domains, corruptions); use another scheme')
    return split.group


def _buckets(rng: np.random.Generator, key: Indices, count: int) -> list[Indices]:
    """For each key 0..count-1 its positions, in random order."""
    shuffled = rng.permutation(len(key))
    order = shuffled[np.argsort(key[shuffled], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(key, minlength=count))[:-1])


def _evenly(rng: np.random.Generator, pool: Indices, parts: int) -> list[Indices]:
    """Equal shares of the pool; where it has fewer samples than there are shares, samples are in several."""
    copies = max(1, -(-parts // max(len(pool), 1)))
    return np.array_split(rng.permutation(np.tile(pool, copies)), parts)


def _joined(parts: Sequence[Sequence[Indices]]) -> list[Indices]:
    return [np.concatenate([np.empty(0, np.int64), *own]) for own in parts]


def _finish(
    train: Sequence[Indices],
    test: Sequence[Indices],
    scheme: str,
    keywords: Mapping[str, Any],
    notes: Sequence[str],
) -> Partition:
    """The partition: sorted, without duplicates, nobody untested."""
    ours, theirs = (tuple(np.unique(part).astype(np.int64) for part in parts) for parts in (train, test))
    made = Partition(ours, theirs, scheme, keywords, notes=tuple(notes))
    for client, part in enumerate(made.test):
        if not len(part):
            raise DataError(
                f"there are no test samples of what client {client} holds; use fewer clients or more data"
            )
    return made


def _shared_note(dataset: Dataset, clients: int) -> list[str]:
    few = clients > len(dataset.test)
    return [f"test: {clients} clients share {len(dataset.test)} samples"] if few else []


def _deal(rng: np.random.Generator, clients: int, per_client: int, kinds: int, distinct: bool) -> Indices:
    """How often each client was dealt each class, [clients, classes]."""
    rounds, rest = divmod(clients * per_client, kinds)
    cards = np.concatenate([np.tile(np.arange(kinds), rounds), rng.permutation(kinds)[:rest]])
    held = np.zeros((clients, kinds), np.int64)
    np.add.at(held, (np.repeat(np.arange(clients), per_client), rng.permutation(cards)), 1)
    # Each swap lowers the number of surplus cards, and one exists as long as there is surplus: no class has more cards
    # than there are clients, so somebody lacks it, and that one has a class which is new to us or surplus to them.
    while distinct and len(surplus := np.argwhere(held > 1)):
        for ours, giving in surplus:
            if held[ours, giving] > 1:
                theirs = rng.choice(np.flatnonzero(held[:, giving] == 0))
                useful = (held[theirs] > 1) | ((held[theirs] > 0) & (held[ours] == 0))
                taking = rng.choice(np.flatnonzero(useful))
                held[[ours, theirs], [giving, taking]] -= 1
                held[[ours, theirs], [taking, giving]] += 1
    return held


def _cut(
    rng: np.random.Generator, dataset: Dataset, side: str, held: Indices, of_client: Indices | None, size: int
) -> tuple[list[Indices], list[str]]:
    """Each client's samples of its classes (and group), ``size`` per class or what there is; and what to note."""
    split = dataset.train if side == "train" else dataset.test
    groups = 1 if of_client is None else group_count(dataset)
    client, label = np.repeat(np.argwhere(held), held[held > 0], axis=0).T  # of each slot
    sample_key = split.y if of_client is None else split.y * groups + _groups(dataset, split)
    slot_key = label if of_client is None else label * groups + of_client[client]
    count = held.shape[1] * groups
    parts: list[list[Indices]] = [[] for _ in held]
    short, shared = [], 0
    pools, slots = _buckets(rng, sample_key, count), _buckets(rng, slot_key, count)
    for key, (pool, holders) in enumerate(zip(pools, slots, strict=True)):
        if not len(holders):
            continue
        shard = len(pool) // len(holders)
        common = side == "test" and shard < size
        got = min(size, len(pool) if common else shard)
        shared += common and len(holders) > 1
        if got < size:
            short.append((got, len(pool), len(holders), key))
        for rank, slot in enumerate(holders):
            start = 0 if common else rank * got
            parts[client[slot]].append(pool[start : start + got])
    kind = "classes" if of_client is None else "classes of a group"
    notes = (
        [f"test: {shared} {kind} have too few samples for parts of their own; clients share them"]
        if shared
        else []
    )
    if short:
        got, have, many, key = min(short)
        what = f'class "{name_of(dataset.classes, key // groups)}"'
        if of_client is not None:
            what += f' in group "{name_of(dataset.groups, key % groups)}"'
            whom = f"{many} clients {size} each" if many > 1 else f"a client {size}"
            remedy = (
                f"lower {side}_per_class to {got} or use fewer clients"
                if got
                else "use fewer clients or groups"
            )
            raise DataError(f"{have} {side} samples of {what} do not give {whom}; {remedy}")
        notes.append(
            f"{side}: {len(short)} {kind} have fewer than {size} samples per client, {what} only {got}"
        )
    return _joined(parts), notes


def _spread(
    rng: np.random.Generator, y: Indices, weights: NDArray[np.float64], minimum: int
) -> list[Indices]:
    """Every sample with one client: first ``minimum`` for each, then the rest in proportion to exp(weights).

    ``weights`` is [classes, clients]. The first samples, too, are of the classes a client has most weight in, as far
    as they go round. Where samples are fewer than that takes, each is used several times.
    """
    kinds, clients = weights.shape
    copies = max(1, -(-clients * minimum // len(y)))
    pools = [np.tile(pool, copies) for pool in _buckets(rng, y, kinds)]
    sizes = np.array([len(pool) for pool in pools])
    share = weights - weights.max(axis=1, keepdims=True)
    share -= np.log(np.exp(share).sum(axis=1, keepdims=True))  # log of each client's share in a class
    liking = share + np.log(np.maximum(sizes, 1e-300))[:, None]
    liking = np.exp(liking - liking.max(axis=0))
    liking = np.cumsum(liking / liking.sum(axis=0), axis=0)
    draws = rng.random((minimum, clients))
    wish = sum((draws > liking[kind] for kind in range(kinds - 1)), np.zeros(draws.shape, np.int64)).ravel()
    refused = np.concatenate(
        [wanting[size:] for wanting, size in zip(_buckets(rng, wish, kinds), sizes, strict=True)]
    )
    left = sizes - np.minimum(np.bincount(wish, minlength=kinds), sizes)
    wish[refused] = rng.permutation(np.repeat(np.arange(kinds), left))[: len(refused)]
    counts = np.bincount(wish * clients + np.tile(np.arange(clients), minimum), minlength=kinds * clients)
    counts = counts.reshape(kinds, clients)
    for kind, rest in enumerate(sizes - counts.sum(axis=1)):
        order = rng.permutation(clients)  # or rounding would favour the same clients in every class
        cuts = np.minimum(np.rint(np.cumsum(np.exp(share[kind, order])) * rest), rest).astype(np.int64)
        cuts[-1] = rest
        counts[kind, order] += np.diff(cuts, prepend=0)
    owner = np.repeat(np.tile(np.arange(clients), kinds), counts.ravel())
    samples = np.concatenate(pools)[np.argsort(owner, kind="stable")]
    return np.split(samples, np.cumsum(counts.sum(axis=0))[:-1])
