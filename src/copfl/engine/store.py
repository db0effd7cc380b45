"""Where the clients' states are between their turns."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from copfl import tree
from copfl.algorithms.algorithm import AnyAlgorithm
from copfl.task import Task


class Store(Protocol):
    """The clients' records, handed out and taken back as trees of rows."""

    all: Any  # every client's record, for checkpoints

    def rows(self, ids: torch.Tensor) -> Any:
        """These clients' records; do not write into them."""

    def put(self, ids: torch.Tensor, records: Any) -> None:
        """Takes these clients' new records."""


class MemoryStore:
    """All clients' records in one tree of rows on the device."""

    def __init__(self, algorithm: AnyAlgorithm, task: Task, clients: int) -> None:
        self.all = tree.each(torch.clone, tree.repeat(algorithm.client_init(task), clients))
        self.clients = clients

    def rows(self, ids: torch.Tensor) -> Any:
        return self.all if len(ids) == self.clients else tree.rows(self.all, ids)

    def put(self, ids: torch.Tensor, records: Any) -> None:
        if len(ids) == self.clients:  # ids are sorted and distinct: this is everybody
            self.all = records
        else:
            tree.put_rows(self.all, ids, records)
