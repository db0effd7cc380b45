"""Samples that a client never trains on, so that it can judge with them: every so many-th of its own."""

from __future__ import annotations

from copfl.task import Batch, Data, Plan


def kept_back(plan: Plan, every: int = 5) -> Plan:
    """The plan without every so many-th of the client's samples."""

    def shorter(batch: Batch) -> Batch:
        ours = batch.index % every != every - 1
        return batch._replace(real=ours if batch.real is None else batch.real & ours)

    return tuple(tuple(shorter(batch) for batch in one) for one in plan)


def held_out(data: Data, every: int = 5) -> Data:
    """Those samples; none of fewer than `every`."""
    return Data(data.x[every - 1 :: every], data.y[every - 1 :: every], data.size // every)
