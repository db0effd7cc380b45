"""Clusters of clients: the loss that decides which model suits a client, and the model of a cluster."""

import torch
from torch import Tensor

from copfl.core.task import STATISTICS_BATCH, Data, Task


def training_loss(task: Task, w: Tensor, data: Data) -> Tensor:
    """[], the mean loss over a client's samples; batch norm uses their statistics, as in training."""
    total, count = w.new_zeros(()), w.new_zeros(())
    for x, y, valid in data.in_parts(STATISTICS_BATCH):
        logits, _ = task.forward(w, task.numbers(x), training=True, valid=valid)
        counted = task.criterion.counted(y, valid)
        assert counted is not None
        losses = task.criterion.losses(logits, task.criterion.at_risk(y, valid))
        total = total + torch.where(counted, losses, 0).sum()
        count = count + counted.sum()
    return total / count.clamp(min=1)


def selected(rows: Tensor, number: Tensor) -> Tensor:
    """The row of this number [], which may differ between batched clients."""
    return rows.index_select(0, number.reshape(1))[0]
