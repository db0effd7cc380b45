"""Two random halves of a round's uploads, and what each client's loss is with the model of either.

The training goes on with all uploads: nothing here changes a run. `experiment.benefit` estimates from many
rounds what each client is worth to the others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.batches import choose
from copfl.core.halves import first_half, loss_with
from copfl.core.task import Data, Task
from copfl.data.clients.federation import FederatedData
from copfl.engine.mapping import Mapping
from copfl.engine.rounds import Ids, Store, Values


class ClientHalves(NamedTuple):
    """Which clients there are to divide."""

    population: Ids
    participants: int  # how many of them take part in a round

    def first(self, seed: int, round: int) -> Ids:
        """The clients of the first half in this round, each set equally likely; of an odd number fewer.

        Args:
            seed: Of the run.
            round: Its number, from 0.
        """
        ids = self.population[choose(seed, round, len(self.population), self.participants)]
        return first_half(seed, round, ids)


def loss_differences(
    algorithm: AnyAlgorithm,
    task: Task,
    mapping: Mapping,
    federation: FederatedData,
    server: Any,
    totals: tuple[Any, Any],
    clients: Store,
    chunks: Sequence[Ids],
) -> Values:
    """Each participant's loss with the second half's model minus that with the first's; nan where none.

    On its validation samples where it has such, else on its training samples.

    Args:
        algorithm: What the clients train with.
        task: What they learn.
        mapping: How a function is mapped over clients.
        federation: Their samples.
        server: The server before the round.
        totals: The sum of the summands, and the sum of the first half alone.
        clients: The records after the local updates.
        chunks: The participants, in chunks.
    """
    samples = federation.train if federation.validation is None else federation.validation
    whole, half = totals

    def loss(row: tuple[Any, Any, Data]) -> Tensor:
        return loss_with(algorithm, task, *row)

    losses = []
    with torch.no_grad():
        for total in (half, tree.each(torch.sub, whole, half)):
            after = algorithm.server_update(task, server, total)[0]
            for chunk in chunks:
                ids = torch.from_numpy(chunk).to(task.device)
                rows = clients.rows(ids), algorithm.downlink(after, ids), samples.rows(chunk)
                losses.append(mapping.over(loss, rows))
    of_first, of_second = torch.cat(losses).cpu().numpy().reshape(2, -1)
    difference = np.asarray(of_second - of_first)
    return np.where(np.isfinite(difference), difference, np.nan)
