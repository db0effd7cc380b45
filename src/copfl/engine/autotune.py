"""A short measurement that chooses the engine, its kernels and the number of processes for this machine.

The choice changes speed and rounding, nothing else. It is written to run.toml, so that a resumed or repeated
run makes the same one.
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
from copfl.engine.mapping import Chunk, Mapping, run_chunk

MEASURED_FROM = 60.0  # seconds: a shorter run is not measured
GAIN = 1.25  # the factor by which another choice must be faster, so that noise does not decide
MAX_CHUNK = 64  # clients batched on a CPU, at most
MEMORY = 4e9  # bytes that they may take
LONG = 0.5  # seconds: a longer measurement is not repeated
PARALLEL_FROM = 30.0  # seconds: a shorter run would spend on starting processes what they save
SHARED = Path("/dev/shm")  # where Linux has the memory that processes share


class Choice(NamedTuple):
    engine: Mapping
    mkldnn: bool


def chunk_of(task: Task, participants: int) -> int:
    """The clients in a chunk on a CPU, so that the chunks of a round are equal and use all processors."""
    workers = min(processors(), 8)
    fit = int(MEMORY / (50 * 4 * task.layout.size))  # some fifty vectors a client
    parts = math.ceil(participants / max(1, min(MAX_CHUNK, fit)))
    if participants >= 8 * workers:  # with fewer, a chunk would be too small to be fast
        parts = math.ceil(parts / workers) * workers
    return math.ceil(participants / parts)


def choose(
    algorithm: AnyAlgorithm,
    task: Task,
    federation: Federation,
    choices: Sequence[Choice],
    *,
    batch: int,
    local_updates: int,
) -> Choice:
    """The first choice, unless a run of this many local updates is long and another is clearly faster."""
    best, *others = choices
    if not others:
        return best
    enough = MEASURED_FROM * GAIN / local_updates
    fastest = seconds(algorithm, task, federation, best, batch, enough=enough) / GAIN
    if fastest * local_updates < MEASURED_FROM:
        return best
    for other in others:
        measured = seconds(algorithm, task, federation, other, batch, limit=fastest)
        if measured < fastest:
            best, fastest = other, measured
    return best


def processors() -> int:
    """The number of processors that this process may use."""
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
    """The number of worker processes: one for each processor if the run is long, else one.

    `states` is the number of clients' records in memory, which processes must then share. Results do not
    depend on the number of processes.
    """
    most = min(processors(), math.ceil(participants / choice.engine.chunk))
    local_updates = participants * rounds
    if most < 2:
        return 1
    record = sum(t.nbytes for t in tree.leaves(algorithm.client_init(task)))
    if not _can_share(states * record + 8 * most * task.initial.nbytes) or not _can_pickle((algorithm, task)):
        return 1
    enough = PARALLEL_FROM / local_updates
    measured = seconds(algorithm, task, federation, choice, batch, enough=enough)
    return most if measured * local_updates > PARALLEL_FROM else 1


def _can_share(size: int) -> bool:
    """Whether processes can share this many bytes; a container may have little space for that."""
    if not SHARED.is_dir():
        return True
    space = os.statvfs(SHARED)
    return space.f_bavail * space.f_frsize > 1.5 * size


def _can_pickle(value: object) -> bool:
    """Whether the value can be sent to another process; a model that was defined in a console cannot."""
    try:
        pickle.dumps(value)
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
    """The processor seconds of a client's local update: the better of two measurements.

    The first decides if it is far beyond the limit, or below `enough`. One step per epoch is timed and
    multiplied by the number of steps: a slow choice would otherwise take a minute.
    """
    engine = choice.engine
    part = np.arange(min(engine.chunk, federation.clients))
    task = task.with_batching() if engine.name != "sequential" else task
    sizes, augment = federation.train.sizes[part], federation.dataset.augment
    batches = plan(0, 0, part, sizes, batch=batch, epochs=algorithm.total_epochs, augment=augment)
    steps = max(map(len, batches))
    chunk = Chunk(
        server=algorithm.server_init(task, federation.clients),
        ids=torch.from_numpy(part),
        clients=tree.repeat(algorithm.client_init(task), len(part)),
        data=federation.train.rows(part),
        test=federation.test.rows(part),
        plan=tuple(epoch[:1] for epoch in batches),
    )
    best = math.inf
    before = mkldnn_enabled()
    set_mkldnn(choice.mkldnn)
    try:
        with torch.random.fork_rng([]):
            for _ in range(2):
                # The processor's time, which the load of other programs does not change.
                start = time.process_time()
                run_chunk(algorithm, task, engine, chunk, ())
                best = min(best, (time.process_time() - start) * steps / len(part))
                if best < enough or best > 3 * limit or best * len(part) / steps > LONG:
                    break
    finally:
        set_mkldnn(before)
    return best


def keep_freed_memory() -> None:
    """Has the C library, where it is glibc, keep freed memory for the next tensor.

    Large blocks otherwise go back to the system at once, and with a large model on a CPU fresh pages take as
    long as the computation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):
            mallopt(option, value)


def mkldnn_enabled() -> bool:
    """Whether this process uses mkldnn's kernels."""
    return bool(torch.backends.mkldnn.enabled)


def set_mkldnn(enabled: bool) -> None:
    """Switches mkldnn's kernels on or off for this process, where torch has them."""
    enabled = enabled and bool(torch._C._has_mkldnn)
    setattr(torch.backends.mkldnn, "enabled", enabled)  # noqa: B010 - a property of a module, unknown to mypy
