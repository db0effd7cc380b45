"""What suits this machine, found by a short measurement: which engine, with which kernels, in how many processes.

The choice changes speed and float noise, nothing else, and is written to run.toml, so that a run that is resumed or
done again makes the same one.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.batches import plan
from copfl.core.task import Task
from copfl.data.federation import Federation
from copfl.engine.mapping import Chunk, Mapping, together

WORTH = 60.0  # seconds: a run that is over sooner is not worth a measurement
GAIN = 1.25  # what another way must win by, so that noise does not decide
TOGETHER = 64  # clients side by side on a CPU, at most
MEMORY = 4e9  # bytes that they may take
LONG = 0.5  # seconds: what takes longer is measured once
PAYS = 30.0  # seconds: in a run that is over sooner, what processes save is spent on starting them
SHARED = Path("/dev/shm")  # where Linux keeps the memory that processes share


class Choice(NamedTuple):
    engine: Mapping
    mkldnn: bool


def chunk_of(task: Task, participants: int) -> int:
    """How many clients go together on a CPU, so that the parts of a round are equal and busy all processors."""
    many = min(processors(), 8)
    fit = int(MEMORY / (50 * 4 * task.layout.size))  # some fifty vectors a client
    parts = math.ceil(participants / max(1, min(TOGETHER, fit)))
    if participants >= 8 * many:  # with fewer, a part would be too small to be quick
        parts = math.ceil(parts / many) * many
    return math.ceil(participants / parts)


def choose(
    algorithm: AnyAlgorithm,
    task: Task,
    federation: Federation,
    ways: Sequence[Choice],
    *,
    batch: int,
    turns: int,
) -> Choice:
    """The first of these ways, unless the run, of so many turns, is long and another way is clearly quicker."""
    usual, *others = ways
    best, quickest = usual, math.inf
    if others:
        quickest = seconds(algorithm, task, federation, usual, batch, enough=WORTH * GAIN / turns) / GAIN
    if not others or quickest * turns < WORTH:
        return usual
    for other in others:
        found = seconds(algorithm, task, federation, other, batch, limit=quickest)
        if found < quickest:
            best, quickest = other, found
    return best


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes(
    algorithm: AnyAlgorithm,
    task: Task,
    federation: Federation,
    choice: Choice,
    *,
    batch: int,
    participants: int,
    rounds: int,
    states: int,
) -> int:
    """In how many processes the clients are trained: one for each processor if the run is long, else one.

    `states` is how many clients' records are held in memory, which processes must then share. Results do not depend on
    the number of processes.
    """
    most, turns = min(processors(), math.ceil(participants / choice.engine.chunk)), participants * rounds
    if most < 2:
        return 1
    record = sum(t.nbytes for t in tree.leaves(algorithm.client_init(task)))
    if not _room(states * record + 8 * most * task.initial.nbytes) or not _sendable((algorithm, task)):
        return 1
    return (
        most if seconds(algorithm, task, federation, choice, batch, enough=PAYS / turns) * turns > PAYS else 1
    )


def _room(size: int) -> bool:
    """Whether processes can share so many bytes; a container may have little space for that."""
    if not SHARED.is_dir():
        return True
    space = os.statvfs(SHARED)
    return space.f_bavail * space.f_frsize > 1.5 * size


def _sendable(what: object) -> bool:
    """Whether another process can be sent this; a model that was made in a console cannot."""
    try:
        pickle.dumps(what)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def seconds(
    algorithm: AnyAlgorithm,
    task: Task,
    federation: Federation,
    choice: Choice,
    batch: int,
    limit: float = math.inf,
    enough: float = 0.0,
) -> float:
    """The processor's seconds for one client's turn: the better of two measurements, or the first where that decides.

    That is where it is far beyond the limit, or below what is enough: a second one could only find less. What is timed
    is a turn of one step a pass, times the steps: a way that is hopeless would else take a minute to say so.
    """
    engine = choice.engine
    part = np.arange(min(engine.chunk, federation.clients))
    task = task.with_batching() if engine.name != "sequential" else task
    ids = torch.from_numpy(part)
    sizes, augment = federation.train.sizes[part], federation.dataset.augment
    order = plan(0, 0, part, sizes, batch=batch, epochs=algorithm.total_epochs, augment=augment)
    steps = max(map(len, order))
    chunk = Chunk(
        server=algorithm.server_init(task, federation.clients),
        ids=ids,
        clients=tree.repeat(algorithm.client_init(task), len(part)),
        data=federation.train.rows(part),
        test=federation.test.rows(part),
        plan=tuple(one[:1] for one in order),
    )
    best = math.inf
    before = mkldnn_enabled()
    set_mkldnn(choice.mkldnn)
    try:
        with torch.random.fork_rng([]):
            for _ in range(2):
                # The processor's time and not the clock's, which other programs' load would blur.
                start = time.process_time()
                together(algorithm, task, engine, chunk, look=())
                best = min(best, (time.process_time() - start) * steps / len(part))
                if best < enough or best > 3 * limit or best * len(part) / steps > LONG:
                    break
    finally:
        set_mkldnn(before)
    return best


def keep_freed_memory() -> None:
    """Has the C library keep what is freed for the next tensor, where it is glibc.

    Large blocks otherwise go back to the system at once, and with a large model on a CPU, fresh pages take as long as
    what is done with them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        for option, value in (
            (-4, 0),
            (-1, 2**31 - 1),
            (-2, 2**26),
        ):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(option, value)


def mkldnn_enabled() -> bool:
    """Whether this process uses mkldnn's kernels."""
    return bool(torch.backends.mkldnn.enabled)


def set_mkldnn(enabled: bool) -> None:
    """Switches mkldnn's kernels on or off for this process, where torch has them."""
    enabled = enabled and bool(torch._C._has_mkldnn)
    setattr(torch.backends.mkldnn, "enabled", enabled)  # noqa: B010 - a property of a module, unknown to mypy
