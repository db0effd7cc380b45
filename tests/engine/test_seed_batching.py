from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from copfl.algorithms import ALGORITHMS, FedAvg
from copfl.core import Task, task_of, tree
from copfl.core.algorithm import AnyAlgorithm, rate_of, traits, with_rate
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import with_validation
from copfl.engine.mapping import vmap
from copfl.engine.rounds import Round, State
from copfl.engine.seed_batching import can_batch, run_batched
from copfl.engine.simulate import Executor, Simulation, begin, simulate
from copfl.errors import UsageError
from copfl.parts.server_steps import Momentum
from copfl.testing import small_federation
from copfl.wrappers.addons import with_addons
from copfl.wrappers.server_optimizer import ServerOptimizer
from tests.slow import slow

SIZES = (5, 9, 3)
ROUNDS = 2


def simulations_of(algorithm: AnyAlgorithm, sizes: tuple[int, ...] = SIZES) -> list[Simulation]:
    """Two simulations with different initial weights and seeds; the second has clients of these sizes."""
    how = traits(algorithm)
    task, federation = small_federation("batch", SIZES, needs=how.needs, trains=how.trains)
    other = replace(task, initial=1.25 * task.initial)
    another = federation
    if sizes != SIZES:
        another = small_federation("batch", sizes, needs=how.needs, trains=how.trains)[1]
    simulations = [
        Simulation(algorithm, t, federation, vmap(), n, batch=6) for n, t in enumerate((task, other))
    ]
    return [simulations[0], simulations[1]._replace(federation=another)]


def simulated(simulation: Simulation, executor: Executor | None = None) -> tuple[State, list[Round]]:
    state = begun(simulation)
    return state, list(simulate(simulation, state, rounds=ROUNDS, eval_every=ROUNDS, executor=executor))


def begun(simulation: Simulation) -> State:
    return begin(simulation.algorithm, simulation.task, simulation.federation.clients)


# Quick: a mean, a mixture and add-ons. As a job: masks, heads by class, own heads, pulls to a mean, control variates,
# clusters, stored models, public samples, a cut, and adapters. COPFL_SLOW=1: every algorithm.
KINDS = ("fedavg", "apfl", "addons")
JOBS = (
    *("copfl", "fedselect", "fedpac", "fedrep", "ditto"),
    *("scaffold", "ifca", "fedpoe", "ktpfl", "splitnn", "flex_lora"),
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in KINDS else pytest.mark.job if name in JOBS else slow)
        for name in (*ALGORITHMS, "addons")
    ],
)
def test_batched_seeds_equal_separate_ones(name: str) -> None:
    around = with_addons(ServerOptimizer(FedAvg(), Momentum()), ema=0.9, bn_stats="local")
    simulations = simulations_of(around if name == "addons" else ALGORITHMS[name]())
    equal_to_separate_ones(simulations)


@pytest.mark.job
@pytest.mark.parametrize("name", ["copfl", "fedpac", "apfl", "fedselect", "addons"])
def test_they_may_have_other_learning_rates_and_sizes(name: str) -> None:
    inner = ServerOptimizer(FedAvg(), Momentum())
    around = with_addons(inner, ema=0.9, bn_stats="local", lr_schedule="linear", lr_rounds=9)
    one, other = simulations_of(around if name == "addons" else ALGORITHMS[name](), (4, 11, 6))
    faster = with_rate(other.algorithm, 2 * float(rate_of(other.algorithm) or 0))
    equal_to_separate_ones([one, other._replace(algorithm=faster)])


def test_they_may_have_validation_samples_of_other_sizes() -> None:
    held_out = [
        simulation._replace(
            federation=FederatedData(
                federation.dataset, with_validation(federation.partition, 0.4, federation.dataset, 0)
            )
        )
        for simulation in simulations_of(FedAvg(), (4, 11, 6))
        for federation in [simulation.federation]
    ]
    equal_to_separate_ones(held_out)
    _, (*_, last) = simulated(held_out[0])
    assert np.isfinite(last.clients["accuracy_validation"]).all()
    assert not can_batch([held_out[0], simulations_of(FedAvg())[1]])  # one with, one without


def equal_to_separate_ones(simulations: list[Simulation]) -> None:
    assert can_batch(simulations)
    alone = [simulated(simulation) for simulation in simulations]
    both = run_batched(simulations, [partial(simulated, simulation) for simulation in simulations])
    everybody = torch.arange(len(SIZES))
    for (state, shown), (other, shown_too) in zip(alone, both, strict=True):
        records = (state.server, state.clients.rows(everybody)), (other.server, other.clients.rows(everybody))
        for (path, expected), (_, found) in zip(*map(tree.named, records), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True, msg=path)
        for expected_round, found_round in zip(shown, shown_too, strict=True):
            assert expected_round.clients.keys() == found_round.clients.keys()
            for metric, values in expected_round.clients.items():
                np.testing.assert_allclose(
                    found_round.clients[metric], values, rtol=1e-9, atol=1e-9, err_msg=metric
                )


def test_only_simulations_with_one_program_are_batched() -> None:
    one, other = simulations_of(FedAvg())
    assert can_batch([one, other])
    assert not can_batch([one, other._replace(batch=5)])
    assert not can_batch([one, other._replace(algorithm=FedAvg(epochs=2))])
    assert not can_batch([one._replace(mapping=vmap(5)), other._replace(mapping=vmap(5))])  # six clients
    assert not can_batch([one, other._replace(mapping=vmap(2))])  # it would train a round in several parts


def test_an_error_in_one_ends_all() -> None:
    simulations = simulations_of(FedAvg())

    def stopping(simulation: Simulation, executor: Executor) -> None:
        for round in simulate(simulation, begun(simulation), rounds=ROUNDS, executor=executor):
            if simulation.seed == 1 and round.number == 1:
                raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run_batched(simulations, [partial(stopping, simulation) for simulation in simulations])


def test_as_many_rounds_for_each() -> None:
    simulations = simulations_of(FedAvg())

    def some(simulation: Simulation, executor: Executor) -> list[Round]:
        rounds = ROUNDS + simulation.seed
        return list(simulate(simulation, begun(simulation), rounds=rounds, executor=executor))

    with pytest.raises(UsageError, match="the same number of rounds"):
        run_batched(simulations, [partial(some, simulation) for simulation in simulations])


@pytest.mark.parametrize("differs", [{"eval_every": 2}, {"participation": 0.3}])
def test_the_same_evaluations_and_steps_for_each(differs: dict[str, Any]) -> None:
    simulations = simulations_of(FedAvg())

    def some(simulation: Simulation, executor: Executor) -> list[Round]:
        more = differs if simulation.seed else {}
        return list(simulate(simulation, begun(simulation), rounds=ROUNDS, executor=executor, **more))

    with pytest.raises(UsageError, match="the same rounds, evaluations and steps"):
        run_batched(simulations, [partial(some, simulation) for simulation in simulations])


def test_what_is_drawn_leaves_the_callers_generator_alone() -> None:
    simulations = simulations_of(FedAvg())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_batched(simulations, [partial(simulated, simulation) for simulation in simulations])
    assert torch.equal(torch.get_rng_state(), before)


def test_models_with_different_frozen_layers_are_not_one_batch() -> None:
    def task_with(front: float) -> Task:
        frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        nn.init.constant_(frozen.weight, front)
        return task_of(nn.Sequential(frozen, nn.Linear(2, 2)), 2, head="1")

    _, federation = small_federation("batch", SIZES)

    def alike(*fronts: float) -> bool:
        return can_batch([Simulation(FedAvg(), task_with(f), federation, vmap(), 0, 4) for f in fronts])

    assert alike(0.5, 0.5)
    assert not alike(0.5, 0.25)
