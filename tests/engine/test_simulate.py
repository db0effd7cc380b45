from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms import COPFL, FedAvg, Local
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.evaluation import is_evaluated
from copfl.core.selection import BestRounds
from copfl.engine.mapping import Mapping, sequential, vmap
from copfl.engine.rounds import State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import RunError, UsageError
from copfl.testing import small_federation
from tests.slow import some
from tests.toys import divided, federation_of, rounds_of, slopes

SIZES = (5, 9, 3, 12)
EVERYBODY = torch.arange(4)
ALGORITHMS: dict[str, AnyAlgorithm] = {"copfl": COPFL(), "fedavg": FedAvg(), "local": Local()}
ENGINES = {"one by one": sequential(), "all at once": vmap(), "in chunks of 3": vmap(3)}


def same(a: object, b: object) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def record(state: State) -> Any:
    return state.server, state.clients.rows(EVERYBODY)


@pytest.mark.parametrize(
    ("name", "engine", "participation"),
    some(
        product(["copfl", "fedavg"], ["one by one", "in chunks of 3"], [1.0, 0.5]),
        [
            ("copfl", "one by one", 0.5),
            ("copfl", "in chunks of 3", 1.0),
            ("fedavg", "in chunks of 3", 0.5),
        ],
    ),
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(name: str, engine: str, participation: float) -> None:
    algorithm, mapping = ALGORITHMS[name], ENGINES[engine]
    task, federation = small_federation("batch", SIZES)
    whole, shown = rounds_of(
        algorithm, task, federation, 3, mapping, seed=3, batch=4, participation=participation, eval_every=1
    )

    state = begin(algorithm, task, 4)
    loop = simulate(
        Simulation(algorithm, task, federation, mapping, 3, 4), state, rounds=3, participation=participation
    )
    next(loop)
    saved = copy.deepcopy(state)
    next(loop)  # what the first run does after the copy does not matter to the copy
    task, federation = small_federation(
        "batch", SIZES
    )  # another process: nothing but the saved state is left
    rest = list(
        simulate(
            Simulation(algorithm, task, federation, mapping, 3, 4),
            saved,
            rounds=3,
            participation=participation,
        )
    )
    assert [one.number for one in rest] == [1, 2]
    assert same(record(saved), record(whole))
    for found, expected in zip(rest, shown[1:], strict=True):
        assert found.federation == expected.federation
        assert all(np.array_equal(found.clients[k], v, equal_nan=True) for k, v in expected.clients.items())


def test_a_finished_run_has_nothing_left_to_do() -> None:
    task, federation = small_federation("none", SIZES)
    state, _ = rounds_of(FedAvg(), task, federation, 2)
    assert list(simulate(Simulation(FedAvg(), task, federation, sequential()), state, rounds=2)) == []


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    task, federation = small_federation("batch", SIZES)
    a, b, c = (rounds_of(FedAvg(), task, federation, 2, batch=4, seed=seed)[0] for seed in (0, 0, 1))
    assert same(record(a), record(b))
    assert not same(record(a), record(c))


@pytest.mark.parametrize(("participation", "count"), [(1.0, 4), (0.5, 2), (0.51, 3), (0.1, 1), (0.75, 3)])
def test_how_many_take_part(participation: float, count: int) -> None:
    task, federation = small_federation("none", SIZES)
    _, shown = rounds_of(FedAvg(), task, federation, 3, vmap(3), participation=participation, eval_every=1)
    for one in shown:
        assert len(one.ids) == count
        assert all(len(values) == count for values in one.clients.values())
        assert one.clients["weight"].sum() == pytest.approx(1)
        # Weights come in the order of the ids: each client's share of the round's samples.
        sizes = np.array(SIZES)[one.ids]
        np.testing.assert_allclose(one.clients["weight"], sizes / sizes.sum())


def test_a_share_that_rounding_puts_above_a_whole_number_is_that_number() -> None:
    assert 0.28 * 25 > 7
    federation = federation_of(*[([[1.0, 2.0]], [1])] * 25)
    _, shown = rounds_of(FedAvg(), slopes(0.0, 0.0), federation, 1, vmap(), participation=0.28)
    assert len(shown[0].ids) == 7


def test_who_does_not_take_part_keeps_its_record() -> None:
    task, federation = small_federation("batch", SIZES)
    state = begin(COPFL(), task, 4)
    before = copy.deepcopy(record(state)[1])
    for one in simulate(Simulation(COPFL(), task, federation, vmap()), state, rounds=6, participation=0.5):
        after = copy.deepcopy(record(state)[1])
        for n in range(4):
            assert same(tree.row(before, n), tree.row(after, n)) == (n not in one.ids)
        before = after


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_client_with_broken_data_is_left_out_named_and_keeps_its_record(name: str, engine: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 2)), np.array([0, 1, 1] * 3)
    x[4] = np.nan  # in the second client's data
    task, algorithm, mapping = slopes(0.1, 0.2), ALGORITHMS[name], ENGINES[engine]
    state, shown = rounds_of(algorithm, task, divided(x, y, (3, 3, 3)), 3, mapping, eval_every=1)
    for one in shown:
        assert one.clients["healthy"].tolist() == [1, 0, 1]
        assert one.clients["weight"].tolist() == [0.5, 0, 0.5] or name == "copfl"
        assert np.isnan(one.clients["accuracy"]).tolist() == [False, True, False]
    everybody = torch.arange(3)
    clients = state.clients.rows(everybody)
    assert same(tree.row(clients, 1), algorithm.client_init(task))
    assert all(torch.isfinite(t).all() for t in tree.leaves((state.server, clients)) if t.is_floating_point())
    # The others learn as if it were not there.
    without, _ = rounds_of(
        algorithm, task, divided(np.delete(x, [3, 4, 5], 0), np.delete(y, [3, 4, 5]), (3, 3)), 3, mapping
    )
    if name == "local":  # who they are decides their shuffles, so only the first client is the same as before
        assert same(tree.row(clients, 0), tree.row(without.clients.rows(torch.arange(2)), 0))
    assert state.server.w.shape == without.server.w.shape


@dataclass
class Room:
    """A GPU that has room for so many clients at once, as far as an engine sees it."""

    room: int
    asked: list[int] = field(default_factory=list)

    def __call__(self, f: Callable[[Any], Any], given: Any, variant: object) -> Any:
        clients = len(given.ids)
        self.asked.append(clients)
        if clients > self.room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return f(given)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_where_a_gpu_has_no_room_fewer_go_together_from_then_on(name: str) -> None:
    algorithm, (task, federation) = ALGORITHMS[name], small_federation("batch", SIZES)
    little = Room(2)
    with pytest.warns(RuntimeWarning, match="out of memory with 3 clients batched; from now on 2 are"):
        state, shown = rounds_of(algorithm, task, federation, 3, vmap(3)._replace(call=little))
    assert little.asked == [
        3,
        2,
        2,
        2,
        2,
        2,
        2,
    ]  # the first part of the first round fails, and nothing after it
    plain, expected = rounds_of(algorithm, task, federation, 3, vmap(2))
    assert same(record(state), record(plain))
    assert all(
        np.array_equal(a.clients["loss"], b.clients["loss"]) for a, b in zip(shown, expected, strict=True)
    )


def test_out_of_memory_with_one_client_is_an_error_and_nothing_is_lost() -> None:
    task, federation = small_federation("batch", SIZES)
    state = begin(COPFL(), task, 4)
    before, little = copy.deepcopy(record(state)), Room(0)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(
            RunError, match=r"out of memory in the training of a single client \(CUDA out of memory\); use"
        ),
    ):
        next(simulate(Simulation(COPFL(), task, federation, vmap()._replace(call=little)), state, rounds=1))
    assert little.asked == [4, 2, 1]
    assert same(before, record(state))


def test_a_round_in_which_everybody_breaks_changes_nothing() -> None:
    task = slopes(0.1, 0.2)
    federation = federation_of(([[float("nan"), 1.0]], [1]), ([[float("inf"), 1.0]], [0]))
    for name, algorithm in ALGORITHMS.items():
        state, shown = rounds_of(algorithm, task, federation, 2)
        assert not shown[0].clients["healthy"].any(), name
        assert not shown[0].clients["weight"].any()
        if name != "local":
            assert torch.equal(state.server.w, task.initial)


def test_the_last_round_is_always_evaluated() -> None:
    task, federation = small_federation("none", SIZES)
    _, shown = rounds_of(FedAvg(), task, federation, 5, eval_every=2)
    assert ["accuracy" in one.clients for one in shown] == [False, True, False, True, True]
    assert all({"loss", "weight", "healthy", "bytes_up", "bytes_down"} <= one.clients.keys() for one in shown)


class Nowhere:
    def wanted(self, client: int) -> bool:
        return False


@pytest.mark.parametrize("keeps", ["nothing", "last", "best"])
def test_a_run_of_a_million_rounds_begins_at_once(keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(*about: int) -> bool:
        asked.append(about)
        assert len(asked) < 20
        return is_evaluated(*about)

    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr("copfl.engine.simulate.is_evaluated", counted)
    task, federation = small_federation("none", (4, 4, 4))
    simulation = Simulation(FedAvg(), task, federation, sequential(), batch=4)
    state = begin(simulation.algorithm, task, federation.clients)
    options: dict[str, Any] = {} if keeps == "nothing" else {"models": Nowhere()}
    if keeps == "best":
        options["best"] = BestRounds.none_of(task.metrics[0], federation.clients)
    assert next(simulate(simulation, state, rounds=10**6, **options)).number == 0


def test_evaluation_does_not_change_the_run() -> None:
    task, federation = small_federation("batch", SIZES)
    often, seldom = (rounds_of(COPFL(), task, federation, 3, eval_every=every)[0] for every in (1, 3))
    assert same(record(often), record(seldom))


@pytest.mark.job
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_evaluation_of_fewer_models_has_the_same_metrics(name: str, engine: str) -> None:
    task, federation = small_federation("batch", SIZES)
    seen = {
        eval_models: rounds_of(
            ALGORITHMS[name], task, federation, 2, ENGINES[engine], eval_models=eval_models
        )
        for eval_models in ("all", "personal", "final")
    }
    whole = seen["all"][1][-1].clients
    for eval_models, left in (("personal", {"_global"}), ("final", {"_before", "_global"})):
        state, shown = seen[eval_models]
        gone = {what + model for what in ("accuracy", "test_loss") for model in left}
        assert shown[-1].clients.keys() == whole.keys() - gone
        assert all(np.array_equal(value, whole[metric]) for metric, value in shown[-1].clients.items())
        assert same(record(state), record(seen["all"][0]))


def test_a_batch_larger_than_the_data_is_all_of_it() -> None:
    task, federation = small_federation("none", (3, 5))
    large, exact = (rounds_of(FedAvg(), task, federation, 2, batch=batch)[0] for batch in (1000, 5))
    assert same(large.server, exact.server)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"participation": 0.0}, "participation=0.0 must be above 0 and at most 1"),
        ({"participation": 1.5}, "participation=1.5 must be"),
        ({"batch": 0}, "batch=0 must be a number of at least 1"),
        ({"eval_every": 0}, "eval_every=0 must be a number of at least 1"),
        ({"seed": -1}, "seed=-1 must be a number of at least 0"),
        ({"eval_models": "befor"}, 'no eval_models "befor".* Known: all, final, personal'),
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, Any], message: str) -> None:
    task, federation = small_federation("none", SIZES)
    with pytest.raises(UsageError, match=message):
        rounds_of(FedAvg(), task, federation, 1, **wrong)


def test_an_engine_is_a_value() -> None:
    assert isinstance(sequential(), Mapping)
    assert (sequential().name, vmap(7).name, vmap(7).chunk) == ("sequential", "vmap", 7)
