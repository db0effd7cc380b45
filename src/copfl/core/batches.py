"""Which samples are in which step, and how they are augmented: a pure function of (seed, round, client).

The draws come from a counter-based hash (splitmix64) and not from a generator with a state: any client's plan can be
drawn alone, in any order, on any machine, and is the same in every engine and after every restart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core.task import Batch, Plan

Bits = NDArray[np.uint64]


def hashed(*counters: int | Bits) -> Bits:
    """64 well-mixed bits for every combination of the counters, which broadcast against each other."""
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # wrapping around is what the hash does
        for counter in counters:
            state = state ^ np.asarray(counter, np.uint64)
            state = state + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


# One stream per use, so that no two draws ever share their bits.
ORDER, SHIFT_DOWN, SHIFT_ACROSS, FLIP, CHOICE, MODEL, MALICIOUS, NOISE = range(8)


def choose(seed: int, round: int, clients: int, count: int) -> NDArray[np.int64]:
    """The clients that take part in this round, sorted: `count` of them, each set equally likely."""
    if count >= clients:
        return np.arange(clients)
    keys = hashed(seed, CHOICE, round, np.arange(clients, dtype=np.uint64))
    return np.sort(np.argpartition(keys, count)[:count]).astype(np.int64)


def plan(
    seed: int,
    round: int,
    ids: Sequence[int] | NDArray[np.int64],
    sizes: Sequence[int] | NDArray[np.int64],
    *,
    batch: int,
    epochs: int,
    augment: bool = False,
    device: torch.device | str = "cpu",
) -> Plan:
    """The batches of these clients in this round, a row per client: every pass visits every sample once, shuffled.

    The last batch of a pass is smaller when the samples run out. Where the clients' sizes differ, `real` marks what
    belongs to the client; a step in which a client has nothing left changes nothing for it.
    """
    who = np.asarray(ids, np.uint64)[:, None, None]  # [N, 1, 1]
    size = np.asarray(sizes, np.int64)
    largest = int(size.max())
    which = np.arange(epochs, dtype=np.uint64)[None, :, None]
    place = np.arange(largest, dtype=np.uint64)[None, None, :]
    keys = hashed(seed, ORDER, round, who, which, place)  # [N, passes, largest]
    outside = np.broadcast_to(np.arange(largest)[None, None, :] >= size[:, None, None], keys.shape)
    keys = np.where(outside, np.uint64(2**64 - 1), keys)
    order = np.argsort(keys, axis=2, kind="stable")
    equal = bool((size == largest).all())

    def tensor(array: NDArray[np.generic]) -> Tensor:
        result = torch.from_numpy(np.ascontiguousarray(array))
        return result.to(device, non_blocking=True)

    shifts = flips = None
    if augment:  # by sample and not by place, so that it does not matter where in the epoch a sample comes
        drawn = [
            hashed(seed, stream, round, who, which, order.astype(np.uint64))
            for stream in (SHIFT_DOWN, SHIFT_ACROSS, FLIP)
        ]
        shifts = np.stack([drawn[0] % np.uint64(9), drawn[1] % np.uint64(9)], -1).astype(np.int64)
        flips = (drawn[2] & np.uint64(1)).astype(bool)

    def step(which: int, start: int) -> Batch:
        part = (slice(None), which, slice(start, min(start + batch, largest)))
        belongs = None
        if not equal and bool((size < min(start + batch, largest)).any()):
            belongs = np.arange(largest)[None, start : start + batch] < size[:, None]
        index = order[part] if belongs is None else np.where(belongs, order[part], 0)
        return Batch(
            index=tensor(index),
            valid=None if belongs is None else tensor(belongs),
            shift=None if shifts is None else tensor(shifts[part]),
            flip=None if flips is None else tensor(flips[part]),
        )

    return tuple(tuple(step(which, start) for start in range(0, largest, batch)) for which in range(epochs))
