"""How `client_update` is mapped over clients: the one thing in which the engines differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from copfl.core import payload, tree
from copfl.core.algorithm import AnyAlgorithm, EvalModels, Metrics, evaluate
from copfl.core.task import Data, Plan, Task
from copfl.engine.cuda_graph import Recorder
from copfl.kernels.fused import LONG, either_rows, mostly_rows, quick

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")


class Given(NamedTuple):
    """What one client's turn needs."""

    id: Tensor
    client: Any
    down: Any
    data: Data
    test: Data
    plan: Plan
    initial: Tensor | None = None  # the initial weights, where they are not the same for all rows


class Turned(NamedTuple):
    """What one client's turn leaves."""

    client: Any
    upload: Any
    metrics: Metrics


class Brought(NamedTuple):
    """What one client brings to the server, and its record afterwards, which stays with it."""

    id: Tensor
    upload: Any
    client: Any


class Done(NamedTuple):
    """What some clients' turns leave."""

    client: Any
    total: Any  # the sum of their summands
    metrics: Metrics


def as_it_is(f: Callable[[A], B], given: A, variant: object) -> B:
    """f(given)."""
    return f(given)


class Mapping(NamedTuple):
    """How many clients go together, how a function of one client becomes one of rows, and how it is called."""

    name: str
    chunk: int
    over: Callable[[Callable[[Any], Any], Any], Any]
    call: Callable[[Callable[[Any], Any], Any, object], Any] = as_it_is

    def forget(self) -> None:
        """Gives back the memory of what was recorded."""
        if isinstance(self.call, Recorder):
            self.call.forget()


def sequential() -> Mapping:
    """Client after client: plain PyTorch, the reference, and what a debugger wants."""
    return Mapping("sequential", 1, alone)


def vmap(chunk: int = 64) -> Mapping:
    """Up to `chunk` clients side by side in one program, by vmap."""
    return Mapping("vmap", chunk, vectorised)


def cuda_graph(chunk: int = 64) -> Mapping:
    """All at once, the program recorded in the first round as a CUDA graph and replayed in the others."""
    return Mapping("cuda_graph", chunk, vectorised, Recorder(_lasting))


def _lasting(done: Sequence[Done]) -> Any:
    """What is kept beyond the next chunk; the clients' records are taken over by the store before that."""
    return tuple((one.total, one.metrics) for one in done)


def alone(f: Callable[[A], B], rows: A) -> B:
    """f of the only row."""
    return tree.each(lambda t: t.unsqueeze(0), f(tree.row(rows, 0)))


def vectorised(f: Callable[[A], B], rows: A) -> B:
    """f over all rows at once. vmap knows neither records nor None, so it sees plain lists of tensors."""
    shape: list[B] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        shape[:] = [f(tree.rebuild(rows, tensors))]
        return tuple(tree.leaves(shape[0]))

    results = torch.func.vmap(flat, randomness="different")(*tree.leaves(rows))
    return tree.rebuild(shape[0], results)


class Chunk(NamedTuple):
    """What some clients' turns need: rows, and the server that they have in common."""

    server: Any
    ids: Tensor
    clients: Any
    data: Data
    test: Data
    plan: Plan


def together(algorithm: AnyAlgorithm, task: Task, mapping: Mapping, chunk: Chunk, look: EvalModels) -> Done:
    """These clients' turns, their summands added up.

    A client whose upload or own record is not finite is left out of the round: it adds nothing and keeps the state it
    had. The record counts too, because a client that shares little or nothing can break without its upload showing it.
    """
    return abreast(algorithm, [task], mapping, [chunk], look)[0]


def abreast(
    algorithm: AnyAlgorithm,
    tasks: Sequence[Task],
    mapping: Mapping,
    chunks: Sequence[Chunk],
    look: EvalModels,
) -> tuple[Done, ...]:
    """`together` for clients of several federations of one kind in one program, each with a server of its own."""
    alone = len(chunks) == 1

    def rows_of(task: Task, chunk: Chunk) -> Given:
        down = algorithm.downlink(chunk.server, chunk.ids)
        first = None if alone else tree.repeat(task.initial, len(chunk.ids))
        return Given(chunk.ids, chunk.clients, down, chunk.data, chunk.test, chunk.plan, first)

    def one_turn(given: Given) -> Turned:
        task = tasks[0] if given.initial is None else replace(tasks[0], initial=given.initial)
        return turn(algorithm, task, given, look)

    def run(chunks: Sequence[Chunk]) -> tuple[Done, ...]:
        rows = tree.concatenate([rows_of(task, chunk) for task, chunk in zip(tasks, chunks, strict=True)])
        turned: Turned = mapping.over(one_turn, rows)
        healthy = turned.metrics["healthy"] > 0
        turned = turned._replace(client=kept(healthy, turned.client, rows.client))
        sizes = [len(chunk.ids) for chunk in chunks]
        return tuple(map(total_of, tasks, chunks, tree.split(turned, sizes)))

    def total_of(task: Task, chunk: Chunk, turned: Turned) -> Done:
        rows = Brought(chunk.ids, turned.upload, turned.client)
        summands = mapping.over(lambda one: algorithm.summand(task, chunk.server, one.id, one.upload), rows)
        return Done(turned.client, added_up(turned.metrics["healthy"] > 0, summands), turned.metrics)

    with torch.no_grad():
        result: tuple[Done, ...] = mapping.call(run, tuple(chunks), look)
        return result


def turn(algorithm: AnyAlgorithm, task: Task, given: Given, tried: EvalModels) -> Turned:
    """One client's turn: train, look at these models. Whether what came of it is finite is the figure "healthy"."""
    done = algorithm.client_update(task, given.client, given.down, given.data, given.plan)
    healthy = tree.finite((done.client, done.upload), given.id.device)
    metrics = {name: metric.to(torch.float64) for name, metric in done.metrics.items()}
    metrics["healthy"] = healthy.to(torch.float64)
    nothing = torch.zeros((), dtype=torch.float64, device=given.id.device)
    masks, sent = payload.mask_bytes(done.upload, given.client, done.client)
    metrics.setdefault(
        "bytes_up", nothing + payload.nbytes(done.upload) - masks + sent
    )  # split learning counts its own
    metrics.setdefault("bytes_down", nothing + payload.nbytes(given.down))
    if masks:  # the round loop takes them off again where the server holds the very mask already
        metrics["mask_bytes"], metrics["mask_fingerprint"] = (
            nothing + sent,
            nothing + payload.mask_fingerprint(done.upload),
        )
    if tried:
        metrics |= evaluate(algorithm, task, given.client, given.down, done.trained, given.test, tried)
    return Turned(done.client, done.upload, metrics)


def added_up(healthy: Tensor, total: T) -> T:
    """The sum of the healthy clients' summands, rows [N, ...]; what is Gathered has zeros for the others."""
    if not healthy.is_cuda:
        return tree.total(total if bool(healthy.all()) else tree.each(lambda t: _only(healthy, t), total))
    gathered = tree.gathered(total)
    return tree.rebuild(
        total, [_sum(healthy, t, personal) for t, personal in zip(tree.leaves(total), gathered, strict=True)]
    )


def _only(healthy: Tensor, rows: Tensor) -> Tensor:
    return torch.where(healthy.view(-1, *[1] * (rows.dim() - 1)), rows, torch.zeros_like(rows))


def _sum_of(healthy: Tensor, rows: Tensor) -> Tensor:
    return _only(healthy, rows).sum(0)


def _sum(healthy: Tensor, rows: Tensor, gathered: bool) -> Tensor:
    if gathered:
        return _only(healthy, rows).flatten(0, 1)
    # Of a long vector, choosing and adding in one pass is worth a compiler's time.
    return (quick(_sum_of, rows) if rows[0].numel() > LONG else _sum_of)(healthy, rows)


def kept(healthy: Tensor, new: T, old: T) -> T:
    """The new records of the healthy clients and the old ones of the others, rows [N, ...]."""
    if not healthy.is_cuda:
        if bool(healthy.all()):
            return tree.each(torch.Tensor.contiguous, new)  # what is the same for all gets a row for each
        return tree.each(lambda n, o: either_rows(healthy, n, o), new, old)
    taken = {t.untyped_storage().data_ptr() for t in tree.leaves(old)}  # memory that is not ours to write to

    def keep(n: Tensor, o: Tensor) -> Tensor:
        home = n.untyped_storage().data_ptr()
        own = home not in taken
        taken.add(home)
        return mostly_rows(healthy, n, o) if own else either_rows(healthy, n, o)

    return tree.each(keep, new, old)
