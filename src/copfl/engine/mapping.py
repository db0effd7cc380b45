"""How `client_update` is mapped over clients: the one thing in which the engines differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from copfl import tree
from copfl.algorithms.algorithm import AnyAlgorithm, Figures
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


class Mapping(NamedTuple):
    """How many clients go together, and how a function of one client becomes one of a tree of rows."""

    name: str
    chunk: int
    apply: Callable[[Callable[[Any], Any], Any], Any]


def one_by_one() -> Mapping:
    """Client after client: plain PyTorch, the reference, and what a debugger wants."""
    return Mapping("one_by_one", 1, lambda f, rows: tree.stack([f(tree.row(rows, 0))]))


def all_at_once(chunk: int = 64) -> Mapping:
    """Up to `chunk` clients side by side in one program, by vmap."""
    return Mapping("all_at_once", chunk, vectorised)


def vectorised(f: Callable[[A], B], rows: A) -> B:
    """f over all rows at once. vmap knows neither records nor None, so it sees plain lists of tensors."""
    shape: list[B] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        shape[:] = [f(tree.rebuild(rows, tensors))]
        return tuple(tree.leaves(shape[0]))

    results = torch.func.vmap(flat, randomness="different")(*tree.leaves(rows))
    return tree.rebuild(shape[0], results)


def turn(algorithm: AnyAlgorithm, task: Task, server: Any, given: Given, look: bool) -> Done:
    """One client's turn: train, add up, look.

    A client whose upload or own record is not finite is left out of the round: it adds nothing and keeps the state it
    had. The record counts too, because a client that shares little or nothing can break without its upload showing it.
    """
    done = algorithm.client_update(task, given.client, given.down, given.data, given.plan)
    summand = algorithm.summand(task, server, given.id, done.upload)
    healthy = finite((done.client, done.upload))
    figures = {name: figure.to(torch.float64) for name, figure in done.figures.items()}
    figures["healthy"] = healthy.to(torch.float64)
    figures["bytes_up"] = tree.nbytes(done.upload).to(given.id.device).to(torch.float64)
    figures["bytes_down"] = tree.nbytes(given.down).to(given.id.device).to(torch.float64)
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


def finite(record: object) -> Tensor:
    """Whether every number of the record is finite."""
    checks = [torch.isfinite(t).all() for t in tree.leaves(record) if t.is_floating_point()]
    return torch.stack(checks).all() if checks else torch.tensor(True)


def with_statistics(task: Task, personal: Personal, other: Personal) -> Personal:
    """The model with another's batch-norm statistics."""
    statistics = other.w[0, task.d :] if isinstance(other, Experts) else other[task.d :]
    if isinstance(personal, Experts):
        w = torch.cat([personal.w[:, : task.d], statistics.expand(personal.w.shape[0], -1)], 1)
        return Experts(w, personal.share)
    return torch.cat([personal[: task.d], statistics])
