"""Arithmetic under a mask, by hand."""

from __future__ import annotations

import pytest
import torch

from copfl.parts.masks import shared, sharing_metrics, weighted
from tests.algorithms.chain import vector

MASK = torch.tensor([True, False, False])


def test_an_upload_holds_nothing_where_personal() -> None:
    upload = shared(MASK, vector(1, 2, 3))
    assert upload.values.tolist() == [0, 2, 3]
    assert upload.personal is MASK


def test_what_an_upload_adds_to_the_mean_over_the_sharers() -> None:
    w, weights, personal = weighted(shared(MASK, vector(1, 2, 3)), vector(0.5)[0])
    assert w.tolist() == [0, 1, 1.5]
    assert weights.tolist() == [0, 0.5, 0.5]
    assert personal.tolist() == [1, 0, 0]


def test_how_much_is_shared() -> None:
    """Of two clients one holds the first entry, both the last, which nobody averages then."""
    found = sharing_metrics(vector(1, 0, 2), torch.tensor([True, True, False]), vector(2)[0])
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"shared": 0.5, "averaged": 2 / 3, "shared_by_all": 1 / 3}
    )
