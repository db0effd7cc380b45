"""What stays home and what is shared: apart, together again, and layer by layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from copfl.core.task import task_of
from copfl.parts.sharing import apart, joined, layers, only, part
from copfl.testing import small_federation
from tests.core.test_task import network


def test_parts_come_apart_and_together_again() -> None:
    task = task_of(network(), 4, dtype=torch.float64)
    w = torch.arange(float(task.layout.size), dtype=torch.float64)
    for personal in ((), ("head",), ("norms",), ("body",), ("0.bias", "head"), ("head", "body", "buffers")):
        own, shared = part(task, personal, w, local=True), part(task, personal, w, local=False)
        local = task.local(*personal)
        assert own.tolist() == w[local].tolist()
        assert shared.tolist() == w[~local].tolist()
        assert torch.equal(joined(task, personal, own, shared), w)
        assert [t.tolist() for t in apart(task, personal, w)] == [own.tolist(), shared.tolist()]


def test_only_one_part_may_move() -> None:
    task = task_of(network(), 4)
    assert only(task, "all") is None
    head = only(task, "head")
    assert head is not None
    assert head.tolist() == task.where("head")[: task.d].tolist()


@pytest.mark.parametrize("personal", [(), ("head",), ("norms",)])
@pytest.mark.parametrize("buffers", ["local", "average"])
def test_layers_cover_what_is_shared(personal: tuple[str, ...], buffers: str) -> None:
    task = dataclasses.replace(small_federation("batch", (4, 4))[0], buffers=buffers)
    spans = layers(task, personal)
    assert [start for start, *_ in spans] == [0, *(stop for _, stop, _ in spans[:-1])]
    assert spans[-1][1] == int((~task.local(*personal)).sum())
    assert all(trained for *_, trained in spans) is (buffers == "local")
