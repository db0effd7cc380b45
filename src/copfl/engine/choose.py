"""What suits this machine, found by a short measurement: which engine, and whether with mkldnn's kernels.

The choice changes speed and float noise, nothing else, and is written to run.toml, so that a run that is resumed or
done again makes the same one.
"""

from __future__ import annotations

import math
import os
import time
from typing import NamedTuple

import numpy as np
import torch

from copfl import tree
from copfl.algorithms.algorithm import AnyAlgorithm
from copfl.data.federation import Federation
from copfl.data.plan import plan
from copfl.engine import mapping
from copfl.engine.mapping import Chunk, Mapping, together
from copfl.task import Task

WORTH = 60.0  # seconds: a run that is over sooner is not worth a measurement
GAIN = 1.25  # what another way must win by, so that noise does not decide
TOGETHER = 64  # clients side by side on a CPU


class Choice(NamedTuple):
    engine: Mapping
    mkldnn: bool


def even_chunk(participants: int, most: int = TOGETHER) -> int:
    """How many clients go together, so that the parts of a round are equal and busy all processors."""
    processors = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)
    parts = math.ceil(participants / most)
    if participants >= 8 * processors:  # fewer, and a part would be too small to be quick
        parts = math.ceil(parts / processors) * processors
    return math.ceil(participants / parts)


def choose(
    algorithm: AnyAlgorithm, task: Task, federation: Federation, *, batch: int, rounds: int, participants: int
) -> Choice:
    """The quickest of a few ways on a CPU; the one that suits the model's size unless another is clearly quicker."""
    together_ = mapping.all_at_once(even_chunk(participants))
    small = task.d < 1_000_000
    first, second = (together_, mapping.one_by_one()) if small else (mapping.one_by_one(), together_)
    usual = Choice(first, torch.backends.mkldnn.enabled)
    needed = seconds(algorithm, task, federation, usual, batch)
    if needed * participants * rounds < WORTH:
        return usual
    best, quickest = usual, needed / GAIN
    for other in (Choice(first, not usual.mkldnn), Choice(second, usual.mkldnn), Choice(second, not usual.mkldnn)):
        if not small and other.engine.chunk > 1 and not _fits(task, other.engine.chunk):
            continue
        found = seconds(algorithm, task, federation, other, batch, limit=quickest)
        if found < quickest:
            best, quickest = other, found
    return best


def _fits(task: Task, chunk: int) -> bool:
    """Whether so many clients' vectors, and what training needs beside them, are no burden for the memory."""
    return 50 * 4 * task.layout.size * chunk < 4e9


def seconds(
    algorithm: AnyAlgorithm,
    task: Task,
    federation: Federation,
    choice: Choice,
    batch: int,
    limit: float = math.inf,
) -> float:
    """The processor's seconds for one client's turn, the better of two measurements; one if it is far off the limit."""
    engine = choice.engine
    part = np.arange(min(engine.chunk, federation.clients))
    task = task.for_many() if engine.name != "one_by_one" else task
    ids = torch.from_numpy(part)
    sizes = federation.train.sizes[part]
    chunk = Chunk(
        server=algorithm.server_init(task, federation.clients),
        ids=ids,
        clients=tree.repeat(algorithm.client_init(task), len(part)),
        data=federation.train.rows(part),
        test=federation.test.rows(part),
        plan=plan(0, 0, part, sizes, batch=batch, passes=algorithm.passes, augment=federation.dataset.augment),
    )
    best = math.inf
    before = torch.backends.mkldnn.enabled
    set_mkldnn(choice.mkldnn)
    try:
        with torch.random.fork_rng([]):
            for _ in range(2):
                # The processor's time and not the clock's, which other programs' load would blur.
                start = time.process_time()
                together(algorithm, task, engine, chunk, look=False)
                best = min(best, (time.process_time() - start) / len(part))
                if best > 3 * limit:
                    break
    finally:
        set_mkldnn(before)
    return best


def set_mkldnn(enabled: bool) -> None:
    """Switches mkldnn's kernels on or off for this process."""
    torch.backends.mkldnn.set_flags(_enabled=enabled)
