"""Indices divided at random: into equal parts, in proportions, by class.

The schemes draw with it.
"""

import numpy as np
from numpy.typing import NDArray

from copfl.data.clients.partition import Indices
from copfl.errors import UsageError


def drawn(rng: np.random.Generator, available: int, clients: int, size: int, name: str) -> list[Indices]:
    """For each client `size` distinct samples, from as many permutations of all as that takes.

    Args:
        rng: Draws.
        available: Samples that there are.
        clients: How many there are.
        size: Samples of each client.
        name: Of the setting, for the error.
    """
    if size > available:
        raise UsageError(f"{name}={size} must be at most {available}, the samples that there are")
    each = available // size
    times = range(-(-clients // each))
    whole = [rng.permutation(available)[: each * size].reshape(each, size) for _ in times]
    return list(np.concatenate(whole)[:clients])


def log_gamma(rng: np.random.Generator, alpha: float, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Logarithms of Gamma(alpha) draws, whose proportions are Dirichlet's.

    Args:
        rng: Draws.
        alpha: The parameter of the distribution.
        shape: Of the result.
    """
    # Gamma(a) is Gamma(a + 1) times U^(1/a). The logarithm is finite at a = 1e-6, where a plain draw is 0.
    drawn = np.log(rng.standard_gamma(alpha + 1, shape)) + np.log(1 - rng.random(shape)) / alpha
    return np.asarray(drawn, np.float64)


def shuffled_by(rng: np.random.Generator, key: Indices, count: int) -> list[Indices]:
    """For each key 0..count-1 its positions, in random order.

    Args:
        rng: Draws.
        key: Of each sample, such as its class.
        count: The number of keys.
    """
    shuffled = rng.permutation(len(key))
    order = shuffled[np.argsort(key[shuffled], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(key, minlength=count))[:-1])


def equal_parts(rng: np.random.Generator, pool: Indices, parts: int) -> list[Indices]:
    """Random parts of equal size; a pool with fewer samples than parts is used several times.

    Args:
        rng: Draws.
        pool: What is divided.
        parts: How many.
    """
    copies = max(1, -(-parts // max(len(pool), 1)))
    return np.array_split(rng.permutation(np.tile(pool, copies)), parts)


def class_slots(
    rng: np.random.Generator, clients: int, per_client: int, kinds: int, distinct: bool
) -> Indices:
    """The number of times each class is assigned to each client, [clients, classes].

    Args:
        rng: Draws.
        clients: How many there are.
        per_client: Classes of a client.
        kinds: Classes in all.
        distinct: Whether a client has no class twice.
    """
    rounds, rest = divmod(clients * per_client, kinds)
    labels = np.concatenate([np.tile(np.arange(kinds), rounds), rng.permutation(kinds)[:rest]])
    slots = np.zeros((clients, kinds), np.int64)
    np.add.at(slots, (np.repeat(np.arange(clients), per_client), rng.permutation(labels)), 1)
    # Each swap lowers the number of repeated classes, and a swap exists as long as there is one: no class has
    # more slots than there are clients, so some client lacks it and has a class that is new here or repeated.
    while distinct and len(repeated := np.argwhere(slots > 1)):
        for client, surplus in repeated:
            if slots[client, surplus] > 1:
                other = rng.choice(np.flatnonzero(slots[:, surplus] == 0))
                useful = (slots[other] > 1) | ((slots[other] > 0) & (slots[client] == 0))
                wanted = rng.choice(np.flatnonzero(useful))
                slots[[client, other], [surplus, wanted]] -= 1
                slots[[client, other], [wanted, surplus]] += 1
    return slots


def proportional(
    rng: np.random.Generator, y: Indices, log_weights: NDArray[np.float64], minimum: int
) -> list[Indices]:
    """Every sample assigned to one client: ``minimum`` each, then the rest in proportion to the weights.

    ``log_weights`` is [classes, clients]. The first samples are drawn in proportion to the client's weights,
    too, as far as possible. If there are fewer samples than the minimum takes, each is used several times.

    Args:
        rng: Draws.
        y: The class of each sample.
        log_weights: [classes, clients], a client's share of each class.
        minimum: Samples that each client has at least.
    """
    kinds, clients = log_weights.shape
    copies = max(1, -(-clients * minimum // len(y)))
    pools = [np.tile(pool, copies) for pool in shuffled_by(rng, y, kinds)]
    sizes = np.array([len(pool) for pool in pools])
    log_fraction = log_weights - log_weights.max(axis=1, keepdims=True)
    log_fraction -= np.log(np.exp(log_fraction).sum(axis=1, keepdims=True))  # of each class, for each client
    # The first samples: each client draws classes with its own probabilities, as long as samples are left.
    probability = log_fraction + np.log(np.maximum(sizes, 1e-300))[:, None]
    probability = np.exp(probability - probability.max(axis=0))
    cumulative = np.cumsum(probability / probability.sum(axis=0), axis=0)
    draws = rng.random((minimum, clients))
    wanted = (draws[None] > cumulative[:-1, None]).sum(axis=0).ravel()
    by_class = shuffled_by(rng, wanted, kinds)
    unmet = np.concatenate([positions[size:] for positions, size in zip(by_class, sizes, strict=True)])
    left = sizes - np.minimum(np.bincount(wanted, minlength=kinds), sizes)
    wanted[unmet] = rng.permutation(np.repeat(np.arange(kinds), left))[: len(unmet)]
    counts = np.bincount(wanted * clients + np.tile(np.arange(clients), minimum), minlength=kinds * clients)
    counts = counts.reshape(kinds, clients)
    for kind, rest in enumerate(sizes - counts.sum(axis=1)):
        order = rng.permutation(clients)  # or rounding would favour the same clients in every class
        cuts = np.minimum(np.rint(np.cumsum(np.exp(log_fraction[kind, order])) * rest), rest).astype(np.int64)
        cuts[-1] = rest
        counts[kind, order] += np.diff(cuts, prepend=0)
    owner = np.repeat(np.tile(np.arange(clients), kinds), counts.ravel())
    samples = np.concatenate(pools)[np.argsort(owner, kind="stable")]
    return np.split(samples, np.cumsum(counts.sum(axis=0))[:-1])
