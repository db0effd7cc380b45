"""Two random halves of a round's clients, and what a client's loss is with the model of either.

The training goes on with all uploads. `engine.halves` compares the halves in the simulation, `federation` in a
federation, and `experiment.benefit` estimates from many rounds what each client is worth to the others.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, ClientOutput
from copfl.core.random import HALVES, hashed
from copfl.core.task import Data, Task

LEAST = 4  # clients of a round: each half is a mean
HALF, DIFFERENCE = (
    "half",
    "half_difference",
)  # metrics of a client: 1 or -1; its loss with the second minus the first


def first_half(seed: int, round: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The clients of the first half, each set equally likely; of an odd number the smaller part."""
    order = np.argsort(hashed(seed, HALVES, round, ids.astype(np.uint64)))
    return ids[order[: len(ids) // 2]]


def loss_with(algorithm: AnyAlgorithm, task: Task, client: Any, down: Any, data: Data) -> Tensor:
    """The loss of a client's model once it receives a message; nan where it has no samples."""
    scores = task.scores(algorithm.personal_model(task, client, down), data)
    return torch.where(scores.counted > 0, scores.loss.double(), torch.nan)


def not_a_mean(algorithm: AnyAlgorithm, task: Task, example: ClientOutput, clients: int) -> str:
    """Why halves of uploads are not comparable; "" where a client's next model depends on their mean alone.

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
