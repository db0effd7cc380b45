"""A run on another device than the host's: nothing is computed of tensors in both places, the numbers are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.algorithms import ALGORITHMS
from tests.elsewhere import THERE, elsewhere
from tests.kinds import quick

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((72, 3)).astype("float32")
TABLE = {"x": ROWS, "y": (ROWS[:, 0] > 0).astype(int), "group": np.repeat(np.arange(3), 24)}
VALUES = {**TABLE, "y": ROWS @ [1, 0, -1]}
TEXTS = {**TABLE, "x": np.array([f"a{int(row[0] > 0)} b{int(row[1] > 0)} c" for row in ROWS])}


def test_what_a_gpu_refuses_is_refused() -> None:
    with elsewhere():
        there = torch.zeros(3, device=THERE)
        assert torch.equal((there + 1).cpu(), torch.ones(3))
        assert torch.equal(torch.tensor([1.0, 2.0], device=THERE).to("cpu"), torch.tensor([1.0, 2.0]))
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()


def losses(algorithm: str | None, data: Any, **settings: Any) -> np.ndarray[Any, Any]:
    return copfl.run(algorithm, data, **{"rivals": False, **settings}).metric("test_loss")


# Of a table: without adapters, public samples and words. These stand for vectors, masks, mixtures and equations.
OF_TABLES = [n for n in ALGORITHMS if not n.endswith("_lora") and n not in ("ktpfl", "wide_levels")]


@pytest.mark.parametrize("name", quick(OF_TABLES, ("copfl", "fedpoe", "levels")))
def test_every_algorithm_gives_the_same_elsewhere(name: str) -> None:
    with elsewhere():
        here, there = (losses(name, TABLE, rounds=3, device=device) for device in ("cpu", "meta"))
    np.testing.assert_array_equal(here, there)


@pytest.mark.job
@pytest.mark.parametrize(
    ("algorithm", "data", "settings"),
    [
        ("fedavg_ft", TABLE, {"find_rounds": "first", "rounds": 2, "local_baseline": True, "rivals": True}),
        ("wide_levels", TEXTS, {"model": "words", "rounds": 4}),
        ("trees", VALUES, {"rounds": 3}),
        ("levels", VALUES, {"rounds": 3}),
        ("fedavg", TABLE, {"rounds": 2, "select": "best", "validation": 0.2, "store": "disk"}),
    ],
    ids=["search", "texts", "trees", "levels", "best"],
)
def test_what_a_run_does_beside_its_rounds(
    algorithm: str, data: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    with elsewhere():
        here, there = (
            losses(algorithm, data, device=device, out=tmp_path / device, **settings)
            for device in ("cpu", "meta")
        )
    np.testing.assert_array_equal(here, there)
