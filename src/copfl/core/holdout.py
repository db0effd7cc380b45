"""Samples that a client does not train on, so that it can judge with them: every so many-th of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from copfl.core.task import Batch, Data, Plan


def kept_back(plan: Plan, every: int = 5, which: Tensor | None = None) -> Plan:
    """The plan without every so many-th of the client's samples: the last of so many, or `which`; -1 is none."""
    held: Tensor | int = every - 1 if which is None else which

    def shorter(batch: Batch) -> Batch:
        ours = batch.index % every != held
        return batch._replace(valid=ours if batch.valid is None else batch.valid & ours)

    return tuple(tuple(shorter(batch) for batch in one) for one in plan)


def held_out(data: Data, every: int = 5, which: Tensor | None = None) -> Data:
    """Those samples, which may be none where there are fewer than `every`."""
    if which is None:
        return Data(data.x[every - 1 :: every], data.y[every - 1 :: every], data.size // every)
    rows = torch.arange(-(-data.y.shape[0] // every), device=data.y.device) * every + which
    place = rows.clamp(max=data.y.shape[0] - 1)
    return Data(data.x[place], data.y[place], (rows < data.size).sum())
