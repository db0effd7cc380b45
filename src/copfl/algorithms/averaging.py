"""The server of FedAvg and its descendants: the mean of what is shared, when a fixed part of the model stays home.

An algorithm says which parts it `keeps` and takes these functions as its methods; its own file holds what is its own.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import Metrics
from copfl.core.optim import Optimizer, State, fresh, kept
from copfl.core.task import Task
from copfl.parts.sharing import joined, part

S = TypeVar("S")


class Keeper(Protocol):
    """An algorithm with a fixed part that stays with the client."""

    @property
    def personal(self) -> tuple[str, ...]:
        """The parts of the model that never travel; local batch-norm statistics never do."""

    @property
    def optimizer(self) -> Optimizer: ...


class Owner(Protocol):
    """A client's record with the entries that stay home."""

    @property
    def own(self) -> Tensor: ...


class Message(Protocol):
    """A broadcast with the shared entries."""

    @property
    def w(self) -> Tensor: ...


class Trainer(Protocol):
    """An algorithm that goes over the client's data once an epoch."""

    @property
    def epochs(self) -> int: ...


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


def server_init(self: Keeper, task: Task, clients: int) -> Server:
    return Server(part(task, self.personal, task.initial, local=False))


def client_init(self: Keeper, task: Task) -> Client:
    return Client(part(task, self.personal, task.initial, local=True), fresh(self.optimizer, task))


def total_epochs(self: Trainer) -> int:
    return self.epochs


def downlink(self: object, server: Message, ids: Tensor) -> Down:
    return Down(server.w.expand(len(ids), -1))


def everything(self: object, server: S, ids: Tensor) -> S:
    """The downlink of a server that keeps nothing to itself."""
    return tree.repeat(server, len(ids))


def personal_model(self: Keeper, task: Task, client: Owner, down: Message) -> Tensor:
    """The broadcast, with the client's own entries where they stay home."""
    return joined(task, self.personal, client.own, down.w)


def after(self: Keeper, task: Task, w: Tensor, moments: State) -> Client:
    """The client's record after its training ended in w."""
    return Client(part(task, self.personal, w, local=True), kept(self.optimizer, moments))


def upload(self: Keeper, task: Task, w: Tensor, size: Tensor) -> Upload:
    """What the client sends after its training ended in w."""
    return Upload(part(task, self.personal, w, local=False), size.to(w.dtype))


def summand(self: object, task: Task, server: Message, id: Tensor, upload: Upload) -> Total:
    return Total(upload.size * upload.w, upload.size)


def mean(total: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """total / weight, entry by entry; where nobody counts, what was there before."""
    heard = weight > 0
    return torch.where(heard, total / torch.where(heard, weight, 1), before)


def server_update(self: Keeper, task: Task, server: Message, total: Total) -> tuple[Server, Metrics]:
    """The mean weighted by the number of samples; a round that nobody answered changes nothing."""
    w = mean(total.w, total.size, server.w)
    return Server(w), {"shared": (~task.where(*self.personal))[: task.d].to(w.dtype).mean()}
