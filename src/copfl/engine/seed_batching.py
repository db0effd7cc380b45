"""Several seeds or learning rates of one experiment, simulated at once: their clients train as one batch.

Ten clients do not fill a GPU; thirty of three seeds nearly do, and compiled and recorded programs serve all
three. Each simulation has its own round loop in its own thread. Its executor is a handle that submits the
clients and waits for the result of the common batch.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, rate_of, with_rate
from copfl.core.evaluation import EvalModels
from copfl.core.task import Task
from copfl.engine.mapping import (
    Chunk,
    ChunkResult,
    ClientInput,
    ClientResult,
    Mapping,
    inputs_of,
    local_update,
    total_of,
    with_healthy_records,
)
from copfl.engine.rounds import Ids, State
from copfl.engine.simulate import Executor, Simulation, Widths, chunk_input
from copfl.errors import UsageError

R = TypeVar("R")


def can_batch(simulations: Sequence[Simulation]) -> bool:
    """Whether these simulations have the same program, and their clients fit in one chunk of each.

    They may differ in the seed, in the learning rate, and in how many samples the clients have. On a GPU the
    chunks follow from the memory that was free when each was prepared, and may differ too.
    """
    programs = {_program(simulation) for simulation in simulations}
    clients = sum(simulation.federation.clients for simulation in simulations)
    fits = len(programs) == 1 and clients <= min(simulation.mapping.chunk for simulation in simulations)
    return fits and _same_frozen([simulation.task for simulation in simulations])


def _same_frozen(tasks: Sequence[Task]) -> bool:
    """Whether what is not trained has the same values: the batch has it once. Random layers may differ."""
    first, *others = [
        {name: t for name, t in task.module.state_dict().items() if name not in task.layout.names}
        for task in tasks
    ]
    return all(torch.equal(t, other[name]) for other in others for name, t in first.items())


def _program(simulation: Simulation) -> tuple[object, ...]:
    """All that determines the program of a round."""
    task, federation = simulation.task, simulation.federation
    shapes = tuple(
        (name, t.shape[1:], t.dtype)
        for split in federation.splits
        for name, t in tree.named((split.x, split.y))
    )
    names = repr(with_rate(simulation.algorithm, 1.0)), simulation.mapping.name
    scale = federation.dataset.target_scale  # of its training rows, which the seed may draw
    return *names, scale, task.layout, shapes, simulation.batch, id(task.public)


def _widths(simulations: Sequence[Simulation]) -> Widths | None:
    """The sizes that all rows are padded to; None where every simulation has the same."""
    federations = [simulation.federation for simulation in simulations]
    if len({tuple(split.sizes.tobytes() for split in f.splits) for f in federations}) == 1:
        return None
    train, *others = (
        np.concatenate([split.sizes for split in splits])
        for splits in zip(*(f.splits for f in federations), strict=True)
    )
    return Widths(int(train.min()), int(train.max()), *(int(sizes.max()) for sizes in others))


class _Row(NamedTuple):
    """The input of one client's local update, with what the simulations may differ in."""

    client: ClientInput
    initial: Tensor  # the initial weights
    lr: Tensor | None  # the learning rate; None: the algorithm's


def run_chunks(
    algorithm: AnyAlgorithm,
    tasks: Sequence[Task],
    mapping: Mapping,
    chunks: Sequence[Chunk],
    models: EvalModels,
    rates: Sequence[float] = (),
) -> tuple[ChunkResult, ...]:
    """`mapping.run_chunk` for clients of several simulations in one program, each with a server of its own.

    Args:
        algorithm: Of all of them.
        tasks: The task of each, which differs in the initial weights alone.
        mapping: The engine.
        chunks: The clients of each.
        models: Which models are evaluated.
        rates: The learning rate of each, where they differ.
    """

    def rows_of_one(task: Task, chunk: Chunk, rate: float | None) -> _Row:
        clients = len(chunk.ids)
        lr = None if rate is None else task.initial.new_full((clients,), rate)
        (rows,) = inputs_of(algorithm, chunk)  # one group, as the widths are those of all simulations
        return _Row(rows, tree.repeat(task.initial, clients), lr)

    def update(row: _Row) -> ClientResult:
        at_its_rate = algorithm if row.lr is None else with_rate(algorithm, row.lr)
        return local_update(at_its_rate, replace(tasks[0], initial=row.initial), row.client, models)

    rate_of_each: Sequence[float | None] = rates or [None] * len(tasks)

    def run(chunks: Sequence[Chunk]) -> tuple[ChunkResult, ...]:
        rows = tree.concatenate(list(map(rows_of_one, tasks, chunks, rate_of_each)))
        updated = with_healthy_records(mapping.over(update, rows), rows.client.client)
        of_each = tree.split(updated, [len(chunk.ids) for chunk in chunks])
        return tuple(
            total_of(algorithm, task, mapping, chunk, one)
            for task, chunk, one in zip(tasks, chunks, of_each, strict=True)
        )

    with torch.no_grad():
        results: tuple[ChunkResult, ...] = mapping.call(run, tuple(chunks), models)
        return results


def run_batched(simulations: Sequence[Simulation], loops: Sequence[Callable[[Executor], R]]) -> list[R]:
    """The result of each loop, called with its executor; the first error of any of them is raised here.

    The loops must have the same rounds and evaluations. All clients are trained in the calling thread: GPU
    libraries have handles for each thread, and none may be created while a program is recorded.

    Args:
        simulations: What each loop trains; `can_batch` says whether they fit together.
        loops: Train the rounds with the executor that they get.
    """
    batch = _Batch(simulations)

    def run(n: int) -> R:
        with batch.changed:
            try:
                return loops[n](_Handle(batch, n))
            except BaseException:
                batch.stopped = True
                raise
            finally:
                batch.ended += 1
                batch.changed.notify_all()

    with ThreadPoolExecutor(len(loops)) as pool:
        futures = [pool.submit(contextvars.copy_context().run, run, n) for n in range(len(loops))]
        try:
            batch.train()
        finally:
            with batch.changed:
                batch.stopped = True
                batch.changed.notify_all()
    errors = (future.exception() for future in futures)
    error = next((error for error in errors if error is not None and not isinstance(error, _Stopped)), None)
    if error is None:
        return [future.result() for future in futures]
    try:
        raise error
    finally:
        # Else error and frame refer to each other, and the frame's GPU memory is not freed.
        del error, futures, errors


class _Stopped(Exception):
    """The batch was stopped by an error of another loop."""


class _Submitted(NamedTuple):
    """The clients of one simulation that are to be trained."""

    chunk: Chunk
    round: int
    models: EvalModels

    def program(self) -> tuple[object, ...]:
        chunk = self.chunk
        rows = tree.leaves((chunk.clients, chunk.groups))
        return self.round, self.models, tuple((t.shape[1:], t.dtype) for t in rows)


class _Batch:
    """The submitted clients and their results. One loop runs at a time, or the training does."""

    def __init__(self, simulations: Sequence[Simulation]) -> None:
        self.simulations, self.widths = simulations, _widths(simulations)
        rates = [rate_of(simulation.algorithm) for simulation in simulations]
        self.rates = [rate for rate in rates if rate is not None] if len(set(rates)) > 1 else []
        self.changed = threading.Condition()
        self.submitted: dict[int, _Submitted] = {}
        self.results: dict[int, ChunkResult] = {}
        self.ended = 0
        self.stopped = False

    def train(self) -> None:
        """Trains the submitted clients, round by round, until the loops have ended."""
        first = self.simulations[0]
        tasks = [simulation.task for simulation in self.simulations]
        with self.changed:
            while True:
                self.changed.wait_for(lambda: self.stopped or len(self.submitted) + self.ended == len(tasks))
                if self.stopped or self.ended == len(tasks):
                    return
                if self.ended:
                    raise UsageError("batched simulations must have the same number of rounds")
                submitted = [self.submitted[n] for n in range(len(tasks))]
                if len({one.program() for one in submitted}) > 1:
                    raise UsageError("batched simulations must have the same rounds, evaluations and steps")
                chunks, models = [one.chunk for one in submitted], submitted[0].models
                results = run_chunks(first.algorithm, tasks, first.mapping, chunks, models, self.rates)
                self.results, self.submitted = dict(enumerate(results)), {}
                self.changed.notify_all()


class _Handle:
    """The executor of one simulation in a batch."""

    def __init__(self, batch: _Batch, n: int) -> None:
        self.batch, self.n = batch, n

    def local_updates(self, state: State, chunks: Sequence[Ids], models: EvalModels) -> Iterator[ChunkResult]:
        """The result of each part's local updates, in the order of the parts."""
        batch, n = self.batch, self.n
        for ids in chunks:
            simulation, server = batch.simulations[n], state.server
            chunk = chunk_input(simulation, server, state.clients, state.round, ids, batch.widths)
            batch.submitted[n] = _Submitted(chunk, state.round, models)
            batch.changed.notify_all()
            batch.changed.wait_for(lambda: batch.stopped or n in batch.results)
            if n not in batch.results:
                raise _Stopped
            result = batch.results.pop(n)
            state.clients.put(chunk.ids, result.client)
            yield result._replace(client=None)
