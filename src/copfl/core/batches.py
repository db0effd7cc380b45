"""The batches of a local update and their augmentation: functions of the seed, the round and the client."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.random import CHOICE, FLIP, MODEL, ORDER, SHIFT_ACROSS, SHIFT_DOWN, hashed
from copfl.core.task import Batch, Data, Plan

NO_ROUND = 10**9  # of the choice of new clients: runs have fewer rounds


def choose(seed: int, round: int, clients: int, count: int) -> NDArray[np.int64]:
    """The clients that take part in this round, sorted: `count` of them, each set equally likely."""
    if count >= clients:
        return np.arange(clients)
    keys = hashed(seed, CHOICE, round, np.arange(clients, dtype=np.uint64))
    return np.sort(np.argpartition(keys, count)[:count]).astype(np.int64)


def split_new(seed: int, clients: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The clients that train, and those that are kept out as new ones: one at least, if a fraction is."""
    count = min(clients - 1, max(1, round(fraction * clients))) if fraction else 0
    new = choose(seed, NO_ROUND, clients, count)
    return np.setdiff1d(np.arange(clients), new), new


def participants(clients: int, participation: float) -> int:
    """The number of clients in each round, where a fraction of them takes part."""
    return max(1, math.ceil(participation * clients - 1e-9))


def plan(
    seed: int,
    round: int,
    ids: Sequence[int] | NDArray[np.int64],
    sizes: Sequence[int] | NDArray[np.int64],
    *,
    batch: int,
    epochs: int,
    augment: bool = False,
    random: bool = True,
    device: torch.device | str = "cpu",
    limits: tuple[int, int] | None = None,
    even: bool = False,
) -> Plan:
    """The batches of these clients in this round, a row per client; every epoch is a shuffle of all samples.

    The last batch of an epoch may be smaller; with `even`, all of a client's batches have the same size but for one
    sample. Where the clients' sizes differ, `valid` marks the client's own
    samples; a step without a valid sample changes nothing for the client. With `random`, each step has a key
    for the random numbers inside the model; without one it draws none. `limits` are the smallest and the
    largest size, where other clients than these train in the same batch.
    """
    client = np.asarray(ids, np.uint64)[:, None, None]  # [N, 1, 1]
    size = np.asarray(sizes, np.int64)
    smallest, largest = limits or (int(size.min()), int(size.max()))
    epoch = np.arange(epochs, dtype=np.uint64)[None, :, None]
    position = np.arange(largest)
    keys = hashed(seed, ORDER, round, client, epoch, position.astype(np.uint64))  # [N, epochs, largest]
    padding = np.broadcast_to(position >= size[:, None, None], keys.shape)
    order = np.argsort(np.where(padding, np.uint64(2**64 - 1), keys), axis=2, kind="stable")
    shifts = flips = None
    if augment:  # by sample and not by position, so that it does not matter when in the epoch a sample comes
        sample = order.astype(np.uint64)
        down, across, flip = (
            hashed(seed, stream, round, client, epoch, sample) for stream in (SHIFT_DOWN, SHIFT_ACROSS, FLIP)
        )
        shifts = np.stack([down % np.uint64(9), across % np.uint64(9)], -1).astype(np.int64)
        flips = (flip & np.uint64(1)).astype(bool)

    step_number = np.arange(-(-largest // batch), dtype=np.uint64)
    step_keys = hashed(seed, MODEL, round, client, epoch, step_number).astype(np.int64) if random else None

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    def step(epoch: int, start: int) -> Batch:
        end = min(start + batch, largest)
        chosen = (slice(None), epoch, slice(start, end))
        valid = position[None, start:end] < size[:, None] if smallest < end else None
        return Batch(
            index=tensor(order[chosen] if valid is None else np.where(valid, order[chosen], 0)),
            valid=None if valid is None else tensor(valid),
            shift=None if shifts is None else tensor(shifts[chosen]),
            flip=None if flips is None else tensor(flips[chosen]),
            key=None if step_keys is None else tensor(step_keys[:, epoch, start // batch]),
        )

    def even_step(epoch: int, number: int) -> Batch:
        place = np.minimum(ends[:, number, None] + np.arange(width), largest - 1)
        inside = np.arange(width) < (ends[:, number + 1] - ends[:, number])[:, None]

        def rows(array: NDArray[np.generic]) -> Tensor:
            return tensor(array[np.arange(len(size))[:, None], epoch, place])

        return Batch(
            index=torch.where(tensor(inside), rows(order), 0),
            valid=None if limits is None and inside.all() else tensor(inside),
            shift=None if shifts is None else rows(shifts),
            flip=None if flips is None else rows(flips),
            key=None if step_keys is None else tensor(step_keys[:, epoch, number]),
        )

    if even:
        ends = even_ends(size, batch, len(step_number))
        width = min(batch, largest) if limits is not None else int(np.diff(ends, axis=1).max())
        return tuple(tuple(even_step(n, k) for k in range(len(step_number))) for n in range(epochs))
    return tuple(tuple(step(n, start) for start in range(0, largest, batch)) for n in range(epochs))


def even_ends(sizes: NDArray[np.int64], batch: int, steps: int) -> NDArray[np.int64]:
    """[clients, steps + 1]: where each client's batches end, in as many as have at most `batch` samples.

    Args:
        sizes: How many samples each has.
        batch: Of a step, at most.
        steps: Of the client with the most.
    """
    own = np.maximum(-(-sizes // batch), 1)[:, None]
    return np.asarray(np.minimum(np.arange(steps + 1), own) * sizes[:, None] // own)


def plan_of_steps(
    seed: int,
    ids: Sequence[int] | NDArray[np.int64],
    sizes: Sequence[int] | NDArray[np.int64],
    done: Sequence[int] | NDArray[np.int64],
    *,
    batch: int,
    epochs: int,
    steps: int,
    augment: bool = False,
    random: bool = True,
    device: torch.device | str = "cpu",
    limits: tuple[int, int] | None = None,
) -> Plan:
    """`plan` with so many steps of each client in place of an epoch, whatever the client's size.

    A client's pass over its samples goes on where its last step ended, over epochs and rounds, and every pass is
    a new shuffle. Where a local update is whole passes, and everybody takes part in every round, these are the
    batches of `plan` with as many epochs: a pass is hashed with the update in which it begins, and its number in
    it.

    Args:
        seed: Of the run.
        ids: The clients.
        sizes: How many samples each has.
        done: The steps that each has made in its earlier local updates.
        batch: Samples of a step; the last one of a pass may have fewer.
        epochs: Of a local update.
        steps: In place of each epoch.
        augment: Whether samples are shifted and flipped.
        random: Whether each step has a key for random numbers inside the model.
        device: Where the batches are.
        limits: The smallest and the largest size, where other clients than these train in the same batch.
    """
    smallest, largest = limits or (int(np.min(sizes)), int(np.max(sizes)))
    width, count = min(batch, largest), epochs * steps
    has_whole_batches = smallest == largest and largest % width == 0
    shape = len(ids), count, width
    index, valid = np.zeros(shape, np.int64), np.zeros(shape, bool)
    shifts = np.zeros((*shape, 2), np.int64) if augment else None
    flips = np.zeros(shape, bool) if augment else None
    keys = np.zeros(shape[:2], np.int64) if random else None
    for n, (client, size, before) in enumerate(zip(ids, sizes, done, strict=True)):
        some = max(1, int(size))
        length = -(-some // batch)  # steps of a pass
        passes, within = np.divmod(int(before) + np.arange(count), length)
        update = passes * length // count  # in which the pass begins
        number = passes - -(-update * count // length)  # of the pass, among those that begin in this update
        first, rows = np.unique(passes, return_index=True)[1], passes - passes[0]
        counters = (
            update[first].astype(np.uint64)[:, None],
            int(client),
            number[first].astype(np.uint64)[:, None],
        )
        order = np.argsort(hashed(seed, ORDER, *counters, np.arange(some, dtype=np.uint64)), 1, kind="stable")
        position = within[:, None] * batch + np.arange(width)  # [steps, width]
        valid[n] = position < size
        chosen = rows[:, None], np.minimum(position, some - 1)
        index[n] = np.where(valid[n], order[chosen], 0)
        if shifts is not None and flips is not None:
            down, across, flip = (
                hashed(seed, stream, *counters, order.astype(np.uint64))[chosen]
                for stream in (SHIFT_DOWN, SHIFT_ACROSS, FLIP)
            )
            shifts[n] = np.stack([down % np.uint64(9), across % np.uint64(9)], -1).astype(np.int64)
            flips[n] = (flip & np.uint64(1)).astype(bool)
        if keys is not None:
            counters = update.astype(np.uint64), int(client), number.astype(np.uint64)
            keys[n] = hashed(seed, MODEL, *counters, within.astype(np.uint64)).astype(np.int64)

    def tensor(array: NDArray[np.generic] | None, step: int) -> Tensor | None:
        if array is None:
            return None
        return torch.from_numpy(np.ascontiguousarray(array[:, step])).to(device, non_blocking=True)

    def batch_of(step: int) -> Batch:
        chosen = tensor(index, step)
        assert chosen is not None
        mask = None if has_whole_batches else valid
        return Batch(chosen, *(tensor(array, step) for array in (mask, shifts, flips, keys)))

    return tuple(tuple(batch_of(start + n) for n in range(steps)) for start in range(0, count, steps))


def visited(plan: Plan) -> Tensor:
    """The samples that a client visits in its local update, each as often as it does."""
    batches = [batch for epoch in plan for batch in epoch]
    counts = [
        torch.full_like(batch.index[0], len(batch.index)) if batch.valid is None else batch.valid.sum()
        for batch in batches
    ]
    return torch.stack(counts).sum()


def training_split(plan: Plan, every: int = 5, fold: Tensor | None = None) -> Plan:
    """The plan without the samples of `validation_split`; fold -1 leaves none out."""
    left_out: Tensor | int = every - 1 if fold is None else fold

    def shorter(batch: Batch) -> Batch:
        trained = batch.index % every != left_out
        return batch._replace(valid=trained if batch.valid is None else batch.valid & trained)

    return tuple(tuple(shorter(batch) for batch in epoch) for epoch in plan)


def validation_split(data: Data, every: int = 5, fold: Tensor | None = None) -> Data:
    """One of `every` folds of the client's samples, index % every == fold; by default the last."""
    if fold is None:
        x, y = tree.each(lambda t: t[every - 1 :: every], (data.x, data.y))
        return Data(x, y, data.size // every)
    rows = torch.arange(-(-data.y.shape[0] // every), device=data.y.device) * every + fold
    place = rows.clamp(max=data.y.shape[0] - 1)
    x, y = tree.each(lambda t: t[place], (data.x, data.y))
    return Data(x, y, (rows < data.size).sum())
