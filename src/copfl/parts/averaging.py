"""The steps of FedAvg, for every algorithm that averages a fixed part of the model and keeps the rest at the client.

An algorithm names the parts of the model that are `personal` and takes these functions as its methods. Vectors are cut
and put together, not masked: a personal entry is not in the shared vector at all, and no shape depends on a value.
"""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import ClientOutput, Metrics
from copfl.core.layout import Runs, cut, put_together, runs
from copfl.core.optim import Optimizer, State, begin, kept
from copfl.core.task import Data, Personal, Plan, Task
from copfl.core.train import Trained, fresh, train

S = TypeVar("S")


class Averaging(Protocol):
    """An algorithm with a fixed personal part of the model."""

    @property
    def personal(self) -> tuple[str, ...]:
        """The parts of the model that stay with the client; local batch-norm statistics always do."""

    @property
    def optimizer(self) -> Optimizer: ...


class HasEpochs(Protocol):
    @property
    def epochs(self) -> int: ...


class HasPersonal(Protocol):
    """A client's record with the personal entries of the model."""

    @property
    def personal(self) -> Tensor: ...


class HasShared(Protocol):
    """A server's record or message with the shared entries of the global model."""

    @property
    def w(self) -> Tensor: ...


class Server(NamedTuple):
    w: Tensor  # [s], the shared entries


class Down(NamedTuple):
    w: Tensor  # [s]


class Client(NamedTuple):
    personal: Tensor  # [p], the personal entries
    moments: State


class Upload(NamedTuple):
    w: Tensor  # [s]
    size: Tensor  # [], the number of training samples


class Total(NamedTuple):
    w: Tensor  # [s], sum of size * w
    size: Tensor


# -- personal and shared entries of w ----------------------------------------------------------------------------------


def _runs(task: Task, parts: tuple[str, ...]) -> Runs:
    return runs(task.layout, (*parts, "buffers") if task.buffers == "local" else parts)


def personal_of(task: Task, parts: tuple[str, ...], w: Tensor) -> Tensor:
    """The entries of w that stay with the client if these parts are personal."""
    return cut(w, _runs(task, parts), True)


def shared_of(task: Task, parts: tuple[str, ...], w: Tensor) -> Tensor:
    """The entries of w that are sent if these parts are personal."""
    return cut(w, _runs(task, parts), False)


def combined(task: Task, parts: tuple[str, ...], personal: Tensor, shared: Tensor) -> Tensor:
    """w, from its personal and its shared entries."""
    return put_together(_runs(task, parts), personal, shared)


def with_shared(task: Task, parts: tuple[str, ...], w: Tensor, shared: Tensor) -> Tensor:
    """w with its shared entries replaced."""
    return combined(task, parts, personal_of(task, parts, w), shared)


def active(task: Task, part: str) -> Tensor | None:
    """The mask of the parameters that one part of the model trains; None, which means all, for "all"."""
    return None if part == "all" else task.where(part)[: task.d]


def layers(task: Task, parts: tuple[str, ...]) -> list[tuple[int, int, bool]]:
    """Start, stop and whether it is trained of each layer (module) in the shared vector."""
    layout, local = task.layout, task.local(*parts).cpu()
    ends = list(accumulate(layout.sizes))
    shared = [place for place, end in enumerate(ends) if not local[end - 1]]
    start, spans = 0, []

    def layer(place: int) -> tuple[str, bool]:
        return layout.names[place].rpartition(".")[0], place < layout.trained

    for (_, trained), members in groupby(shared, layer):
        stop = start + sum(layout.sizes[place] for place in members)
        spans.append((start, stop, trained))
        start = stop
    return spans


# -- the methods of an algorithm ---------------------------------------------------------------------------------------


def server_init(self: Averaging, task: Task, clients: int) -> Server:
    return Server(shared_of(task, self.personal, task.initial))


def client_init(self: Averaging, task: Task) -> Client:
    return Client(personal_of(task, self.personal, task.initial), fresh(self.optimizer, task))


def total_epochs(self: HasEpochs) -> int:
    return self.epochs


def downlink(self: object, server: HasShared, ids: Tensor) -> Down:
    return Down(server.w.expand(len(ids), -1))


def downlink_all(self: object, server: S, ids: Tensor) -> S:
    """The downlink of a server that sends its whole record."""
    return tree.repeat(server, len(ids))


def personal_model(self: Averaging, task: Task, client: HasPersonal, down: HasShared) -> Tensor:
    """The global model with the client's personal entries."""
    return combined(task, self.personal, client.personal, down.w)


def client_update(
    self: Averaging, task: Task, client: Client, down: Down, data: Data, plan: Plan
) -> ClientOutput[Client, Upload]:
    """Local training of the whole model, as in FedAvg."""
    w = personal_model(self, task, client, down)
    return output(self, task, fit(self, task, w, client.moments, data, plan), data)


def fit(
    self: Averaging, task: Task, w: Tensor, moments: State, data: Data, epochs: Plan, **options: Any
) -> Trained:
    """`train` from the optimizer state in the client's record to the state that goes back into the record."""
    state = begin(self.optimizer, moments, w[: task.d])
    w, state, loss = train(task, self.optimizer, w, state, data, epochs, **options)
    return Trained(w, kept(self.optimizer, state), loss)


def output(
    self: Averaging,
    task: Task,
    trained: Trained,
    data: Data,
    predicts: Personal | None = None,
    **metrics: Tensor,
) -> ClientOutput[Client, Upload]:
    """The client's output after its training; `predicts` is the evaluated model where it is not the trained one."""
    w, state, loss = trained
    sent = upload(self, task, w, data)
    model = w if predicts is None else predicts
    metrics = {"loss": loss, "weight": sent.size, **metrics}
    return ClientOutput(client_after(self, task, w, state), sent, model, metrics)


def client_after(self: Averaging, task: Task, w: Tensor, state: State) -> Client:
    """The client's record after its training ended in w."""
    return Client(personal_of(task, self.personal, w), kept(self.optimizer, state))


def upload(self: Averaging, task: Task, w: Tensor, data: Data) -> Upload:
    """The shared entries of w and the number of samples."""
    return Upload(shared_of(task, self.personal, w), data.size.to(w.dtype))


def summand(self: object, task: Task, server: HasShared, id: Tensor, upload: Upload) -> Total:
    return Total(upload.size * upload.w, upload.size)


def mean(total: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """total / weight, entry by entry; the value before where the weight is zero."""
    averaged = weight > 0
    return torch.where(averaged, total / torch.where(averaged, weight, 1), before)


def server_update(self: Averaging, task: Task, server: HasShared, total: Total) -> tuple[Server, Metrics]:
    """The mean weighted by the number of samples; a round without uploads changes nothing."""
    w = mean(total.w, total.size, server.w)
    return Server(w), {"shared": (~task.where(*self.personal))[: task.d].to(w.dtype).mean()}
