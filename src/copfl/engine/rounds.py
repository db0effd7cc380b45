"""The records of the round loop: the state between two rounds, and the metrics of one.

`simulate` yields a `Round` for each round; run folders, progress and trackers take it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from copfl.core.task import Personal

Ids = NDArray[np.int64]
Values = np.ndarray[Any, np.dtype[np.float64]]


class Store(Protocol):
    """The clients' records, read and written as trees of rows."""

    def rows(self, ids: Tensor) -> Any:
        """These clients' records, read-only."""

    def put(self, ids: Tensor, records: Any) -> None:
        """Stores these clients' new records.

        Args:
            ids: The clients, sorted.
            records: A row per client.
        """

    def saved(self) -> Any:
        """A tree for the checkpoint, from which `restore` restores every record as it is now."""

    def settled(self) -> None:
        """The checkpoint of the last `saved` is on disk: from now on older records may be overwritten."""

    def restore(self, saved: Any) -> None:
        """Restores the records of the time when `saved` returned this tree."""

    def share(self) -> None:
        """Moves the records to shared memory, for the processes to which this store is sent."""


class ModelKeeper(Protocol):
    """Takes each client's model as an evaluation measured it, right after that local update."""

    def wanted(self, client: int) -> bool:
        """Whether this client's model is kept."""

    def put(self, client: int, model: Personal, round: int) -> None:
        """Keeps the model of this round, from 1, in place of an earlier one.

        Args:
            client: Its number.
            model: Its model.
            round: From 1.
        """

    def drop(self, client: int) -> None:
        """The client's last update was not finite, so no earlier model counts either."""


@dataclass
class State:
    """The whole state of a simulation between two rounds."""

    server: Any
    clients: Store
    known_masks: Tensor  # [N], the fingerprint of each client's mask that the server knows; nan: none
    round: int = 0


@dataclass(frozen=True)
class Round:
    """The metrics of one round: of the federation, and of each client that took part."""

    number: int  # from 0
    ids: Ids
    federation: dict[str, float]
    clients: dict[str, Values]  # a value per id
