"""What an algorithm's messages say: the vector in an upload that answers the broadcast's `w`, and the weight it claims.

Attacks, guards and noise wrap any algorithm, so they must find these two in records that each algorithm declares for
itself. Three conventions make that possible: the broadcast is the field `w` of the Down record; the answer is the field
`w` of the Upload, or `shared` where a mask goes with it; the claim is called `size`, `score` or `weight`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.batches import plan
from copfl.core.task import Data, Task
from copfl.core.tree import Masked
from copfl.errors import UsageError

WEIGHT_FIELDS = ("size", "score", "weight")
VECTOR_FIELDS = ("w", "shared")


class Update(NamedTuple):
    """One upload, beside what it answers."""

    received: Tensor  # [s], the broadcast; zero where personal
    sent: Tensor  # [s]; zero where personal
    personal: Tensor | None  # [s] bool; None: all of it is shared
    reported_weight: Tensor | None  # how much it wants to count; None: everybody counts the same

    @property
    def change(self) -> Tensor:
        return self.sent - self.received


def inside(down: Any) -> Any:
    """The message of the innermost algorithm; those around it add to it and keep it as their field `down`."""
    return inside(down.down) if hasattr(down, "down") else down


def update_of(down: Any, upload: Any) -> Update:
    """What the upload says, beside the broadcast that it answers."""
    down = inside(down)
    if not hasattr(down, "w") or not any(hasattr(upload, name) for name in VECTOR_FIELDS):
        raise UsageError(
            "attacks, guards and privacy work on the weights that a client sends back; this algorithm's messages hold "
            f"{', '.join(upload._fields)}; choose another algorithm, or leave them out"
        )
    reported_weight = next((getattr(upload, name) for name in WEIGHT_FIELDS if hasattr(upload, name)), None)
    if hasattr(upload, "shared"):
        values, personal = upload.shared
        return Update(torch.where(personal, 0, down.w), values, personal, reported_weight)
    return Update(down.w, upload.w, None, reported_weight)


def with_update(upload: Any, update_of: Update) -> Any:
    """The upload with this to say instead."""
    if update_of.personal is None:
        upload = upload._replace(w=update_of.sent)
    else:
        upload = upload._replace(
            shared=Masked(torch.where(update_of.personal, 0, update_of.sent), update_of.personal)
        )
    return with_reported_weight(upload, update_of.reported_weight)


def with_reported_weight(record: Any, reported_weight: Tensor | None) -> Any:
    """The record with another claim, if it holds one."""
    name = next((name for name in WEIGHT_FIELDS if hasattr(record, name)), None)
    return record if name is None or reported_weight is None else record._replace(**{name: reported_weight})


def broadcast(algorithm: AnyAlgorithm, server: Any, id: Tensor) -> Any:
    """What this client was sent in this round."""
    return tree.each(lambda t: t[0], algorithm.downlink(server, id[None]))


def example(
    algorithm: AnyAlgorithm, task: Task, shape: tuple[int, ...], augment: bool, clients: int = 1
) -> Any:
    """An upload as this algorithm makes them, from client 0's turn over two made-up samples."""
    kind = torch.uint8 if len(shape) == 3 else torch.float32
    samples = torch.zeros((2, *shape), dtype=kind, device=task.device)
    labels = torch.zeros(2, dtype=torch.int64, device=task.device)
    data = Data(samples, labels, torch.tensor(2, device=task.device))
    order = plan(0, 0, [0], [2], batch=2, epochs=algorithm.total_epochs, augment=augment, device=task.device)
    server = algorithm.server_init(task, clients)
    down = tree.row(algorithm.downlink(server, torch.tensor([0], device=task.device)), 0)
    with torch.no_grad():
        return algorithm.client_update(
            task, algorithm.client_init(task), down, data, tree.row(order, 0)
        ).upload
