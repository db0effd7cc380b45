from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms import COPFL, FedPer
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.optim import Adam
from copfl.engine import sizes
from copfl.engine.mapping import sequential, vmap
from copfl.engine.sizes import groups_of
from copfl.testing import small_federation
from tests.slow import slow
from tests.toys import rounds_of

SIZES = (5, 40, 3, 12, 37)


def cost_of(steps: list[int], cuts: list[int], overhead: float) -> float:
    """Of groups of falling clients, written down as its definition."""
    return sum(steps[a] * (overhead + b - a) for a, b in itertools.pairwise([0, *cuts, len(steps)]))


def test_no_other_cuts_are_cheaper() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        steps = sorted(rng.integers(1, 30, rng.integers(1, 8)).tolist(), reverse=True)
        overhead = float(rng.uniform(0, 5))
        cuts, cost = sizes._cheapest_cuts(steps, overhead)
        every = (
            list(some)
            for count in range(sizes.MOST_GROUPS)
            for some in itertools.combinations(range(1, len(steps)), count)
        )
        assert cost == pytest.approx(min(cost_of(steps, some, overhead) for some in every))
        assert cost == pytest.approx(cost_of(steps, cuts, overhead))


def test_a_giant_is_a_group_of_its_own_and_equal_clients_are_one() -> None:
    giant = groups_of(np.array([100, 100, 5_580, 100]), 10, "cuda_graph")
    assert [rows.tolist() for rows in giant] == [[2], [0, 1, 3]]
    for counts, engine in (([80] * 9, "cuda_graph"), ([80, 79, 78], "vmap"), ([800, 1], "sequential")):
        assert [rows.tolist() for rows in groups_of(np.array(counts), 10, engine)] == [
            list(range(len(counts)))
        ]


@pytest.mark.job
@pytest.mark.parametrize(
    ("algorithm", "participation"),
    [
        (COPFL(), 0.6),
        (FedPer(Adam(keep=True)), 1.0),
        pytest.param(COPFL(), 1.0, marks=slow),
        pytest.param(FedPer(Adam(keep=True)), 0.6, marks=slow),
    ],
    ids=["copfl, some", "kept Adam, all", "copfl, all", "kept Adam, some"],
)
def test_groups_agree_with_one_client_after_the_other(
    algorithm: AnyAlgorithm, participation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sizes.OVERHEAD, "vmap", 0.0)
    assert len(groups_of(np.array(SIZES), 4, "vmap")) > 1
    task, federation = small_federation("batch", SIZES)
    how: dict[str, Any] = {"batch": 4, "participation": participation, "eval_every": 1}
    state, shown = rounds_of(algorithm, task, federation, 2, sequential(), **how)
    other, grouped = rounds_of(algorithm, task, federation, 2, vmap(), **how)
    everybody = torch.arange(len(SIZES))
    expected, actual = (s.clients.rows(everybody) for s in (state, other))
    pairs = zip(tree.named((state.server, expected)), tree.leaves((other.server, actual)), strict=True)
    for (path, value), of_groups in pairs:
        torch.testing.assert_close(of_groups, value, rtol=0, atol=1e-9, msg=path)
    for one, too in zip(shown, grouped, strict=True):
        assert one.ids.tolist() == too.ids.tolist()
        for name, values in one.clients.items():
            np.testing.assert_allclose(too.clients[name], values, rtol=1e-9, atol=1e-9, err_msg=name)
