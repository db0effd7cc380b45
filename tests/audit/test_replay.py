from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms import ALGORITHMS
from copfl.audit import replay
from copfl.core import tree
from copfl.experiment.experiment import Experiment
from copfl.experiment.result import Result
from copfl.experiment.training import execute
from tests.audit.small import SIZES, experiment

ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "vmap": {"engine": "vmap", "chunk": 64},
    "in chunks": {"engine": "vmap", "chunk": 3},
    "some clients": {"engine": "vmap", "chunk": 64, "participation": 0.5},
}


def snapshots_of(e: Experiment) -> list[replay.RoundSnapshot]:
    """The rounds of a run; the records of their clients are those of the last."""
    snapshots: list[replay.RoundSnapshot] = []
    replay.observed(e, lambda number, snapshot: snapshots.append(snapshot))
    return snapshots


def values_of(e: Experiment) -> tuple[list[Any], Result]:
    """The values of no client and of all in each round, and the run."""
    values: list[Any] = []
    result, _ = replay.observed(
        e, lambda number, snapshot: values.append(snapshot.value([frozenset(), frozenset(snapshot.players)]))
    )
    return values, result


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(("copfl", engine) for engine in ENGINES),
        ("fedavg", "in chunks"),
        ("fedce", "sequential"),
        ("fedpac", "in chunks"),
    ],
)
def test_of_all_uploads_the_servers_own_step_comes_out_bit_for_bit(name: str, engine: str) -> None:
    e = experiment(ALGORITHMS[name](), **ENGINES[engine], rounds=3)
    seen: list[list[int]] = []
    result, exact = replay.observed(e, lambda number, snapshot: seen.append(snapshot.players))
    assert exact
    plain = execute(e, None)
    assert same(result.state.server, plain.state.server)
    assert result.records == plain.records
    assert seen == [record["clients"] for record in plain.records]


def test_a_subsets_server_by_hand() -> None:
    snapshot = snapshots_of(experiment(ALGORITHMS["fedavg"]()))[1]
    parts = [received.summands for received in snapshot.received]  # n · w and n, of one client each
    by_hand = (parts[0].w[0] + parts[2].w[0]) / (SIZES[0] + SIZES[2])
    torch.testing.assert_close(snapshot.server_of(frozenset({0, 2})).w, by_hand)
    assert snapshot.server_of(frozenset()) is snapshot.server


@pytest.mark.job
@pytest.mark.parametrize("name", ["copfl", "fedavg", "ditto"])
def test_without_the_last_client_is_the_federation_of_the_others(name: str) -> None:
    left = replay.without(experiment(ALGORITHMS[name]()), [3])
    others = execute(experiment(ALGORITHMS[name](), SIZES[:3]), None)
    assert same(left.state.server, others.state.server)
    np.testing.assert_array_equal(left.accuracy[:, :3], others.accuracy)


def test_without_nobody_is_the_run() -> None:
    e = experiment(ALGORITHMS["copfl"](), engine="vmap")
    assert replay.without(e, []).records == execute(e, None).records


def test_the_value_of_all_is_the_next_rounds_accuracy_before_training() -> None:
    for how in ENGINES.values():
        value, result = values_of(experiment(ALGORITHMS["copfl"](), **{**how, "participation": 1.0}))
        before, shared = result.accuracy_before.mean(1), result.accuracy_global.mean(1)
        np.testing.assert_allclose([w[1] for w in value[:-1]], np.stack([shared, before], 1)[1:])
        np.testing.assert_allclose(value[1][0][0], value[0][1][0])  # of no client: the global model before


def test_many_servers_at_once_are_as_sequential() -> None:
    for how in ENGINES.values():
        (snapshot,) = snapshots_of(experiment(ALGORITHMS["copfl"](), **how, rounds=1))
        sets = [frozenset(), frozenset({0}), frozenset({1, 3}), frozenset(range(4))]
        together = snapshot.value(sets)
        assert together.shape == (4, 2)
        np.testing.assert_allclose(together, np.concatenate([snapshot.value([who]) for who in sets]))
