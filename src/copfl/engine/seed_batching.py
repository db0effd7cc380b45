"""Several simulations of one kind that go in step, their clients trained as one batch: seeds of one experiment.

Ten clients do not fill a GPU; thirty of three seeds nearly do, and what was compiled and recorded serves all three.
Each simulation keeps its own round loop, in a thread of its own, and knows nothing of the others: what it calls its
crew is a seat here, where it hands in its clients and waits until everybody has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from copfl.core import tree
from copfl.core.algorithm import EvalModels
from copfl.core.random import MODEL, hashed
from copfl.engine.mapping import Chunk, Done, abreast
from copfl.engine.simulate import Executor, Ids, Setting, State, chunk_of
from copfl.errors import UsageError

R = TypeVar("R")


def can(settings: Sequence[Setting]) -> bool:
    """Whether these simulations are of one kind, so that their clients fit in one batch."""
    kinds = {_kind(setting) for setting in settings}
    clients = sum(setting.federation.clients for setting in settings)
    return len(kinds) == 1 and clients <= settings[0].mapping.chunk


def _kind(setting: Setting) -> tuple[object, ...]:
    algorithm, task, federation, mapping, _, batch = setting
    shapes = [(t.shape, t.dtype) for split in (federation.train, federation.test) for t in (split.x, split.y)]
    sizes = federation.train.sizes.tobytes()  # on them hangs how many steps an epoch has
    return repr(algorithm), task.layout, tuple(shapes), sizes, mapping.name, batch, id(task.public)


def in_step(settings: Sequence[Setting], simulations: Sequence[Callable[[Executor], R]]) -> list[R]:
    """What each simulation returns when it is called with its crew; what goes wrong in one is raised here.

    They must have as many rounds as each other, and look when the others do. All clients are trained in the thread that
    calls this: the libraries of a GPU have handles for each thread, and none may be made while a program is recorded.
    """
    bundle = _Bundle(settings)
    results: list[Any] = [None] * len(simulations)
    problems: list[BaseException] = []

    def run(n: int) -> None:
        with bundle.moving:
            try:
                results[n] = simulations[n](_Seat(bundle, n))
            except _Stopped:
                pass  # another has said why
            except BaseException as problem:
                problems.append(problem)
                bundle.stopped = True
            finally:
                bundle.ended += 1
                bundle.moving.notify_all()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(simulations))]
    for thread in threads:
        thread.start()
    try:
        bundle.train()
    finally:
        with bundle.moving:
            bundle.stopped = True
            bundle.moving.notify_all()
        for thread in threads:
            thread.join()
    if problems:
        problem = problems[0]
        problems.clear()  # else error and frame hold each other, and what the frame has on a GPU
        raise problem
    return results


def _shapes(chunk: Chunk) -> tuple[object, ...]:
    return tuple(
        (t.shape[1:], t.dtype) for t in tree.leaves((chunk.clients, chunk.data, chunk.test, chunk.plan))
    )


class _Stopped(Exception):
    """The bundle goes no further."""


class _Bundle:
    """What the simulations hand in and get back. One of them moves at a time, or the trainer does."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.settings = settings
        self.moving = threading.Condition()
        self.chunks: dict[int, Chunk] = {}
        self.done: dict[int, Done] = {}
        self.calls: dict[int, tuple[int, EvalModels]] = {}  # the round, and which models a look tries
        self.ended = 0
        self.stopped = False

    def train(self) -> None:
        """Trains what the simulations hand in, round by round, until they have ended."""
        algorithm, _, _, mapping, *_ = self.settings[0]
        tasks = [setting.task for setting in self.settings]
        with self.moving:
            while True:
                self.moving.wait_for(lambda: self.stopped or len(self.chunks) + self.ended == len(tasks))
                if self.stopped or self.ended == len(tasks):
                    return
                if self.ended:
                    raise UsageError("simulations that go in step must have the same number of rounds")
                chunks = [self.chunks[n] for n in range(len(tasks))]
                if len({_shapes(chunk) for chunk in chunks}) > 1 or len(set(self.calls.values())) > 1:
                    raise UsageError(
                        "simulations that go in step must ask for the same rounds, looks and steps"
                    )
                ((round, look),) = set(self.calls.values())
                with torch.random.fork_rng([tasks[0].device] if tasks[0].device.type == "cuda" else []):
                    torch.manual_seed(int(hashed(self.settings[0].seed, MODEL, round)))
                    done = abreast(algorithm, tasks, mapping, chunks, look)
                self.done, self.chunks = dict(enumerate(done)), {}
                self.moving.notify_all()


class _Seat:
    """One simulation's place in a bundle."""

    def __init__(self, bundle: _Bundle, n: int) -> None:
        self.bundle, self.n = bundle, n

    def turns(self, state: State, parts: Sequence[Ids], look: EvalModels) -> Iterator[Done]:
        """What the turns of each part leave, in the order of the parts."""
        bundle, n = self.bundle, self.n
        for part in parts:
            chunk = chunk_of(bundle.settings[n], state.server, state.clients, state.round, part)
            bundle.chunks[n], bundle.calls[n] = chunk, (state.round, look)
            bundle.moving.notify_all()
            bundle.moving.wait_for(lambda: bundle.stopped or n in bundle.done)
            if n not in bundle.done:
                raise _Stopped
            done = bundle.done.pop(n)
            state.clients.put(chunk.ids, done.client)
            yield done._replace(client=None)
