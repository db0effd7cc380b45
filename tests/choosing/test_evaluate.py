"""The losses on rows that were held out: of folds that train as one batch they are those of separate ones."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import copfl
from copfl.choosing import evaluate as losses
from copfl.choosing.folds import folds
from copfl.engine import seed_batching
from tests.choosing.test_first_run import sites

ALIKE = sites("class", rows=30)
# One large client: the others would be padded to it.
UNEQUAL = [*((x[:15], y[:15]) for x, y in sites("class", count=9)), *sites("class", count=1, rows=400)]


@pytest.mark.job
@pytest.mark.parametrize(("data", "is_batched"), [(ALIKE, True), (UNEQUAL, False)])
def test_folds_of_one_batch_lose_what_separate_ones_lose(data: list[Any], is_batched: bool) -> None:
    e = copfl.run("levels", data, rounds=3, rivals=False).experiment
    run = dataclasses.replace(e.run, run=dataclasses.replace(e.run.run, chunk=0))  # as before it was prepared
    samples = e.federation.dataset
    held_out = folds(e.federation.partition, samples, seed=0)
    every = range(held_out.number)
    with patch.object(losses, "run_batched", side_effect=seed_batching.run_batched) as batched:
        together = losses.to_its_end(run, held_out, samples, every)
    assert batched.called == is_batched
    with patch.object(losses, "can_batch", return_value=False):
        separate = losses.to_its_end(run, held_out, samples, every)
    for one, other in zip(together.losses, separate.losses, strict=True):
        assert np.isfinite(one).all()
        assert np.allclose(one, other, rtol=1e-5)
