"""Random numbers for what the server starts with beside the initial weights, drawn from these weights.

Every party has the initial weights, so the server and a node draw the same numbers on every device.
"""

import torch
from torch import Tensor

from copfl.core.random import normal
from copfl.core.task import Task
from copfl.kernels.draws import mixed


def key_of(task: Task) -> Tensor:
    """[] int64, from the largest initial weight: another seed of the model is another key."""
    return task.initial.abs().max().double().view(torch.int64)


def permuted(task: Task, parts: tuple[str, ...], number: int) -> Tensor:
    """The initial weights with the entries of each parameter in these parts in a random order.

    So each parameter is distributed as its own initialisation distributes it, which the task does not know.
    """
    sizes, pieces = list(task.layout.sizes), []
    both = (torch.split(vector, sizes) for vector in (task.initial, task.layout.where(*parts)))
    for place, (piece, inside) in enumerate(zip(*both, strict=True)):
        keys = mixed(key_of(task), number, place, torch.arange(len(piece), device=task.device))
        pieces.append(piece[keys.argsort()] if bool(inside.all()) else piece)
    return torch.cat(pieces)


def normals(task: Task, size: int, number: int) -> Tensor:
    """[size] standard normal numbers."""
    return normal(mixed(key_of(task), number), task.initial.new_zeros(size))
