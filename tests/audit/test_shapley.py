from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copfl.audit.shapley import Game, Players, Sampling, exact, remembered, sampled, shapley
from copfl.stats import Numbers

NO_SHORTCUTS = Sampling(orders=400, truncate=0, converge=0)


def one_way(values: dict[Players, float]) -> Game:
    return lambda sets: np.array([[values[who]] for who in sets])


def additive(*gains: float) -> Game:
    """A game in which every player adds the same to any set; valued in two ways, the second doubled."""
    return lambda sets: np.array(
        [[sum(gains[n] for n in who), 2 * sum(gains[n] for n in who)] for who in sets]
    )


def gloves(sets: Sequence[Players]) -> Numbers:
    """0 and 1 have a left glove, 2 a right one; a pair has value 1."""
    return np.array([[float(2 in who and bool(who & {0, 1}))] for who in sets])


@pytest.mark.parametrize("how", [exact, lambda game, players: sampled(game, players, NO_SHORTCUTS)])
def test_in_an_additive_game_the_value_is_what_a_player_adds(how: object) -> None:
    found = how(additive(3, 0, -1), [0, 1, 2])  # type: ignore[operator]
    np.testing.assert_allclose(found.value, [[3, 6], [0, 0], [-1, -2]], atol=1e-12)
    np.testing.assert_allclose(found.error, 0, atol=1e-12)


def test_the_gloves_by_hand() -> None:
    # Of the six orders, 0 completes the pair in one (2, 0, 1), 1 in one (2, 1, 0), and 2 in the four others.
    np.testing.assert_allclose(exact(gloves, [0, 1, 2]).value[:, 0], [1 / 6, 1 / 6, 4 / 6])


@given(st.lists(st.floats(-10, 10), min_size=16, max_size=16), st.integers(0, 2**31))
def test_the_laws(numbers: list[float], seed: int) -> None:
    players = [3, 5, 6, 9]
    sets = [frozenset(who) for size in range(5) for who in itertools.combinations(players, size)]
    values = dict(zip(sets, numbers, strict=True))
    values = {who: values[who - {9}] for who in sets}  # 9 adds nothing to anybody
    values |= {
        who: values[(who - {5}) | {3}] for who in sets if 5 in who and 3 not in who
    }  # 3 and 5 are alike
    found = exact(one_way(values), players)
    gained = values[frozenset(players)] - values[frozenset()]
    assert found.value.sum() == pytest.approx(gained, abs=1e-9)  # efficiency
    assert found.value[0, 0] == pytest.approx(found.value[1, 0], abs=1e-9)  # symmetry
    assert found.value[3, 0] == pytest.approx(0, abs=1e-9)  # null player
    drawn = sampled(one_way(values), players, NO_SHORTCUTS._replace(orders=8, seed=seed))
    assert drawn.value.sum() == pytest.approx(gained, abs=1e-9)
    assert drawn.value[3, 0] == pytest.approx(0, abs=1e-9)


def test_sampled_orders_come_near_the_exact_values_and_say_how_near() -> None:
    found = sampled(gloves, [0, 1, 2], NO_SHORTCUTS)
    assert found.orders == 400
    wrong = np.abs(found.value[:, 0] - [1 / 6, 1 / 6, 4 / 6])
    assert (wrong < 4 * found.error[:, 0]).all()
    assert (found.error < 0.03).all()


def test_everybody_comes_first_equally_often() -> None:
    seen: list[Players] = []

    def game(sets: Sequence[Players]) -> Numbers:
        seen.extend(sets)
        return np.array([[float(len(who))] for who in sets])

    sampled(game, [0, 1, 2, 3], Sampling(orders=4, truncate=0, converge=0))
    assert {who for who in seen if len(who) == 1} == {frozenset({n}) for n in range(4)}


def test_an_order_is_truncated_at_the_value_of_all() -> None:
    asked: list[Players] = []

    def game(sets: Sequence[Players]) -> Numbers:  # the first player adds everything
        asked.extend(sets)
        return np.array([[float(bool(who))] for who in sets])

    found = sampled(game, range(5), Sampling(orders=5, truncate=0.01, converge=0, batch=1))
    np.testing.assert_allclose(found.value[:, 0], 0.2)
    assert {len(who) for who in asked} == {0, 1, 5}
    assert len(set(asked)) == 7


def test_the_batch_size_changes_nothing() -> None:
    one, many = (sampled(gloves, [0, 1, 2], Sampling(20, 0.01, 0, batch=count)) for count in (1, 3))
    np.testing.assert_array_equal(one.value, many.value)


def test_a_round_without_change_has_zero_values() -> None:
    def game(sets: Sequence[Players]) -> Numbers:  # the gains cancel
        return np.array([[0.001 * len(who) + (-1.0 if who == {0} else 0)] for who in sets])

    assert (shapley(game, [0, 1], Sampling(truncate=0.002)).value == 0).all()
    assert (shapley(game, [0, 1], Sampling(truncate=0)).value != 0).any()


def test_all_sets_are_valued_where_that_costs_no_more() -> None:
    assert shapley(gloves, [0, 1, 2], Sampling(orders=3, truncate=0)).orders == 0  # 8 sets, 9 steps
    assert shapley(gloves, [0, 1, 2], Sampling(orders=2, truncate=0, converge=0)).orders == 2


def test_sampling_ends_when_it_has_converged() -> None:
    found = sampled(additive(1, 1, 1), [0, 1, 2], Sampling(orders=300, truncate=0, converge=0.05))
    assert found.orders == 3


def test_no_set_is_valued_twice() -> None:
    asked: list[Players] = []

    def game(sets: Sequence[Players]) -> Numbers:
        asked.extend(sets)
        return np.array([[float(len(who))] for who in sets])

    once = remembered(game)
    a, b = frozenset({1}), frozenset({1, 2})
    assert once([a, b, a]).tolist() == [[1], [2], [1]]
    assert once([b]).tolist() == [[2]]
    assert asked == [a, b]
