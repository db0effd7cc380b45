from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms import ALGORITHMS
from copfl.audit import replay
from copfl.core import tree
from copfl.core.halves import DIFFERENCE, HALF
from copfl.engine.halves import ClientHalves
from copfl.errors import UsageError
from copfl.experiment.experiment import Experiment
from copfl.experiment.training import execute
from tests.audit.small import SIZES, experiment
from tests.slow import slow

ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "vmap": {"engine": "vmap", "chunk": 64},
    "in chunks": {"engine": "vmap", "chunk": 3},
}


def test_every_half_is_equally_likely_and_follows_from_seed_and_round() -> None:
    halves = ClientHalves(np.arange(4), 4)
    drawn = [tuple(sorted(halves.first(0, round).tolist())) for round in range(600)]
    counts = {pair: drawn.count(pair) for pair in set(drawn)}
    assert len(counts) == 6
    assert all(60 < count < 140 for count in counts.values())
    assert drawn == [tuple(sorted(halves.first(0, round).tolist())) for round in range(600)]
    assert drawn != [tuple(sorted(halves.first(1, round).tolist())) for round in range(600)]


def test_of_the_clients_that_take_part_half_are_in_the_first() -> None:
    halves = ClientHalves(np.array([2, 3, 5, 7, 11, 13, 17]), 5)
    for round in range(20):
        first = halves.first(3, round)
        assert len(first) == 2
        assert set(first.tolist()) <= set(halves.population.tolist())


def loss_with(e: Experiment, clients: Any, server: Any, n: int) -> float:
    down = tree.row(e.algorithm.downlink(server, torch.tensor([n])), 0)
    with torch.no_grad():
        model = e.algorithm.personal_model(e.task, tree.row(clients, n), down)
        return float(e.task.scores(model, tree.row(e.federation.train.rows([n]), 0)).loss)


# Quick: masks with every engine, and the others with one.
@pytest.mark.job
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        pytest.param(engine, name, marks=[] if name == "copfl" or engine == "vmap" else slow)
        for engine in ENGINES
        for name in ("fedavg", "fedper", "copfl")
    ],
)
def test_differences_are_those_of_the_servers_of_each_half(name: str, engine: str) -> None:
    plain = experiment(ALGORITHMS[name](), **ENGINES[engine])
    by_hand: list[list[float]] = []

    def observe(number: int, snapshot: replay.RoundSnapshot) -> None:
        first = set(ClientHalves(np.arange(4), 4).first(0, number).tolist())
        servers = [snapshot.server_of(frozenset(half)) for half in (first, set(range(4)) - first)]
        losses = [[loss_with(plain, snapshot.clients, server, n) for n in range(4)] for server in servers]
        by_hand.append([second - one for one, second in zip(*losses, strict=True)])

    replay.observed(plain, observe)
    result = execute(experiment(ALGORITHMS[name](), **ENGINES[engine], benefit=True), None)
    np.testing.assert_allclose(result.metric(DIFFERENCE), by_hand, atol=1e-12)
    assert (result.metric(HALF).sum(1) == 0).all()


@pytest.mark.job
@pytest.mark.parametrize("how", ENGINES.values())
def test_a_run_is_the_same_with_and_without(how: dict[str, Any]) -> None:
    with_halves = execute(experiment(ALGORITHMS["copfl"](), **how, benefit=True), None)
    without = execute(experiment(ALGORITHMS["copfl"](), **how), None)
    for a, b in zip(tree.leaves(with_halves.state.server), tree.leaves(without.state.server), strict=True):
        assert torch.equal(a, b)
    for record, plain in zip(with_halves.records, without.records, strict=True):
        rest = {name: v for name, v in record["per_client"].items() if name not in (HALF, DIFFERENCE)}
        assert rest == plain["per_client"]
        assert len(record["per_client"][HALF]) == len(plain["clients"])


@pytest.mark.job
def test_workers_give_the_same_differences() -> None:
    one, two = (
        execute(
            experiment(ALGORITHMS["fedavg"](), engine="vmap", chunk=2, workers=workers, benefit=True), None
        )
        for workers in (1, 2)
    )
    np.testing.assert_array_equal(one.metric(DIFFERENCE), two.metric(DIFFERENCE))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("local", "no part of a client's model is a mean"),
        ("fedpac", "depends on the number of uploads"),
        ("reads", "needs single uploads"),
    ],
)
def test_an_algorithm_without_a_mean_is_refused(name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        experiment(ALGORITHMS[name](), benefit=True)


def test_three_clients_have_no_halves() -> None:
    with pytest.raises(UsageError, match="at least 4 clients"):
        experiment(ALGORITHMS["fedavg"](), SIZES[:3], benefit=True, clients=3)
