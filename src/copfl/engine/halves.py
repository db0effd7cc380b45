"""Two random halves of a round's uploads, and what each client's loss is with the model of either.

The training goes on with all uploads: nothing here changes a run. `experiment.benefit` estimates from many rounds what
each client is worth to the others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, ClientOutput
from copfl.core.batches import choose
from copfl.core.random import HALVES, hashed
from copfl.core.task import Data, Task
from copfl.data.federation import Federation
from copfl.engine.mapping import Mapping
from copfl.engine.rounds import Ids, Store, Values

LEAST = 4  # clients of a round: each half is a mean
HALF, DIFFERENCE = (
    "half",
    "half_difference",
)  # metrics of a client: 1 or -1; its loss with the second minus the first


class Halves(NamedTuple):
    """Which clients there are to divide."""

    population: Ids
    participants: int  # how many of them take part in a round

    def first(self, seed: int, round: int) -> Ids:
        """The clients of the first half in this round, each set equally likely; of an odd number the smaller part."""
        ids = self.population[choose(seed, round, len(self.population), self.participants)]
        order = np.argsort(hashed(seed, HALVES, round, ids.astype(np.uint64)))
        return ids[order[: len(ids) // 2]]


def loss_differences(
    algorithm: AnyAlgorithm,
    task: Task,
    mapping: Mapping,
    federation: Federation,
    server: Any,
    totals: tuple[Any, Any],
    clients: Store,
    parts: Sequence[Ids],
) -> Values:
    """Each participant's loss with the second half's model minus that with the first's; nan where it has none.

    On its validation samples where it has such, else on its training samples.

    Args:
        algorithm: What the clients train with.
        task: What they learn.
        mapping: How a function is mapped over clients.
        federation: Their samples.
        server: The server before the round.
        totals: The sum of the summands, and that of the first half alone.
        clients: The records after the local updates.
        parts: The participants, in chunks.
    """
    samples = federation.train if federation.validation is None else federation.validation
    whole, half = totals

    def loss(row: tuple[Any, Any, Data]) -> Tensor:
        client, down, data = row
        scores = task.scores(algorithm.personal_model(task, client, down), data)
        return torch.where(scores.counted > 0, scores.loss.double(), torch.nan)

    losses = []
    with torch.no_grad():
        for total in (half, tree.each(torch.sub, whole, half)):
            after = algorithm.server_update(task, server, total)[0]
            for part in parts:
                ids = torch.from_numpy(part).to(task.device)
                rows = clients.rows(ids), algorithm.downlink(after, ids), samples.rows(part)
                losses.append(mapping.over(loss, rows))
    of_first, of_second = torch.cat(losses).cpu().numpy().reshape(2, -1)
    difference = np.asarray(of_second - of_first)
    return np.where(np.isfinite(difference), difference, np.nan)


def not_a_mean(algorithm: AnyAlgorithm, task: Task, example: ClientOutput, clients: int) -> str:
    """Why halves of the uploads are not comparable; "" where a client's next model depends on their mean alone.

    A mean stays the same if all uploads come twice, and changes with them.
    """
    server, id = algorithm.server_init(task, clients), torch.tensor(0, device=task.device)

    def model_after(total: Any) -> list[Tensor]:
        after = algorithm.server_update(task, server, total)[0]
        down = tree.row(algorithm.downlink(after, id[None]), 0)
        return tree.leaves(algorithm.personal_model(task, example.client, down))

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(a, b, strict=True))

    with torch.no_grad():
        once = algorithm.summand(task, server, id, example.upload)
        if any(tree.gathered(once)):
            return "the server needs single uploads"
        model = model_after(once)
        moved = tree.each(lambda t: t + 1 if t.is_floating_point() else t, once)
        if same(model, model_after(moved)):
            return "no part of a client's model is a mean of the uploads"
        if not same(model, model_after(tree.each(lambda t: 2 * t, once))):
            return "the server's step depends on the number of uploads"
    return ""
