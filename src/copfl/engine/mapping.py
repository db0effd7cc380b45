"""How `client_update` is mapped over clients: the one thing in which the engines differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from copfl import tree
from copfl.algorithms.algorithm import AnyAlgorithm, Figures
from copfl.engine.graph import Recorder
from copfl.task import Data, Experts, Personal, Plan, Task

A = TypeVar("A")
B = TypeVar("B")


class Given(NamedTuple):
    """What one client's turn needs besides the server."""

    id: Tensor
    client: Any
    down: Any
    data: Data
    test: Data
    plan: Plan


class Done(NamedTuple):
    """What one client's turn leaves."""

    client: Any
    total: Any  # its summand
    figures: Figures


def as_it_is(f: Callable[[A], B], given: A, variant: object) -> B:
    """f(given)."""
    return f(given)


class Mapping(NamedTuple):
    """How many clients go together, how a function of one client becomes one of rows, and how it is called."""

    name: str
    chunk: int
    over: Callable[[Callable[[Any], Any], Any], Any]
    call: Callable[[Callable[[Any], Any], Any, object], Any] = as_it_is


def one_by_one() -> Mapping:
    """Client after client: plain PyTorch, the reference, and what a debugger wants."""
    return Mapping("one_by_one", 1, alone)


def all_at_once(chunk: int = 64) -> Mapping:
    """Up to `chunk` clients side by side in one program, by vmap."""
    return Mapping("all_at_once", chunk, vectorised)


def captured(chunk: int = 64) -> Mapping:
    """All at once, the program recorded in the first round as a CUDA graph and replayed in the others."""
    return Mapping("captured", chunk, vectorised, Recorder())


def alone(f: Callable[[A], B], rows: A) -> B:
    """f of the only row."""
    return tree.stack([f(tree.row(rows, 0))])


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


def together(algorithm: AnyAlgorithm, task: Task, mapping: Mapping, chunk: Chunk, look: bool) -> Done:
    """These clients' turns, their summands added up."""

    def run(chunk: Chunk) -> Done:
        down = algorithm.downlink(chunk.server, chunk.ids)
        rows = Given(chunk.ids, chunk.clients, down, chunk.data, chunk.test, chunk.plan)
        done: Done = mapping.over(lambda one: turn(algorithm, task, chunk.server, one, look), rows)
        return done._replace(total=tree.total(done.total))

    with torch.no_grad():
        result: Done = mapping.call(run, chunk, look)
        # A recording writes its next result where it wrote this one, so what is kept beyond the next call is copied;
        # the clients' records are taken over by the store before that.
        return result._replace(
            total=tree.each(torch.clone, result.total), figures=tree.each(torch.clone, result.figures)
        )


def turn(algorithm: AnyAlgorithm, task: Task, server: Any, given: Given, look: bool) -> Done:
    """One client's turn: train, add up, look.

    A client whose upload or own record is not finite is left out of the round: it adds nothing and keeps the state it
    had. The record counts too, because a client that shares little or nothing can break without its upload showing it.
    """
    done = algorithm.client_update(task, given.client, given.down, given.data, given.plan)
    summand = algorithm.summand(task, server, given.id, done.upload)
    healthy = finite((done.client, done.upload), given.id.device)
    figures = {name: figure.to(torch.float64) for name, figure in done.figures.items()}
    figures["healthy"] = healthy.to(torch.float64)
    nothing = torch.zeros((), dtype=torch.float64, device=given.id.device)
    figures.setdefault("bytes_up", nothing + tree.nbytes(done.upload))  # split learning counts its own
    figures.setdefault("bytes_down", nothing + tree.nbytes(given.down))
    if tree.mask_bytes(done.upload):  # the round loop takes them off again where the server holds the mask already
        figures["mask_bytes"], figures["mask_mark"] = (
            nothing + number(done.upload) for number in (tree.mask_bytes, tree.mask_mark)
        )
    if look:
        before = algorithm.personal(task, given.client, given.down)
        everybody = algorithm.personal(task, algorithm.client_init(task), given.down)
        if task.buffers == "local":  # a model from outside is tried with the client's own statistics
            everybody = with_statistics(task, everybody, done.trained)
        for name, personal in (("", done.trained), ("_before", before), ("_global", everybody)):
            loss, accuracy = task.evaluate(personal, given.test)
            known = torch.isfinite(loss) & (given.test.size > 0)  # no samples or a broken model: nan, not a number
            figures[f"accuracy{name}"] = torch.where(known, accuracy.double(), torch.nan)
            figures[f"test_loss{name}"] = torch.where(known, loss.double(), torch.nan)
    return Done(
        client=tree.each(lambda new, old: torch.where(healthy, new, old), done.client, given.client),
        total=tree.each(lambda t: torch.where(healthy, t, torch.zeros_like(t)), summand),
        figures=figures,
    )


def finite(record: object, device: torch.device) -> Tensor:
    """Whether every number of the record is finite: then their sum is, and one pass over memory tells."""
    checks = [torch.isfinite(t.sum()) for t in tree.leaves(record) if t.is_floating_point()]
    return torch.stack([torch.ones((), dtype=torch.bool, device=device), *checks]).all()


def with_statistics(task: Task, personal: Personal, other: Personal) -> Personal:
    """The model with another's batch-norm statistics."""
    statistics = other.w[0, task.d :] if isinstance(other, Experts) else other[task.d :]
    if isinstance(personal, Experts):
        w = torch.cat([personal.w[:, : task.d], statistics.expand(personal.w.shape[0], -1)], 1)
        return Experts(w, personal.share)
    return torch.cat([personal[: task.d], statistics])
