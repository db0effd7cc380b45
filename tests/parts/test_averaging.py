"""The personal and the shared entries of w: cut, combined, and layer by layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from copfl.core.task import task_of
from copfl.parts.averaging import active_part, combined, layers, personal_of, shared_of, with_shared
from copfl.testing import small_federation
from tests.core.test_task import network


def test_personal_and_shared_entries_combine_to_the_vector() -> None:
    task = task_of(network(), 4, dtype=torch.float64)
    w = torch.arange(float(task.layout.size), dtype=torch.float64)
    for parts in ((), ("head",), ("norms",), ("body",), ("0.bias", "head"), ("head", "body", "buffers")):
        personal, shared = personal_of(task, parts, w), shared_of(task, parts, w)
        local = task.local(*parts)
        assert personal.tolist() == w[local].tolist()
        assert shared.tolist() == w[~local].tolist()
        assert torch.equal(combined(task, parts, personal, shared), w)
        assert torch.equal(with_shared(task, parts, w, -shared), torch.where(local, w, -w))


def test_the_active_mask_of_one_part() -> None:
    task = task_of(network(), 4)
    assert active_part(task, "all") is None
    head = active_part(task, "head")
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
