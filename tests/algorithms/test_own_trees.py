"""Trees that a site grows for itself: as many as its own rows reward, and nothing of them leaves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from copfl.algorithms import Trees
from copfl.algorithms.trees import BEFORE
from copfl.core import Task, task_of, tree
from copfl.core.algorithm import epochs_in
from copfl.core.criteria import regression
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine.mapping import sequential, vmap
from copfl.errors import UsageError
from copfl.models.trees import Trees as Model
from copfl.parts.boosting import rewarded
from copfl.testing import check_algorithm
from copfl.wrappers.base import Wrapper
from tests.toys import rounds_of

SHARED, OWN, DEPTH, SITES, ROWS = 6, 4, 2, 4, 80
AFTER = BEFORE + SHARED * DEPTH  # rounds until all shared trees have grown
HOW = Trees(rate=0.3, own=OWN, own_rate=0.5, own_penalty=2, least=5, bins=8)
Floats = NDArray[np.float64]


def federation_of(strange: int) -> tuple[FederatedData, Floats, Floats]:
    """Sites with the same law but for one, where the third column counts."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(SITES * ROWS, 3))
    site = np.repeat(np.arange(SITES), ROWS)
    y = np.where(x[:, 0] > 0, 1.0, -1.0) + 0.3 * rng.normal(size=len(x))
    y = y + (site == strange) * np.where(x[:, 2] > 0, 1.5, -1.5)
    parts = tuple(np.split(np.arange(len(x)), SITES))
    samples = Samples(x, y)
    dataset = Dataset("toy", samples, samples, ("y",), kind="regression")
    return FederatedData(dataset, Partition(parts, parts, "by hand", {})), x, y


def task_for(trees: int = SHARED + OWN) -> Task:
    return task_of(Model((3,), 1, trees, DEPTH), 1, criterion=regression(), dtype=torch.float64)


def grown(how: Trees, rounds: int, mapping: Any = None) -> Any:
    return rounds_of(how, task_for(), federation_of(strange=1)[0], rounds, mapping or vmap(8))[0]


def kept(state: Any) -> list[int]:
    """How many own trees of each site say something."""
    records = state.clients.rows(torch.arange(SITES))
    return [int((forest.value != 0).any(-1).any(-1).sum()) for forest in map(row_of(records), range(SITES))]


def row_of(records: Any) -> Any:
    return lambda n: tree.row(records.trees, n)


def test_a_site_that_differs_keeps_trees_of_its_own() -> None:
    assert kept(grown(HOW, AFTER)) == [0] * SITES
    # The others keep some, too: six shared trees leave something to all of them.
    assert kept(grown(HOW, AFTER + 1))[1] >= 2


@pytest.mark.job
def test_its_model_has_the_shared_trees_then_its_own() -> None:
    state, task = grown(HOW, AFTER + 1), task_for()
    _, x, y = federation_of(strange=1)
    errors = []
    for how in (HOW, Trees(rate=0.3, least=5, bins=8)):
        state = rounds_of(how, task_for(SHARED + how.own), federation_of(1)[0], AFTER + 1, vmap(8))[0]
        record = tree.row(state.clients.rows(torch.arange(SITES)), 1)
        down = tree.row(how.downlink(state.server, torch.arange(SITES)), 1)
        task = task_for(SHARED + how.own)
        rows = slice(ROWS, 2 * ROWS)
        said = task.predict(how.personal_model(task, record, down), torch.from_numpy(x[rows]))[:, 0].numpy()
        errors.append(float(((said - y[rows]) ** 2).mean()))
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.job
def test_own_trees_are_the_same_in_every_engine() -> None:
    one, other = (grown(HOW, AFTER + 1, mapping) for mapping in (vmap(3), sequential()))
    assert kept(one) == kept(other)
    ours, theirs = (state.clients.rows(torch.arange(SITES)).trees.value for state in (one, other))
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_after_the_last_shared_tree_nothing_is_sent() -> None:
    state, task, federation = grown(HOW, AFTER), task_for(), federation_of(1)[0]
    down = tree.row(HOW.downlink(state.server, torch.arange(SITES)), 0)
    client = tree.row(state.clients.rows(torch.arange(SITES)), 0)
    data = tree.row(federation.train.rows([0]), 0)
    from copfl.core.algorithm import next_plan

    order = next_plan(HOW, task, tree.repeat(client, 1), AFTER, [0], [ROWS], seed=0, batch=32)
    upload = HOW.client_update(task, client, down, data, tree.row(order, 0)).upload
    assert not upload.sums.any()
    again = grown(HOW, AFTER + 1).server
    assert torch.equal(again.grown.forest.value, state.server.grown.forest.value)


def test_the_order_of_the_folds_comes_in_the_rounds_after_the_shared_trees() -> None:
    task = task_for()
    rounds = (0, AFTER - 1, AFTER, AFTER + 9)
    assert [epochs_in(HOW, task, n) for n in rounds] == [0, 0, 2, 2]  # no order where all rows are used
    assert [epochs_in(replace(HOW, rows=0.5), task, n) for n in rounds] == [1, 1, 2, 2]
    assert epochs_in(Wrapper(HOW), task, AFTER) == 2
    assert epochs_in(Trees(), task, 10**6) == 0


def test_a_site_keeps_the_fewest_trees_within_a_standard_error_of_the_best() -> None:
    noise = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    none, one = torch.ones(4).double(), 0.9 + 0.1 * noise
    everywhere = torch.ones(4).double()

    def kept_of(*losses: torch.Tensor, counts: torch.Tensor = everywhere) -> int:
        return int(rewarded(torch.stack(losses), counts))

    assert kept_of(none, one) == 1  # 0.1 with an error of 0.058
    assert kept_of(none, one, 0.8 + noise) == 0  # 0.2 with an error of 0.58
    assert kept_of(none, one, one - 0.05) == 2  # the difference to one tree has no error
    assert kept_of(none, one, one - 0.05 * (1 + noise)) == 2  # 0.05 with an error of 0.029
    assert kept_of(none, one, one - 0.02 + 0.1 * noise) == 1  # 0.02 with an error of 0.058
    assert kept_of(none, none) == 0
    assert kept_of(none, torch.tensor([0.0, 0.0, 9.0, 9.0]).double(), counts=everywhere * (noise > 9)) == 0


def test_laws() -> None:
    check_algorithm(Trees(own=2, least=2, folds=2), rounds=4)


def test_shared_trees_come_first() -> None:
    with pytest.raises(UsageError, match=r"algorithm.own=10 must be below model.trees=10"):
        Trees(own=10).server_init(task_for(), 3)
    with pytest.raises(UsageError, match="alone=true grows all trees at the sites"):
        Trees(own=1, alone=True)
    assert HOW.trained_alone().own == 0
