"""Arithmetic under a mask, by hand."""

from __future__ import annotations

import torch

from copfl.elementwise import either
from copfl.parts.masks import shared, weighed
from tests.algorithms.chain import vector

MASK = torch.tensor([True, False, False])


def test_own_where_personal() -> None:
    assert either(MASK, vector(1, 2, 3), vector(4, 5, 6)).tolist() == [1, 5, 6]


def test_an_upload_holds_nothing_where_personal() -> None:
    upload = shared(MASK, vector(1, 2, 3))
    assert upload.values.tolist() == [0, 2, 3]
    assert upload.personal is MASK


def test_what_an_upload_adds_to_the_mean_over_the_sharers() -> None:
    w, weights, personal = weighed(shared(MASK, vector(1, 2, 3)), vector(0.5)[0])
    assert w.tolist() == [0, 1, 1.5]
    assert weights.tolist() == [0, 0.5, 0.5]
    assert personal.tolist() == [1, 0, 0]
