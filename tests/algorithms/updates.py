"""One local update, or three rounds, of an algorithm under test."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from copfl.core import AnyAlgorithm, Data, Plan, Task
from copfl.core.tree import row
from copfl.engine.rounds import Round, State
from copfl.testing import SIZES, small_federation
from tests.toys import rounds_of


def down_of(algorithm: AnyAlgorithm, task: Task, w: Tensor | None = None) -> Any:
    """What one client gets from the server before the first round, or from one with these weights."""
    server = algorithm.server_init(task, 1)
    return row(algorithm.downlink(server if w is None else server._replace(w=w), torch.tensor([0])), 0)


def output_of(
    algorithm: AnyAlgorithm, task: Task, data: Data, plan: Plan, client: Any = None, w: Tensor | None = None
) -> Any:
    """A client's output: a new client's, in the first round, unless a client or weights are given."""
    given = algorithm.client_init(task) if client is None else client
    with torch.no_grad():
        return algorithm.client_update(task, given, down_of(algorithm, task, w), data, plan)


@functools.cache  # FedAvg and local training are what many are compared with
def three_rounds(
    algorithm: AnyAlgorithm, norm: str = "batch", buffers: str = "local", participation: float = 1.0
) -> tuple[Task, State, list[Round]]:
    """A small network with unequal clients, of one batch and of two, after three rounds."""
    task, federation = small_federation(norm, SIZES)
    task = dataclasses.replace(task, buffers=buffers)
    return task, *rounds_of(algorithm, task, federation, 3, batch=6, participation=participation)


def clients_of(state: State) -> Any:
    """All clients' records, a row each."""
    return state.clients.rows(torch.arange(len(SIZES)))
