"""The server of FedAvg and its descendants: the mean of what is shared, when a fixed part of the model stays home.

An algorithm says which parts it `keeps` and takes these functions as its methods; its own file holds what is its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from copfl.algorithms.algorithm import Figures
from copfl.layout import Layout
from copfl.optim import Optimizer, State, kept
from copfl.task import Task


class Keeper(Protocol):
    """An algorithm with a fixed part that stays with the client."""

    @property
    def keeps(self) -> tuple[str, ...]:
        """The parts of the model that never travel; local batch-norm statistics never do."""

    @property
    def optimizer(self) -> Optimizer: ...


class Server(NamedTuple):
    w: Tensor  # [s], the shared entries


class Down(NamedTuple):
    w: Tensor  # [s]


class Client(NamedTuple):
    own: Tensor  # [h], the entries that stay home
    moments: State


class Upload(NamedTuple):
    w: Tensor  # [s]
    size: Tensor  # [], how many samples it was trained on


class Total(NamedTuple):
    w: Tensor  # [s], sum of size * w
    size: Tensor


@lru_cache(maxsize=64)
def runs(layout: Layout, parts: tuple[str, ...]) -> tuple[tuple[int, bool], ...]:
    """The vector as runs of (length, stays home)."""
    home = layout.where(*parts)
    _, lengths = torch.unique_consecutive(home, return_counts=True)
    result, start = [], 0
    for length in lengths.tolist():
        result.append((length, bool(home[start])))
        start += length
    return tuple(result)


def _runs(task: Task, keeps: tuple[str, ...]) -> tuple[tuple[int, bool], ...]:
    return runs(task.layout, (*keeps, "buffers") if task.buffers == "local" else keeps)


def part(task: Task, keeps: tuple[str, ...], w: Tensor, home: bool) -> Tensor:
    """The entries of w that stay home, or those that are shared."""
    pieces = torch.split(w, [length for length, _ in _runs(task, keeps)])
    wanted = [p for p, (_, stays) in zip(pieces, _runs(task, keeps), strict=True) if stays == home]
    return wanted[0] if len(wanted) == 1 else torch.cat(wanted) if wanted else w.new_zeros(0)


def joined(task: Task, keeps: tuple[str, ...], own: Tensor, shared: Tensor) -> Tensor:
    """w, from the entries that stay home and those that are shared."""
    layout = _runs(task, keeps)
    mine = iter(torch.split(own, [length for length, stays in layout if stays]))
    theirs = iter(torch.split(shared, [length for length, stays in layout if not stays]))
    return torch.cat([next(mine) if stays else next(theirs) for _, stays in layout])


def only(task: Task, part: str) -> Tensor | None:
    """The parameters that may move when one part of the model is trained alone; None, which means all, for "all"."""
    return None if part == "all" else task.where(part)[: task.d]


def server_init(self: Keeper, task: Task, clients: int) -> Server:
    return Server(part(task, self.keeps, task.first, home=False))


def client_init(self: Keeper, task: Task) -> Client:
    moments = kept(self.optimizer, self.optimizer.init(task.first[: task.d]))
    return Client(part(task, self.keeps, task.first, home=True), moments)


def downlink(self: Keeper, server: Server, ids: Tensor) -> Down:
    return Down(server.w.expand(len(ids), -1))


def personal(self: Keeper, task: Task, client: Client, down: Down) -> Tensor:
    return joined(task, self.keeps, client.own, down.w)


def after(self: Keeper, task: Task, w: Tensor, moments: State) -> Client:
    """The client's record after its training ended in w."""
    return Client(part(task, self.keeps, w, home=True), kept(self.optimizer, moments))


def upload(self: Keeper, task: Task, w: Tensor, size: Tensor) -> Upload:
    """What the client sends after its training ended in w."""
    return Upload(part(task, self.keeps, w, home=False), size.to(w.dtype))


def summand(self: Keeper, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
    return Total(upload.size * upload.w, upload.size)


def server_update(self: Keeper, task: Task, server: Server, total: Total) -> tuple[Server, Figures]:
    """The mean weighted by the number of samples; a round that nobody answered changes nothing."""
    heard = total.size > 0
    mean = torch.where(heard, total.w / torch.where(heard, total.size, 1), server.w)
    return Server(mean), {"shared": (~task.where(*self.keeps))[: task.d].to(mean.dtype).mean()}
