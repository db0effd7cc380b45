from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copfl.audit.games import Game, Numbers, Players, Sampling, exact, remembered, sampled, shapley

NO_SHORTCUTS = Sampling(orders=400, truncate=0, converge=0)


def one_way(value: dict[Players, float]) -> Game:
    return lambda sets: np.array([[value[who]] for who in sets])


def adding(*worth: float) -> Game:
    """A game in which everybody brings the same whoever else is there; valued in two ways, the second doubled."""
    return lambda sets: np.array(
        [[sum(worth[n] for n in who), 2 * sum(worth[n] for n in who)] for who in sets]
    )


def gloves(sets: Sequence[Players]) -> Numbers:
    """0 and 1 hold a left glove, 2 a right one; a pair is worth 1."""
    return np.array([[float(2 in who and bool(who & {0, 1}))] for who in sets])


@pytest.mark.parametrize("how", [exact, lambda game, players: sampled(game, players, NO_SHORTCUTS)])
def test_where_gains_add_up_everybody_is_worth_what_it_brings(how: object) -> None:
    found = how(adding(3, 0, -1), [0, 1, 2])  # type: ignore[operator]
    np.testing.assert_allclose(found.value, [[3, 6], [0, 0], [-1, -2]], atol=1e-12)
    np.testing.assert_allclose(found.error, 0, atol=1e-12)


def test_the_gloves_by_hand() -> None:
    # Of the six orders, 0 completes the pair in one (2, 0, 1), 1 in one (2, 1, 0), and 2 in the four others.
    np.testing.assert_allclose(exact(gloves, [0, 1, 2]).value[:, 0], [1 / 6, 1 / 6, 4 / 6])


@given(st.lists(st.floats(-10, 10), min_size=16, max_size=16), st.integers(0, 2**31))
def test_the_laws(values: list[float], seed: int) -> None:
    players = [3, 5, 6, 9]
    sets = [frozenset(who) for size in range(5) for who in itertools.combinations(players, size)]
    worth = dict(zip(sets, values, strict=True))
    worth = {who: worth[who - {9}] for who in sets}  # 9 adds nothing to anybody
    worth |= {who: worth[(who - {5}) | {3}] for who in sets if 5 in who and 3 not in who}  # 3 and 5 are alike
    found = exact(one_way(worth), players)
    assert found.sets == 16
    gained = worth[frozenset(players)] - worth[frozenset()]
    assert found.value.sum() == pytest.approx(gained, abs=1e-9)  # efficiency
    assert found.value[0, 0] == pytest.approx(found.value[1, 0], abs=1e-9)  # symmetry
    assert found.value[3, 0] == pytest.approx(0, abs=1e-9)  # null player
    drawn = sampled(one_way(worth), players, NO_SHORTCUTS._replace(orders=8, seed=seed))
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


def test_an_order_is_cut_off_where_nothing_more_is_to_be_gained() -> None:
    asked: list[Players] = []

    def game(sets: Sequence[Players]) -> Numbers:  # the first to come brings all
        asked.extend(sets)
        return np.array([[float(bool(who))] for who in sets])

    found = sampled(game, range(5), Sampling(orders=5, truncate=0.01, converge=0, at_once=1))
    np.testing.assert_allclose(found.value[:, 0], 0.2)
    assert {len(who) for who in asked} == {0, 1, 5}
    assert found.sets == 7


def test_how_many_steps_are_valued_at_once_changes_nothing() -> None:
    one, many = (sampled(gloves, [0, 1, 2], Sampling(20, 0.01, 0, at_once=count)) for count in (1, 3))
    np.testing.assert_array_equal(one.value, many.value)
    assert one.sets <= many.sets


def test_a_round_that_changed_nothing_gives_nobody_anything() -> None:
    def game(sets: Sequence[Players]) -> Numbers:  # the odd ones cancel out
        return np.array([[0.001 * len(who) + (-1.0 if who == {0} else 0)] for who in sets])

    assert (shapley(game, [0, 1], Sampling(truncate=0.002)).value == 0).all()
    assert (shapley(game, [0, 1], Sampling(truncate=0)).value != 0).any()


def test_all_sets_are_valued_where_that_costs_no_more() -> None:
    assert shapley(gloves, [0, 1, 2], Sampling(orders=3, truncate=0)).orders == 0  # 8 sets, 9 steps
    assert shapley(gloves, [0, 1, 2], Sampling(orders=2, truncate=0, converge=0)).orders == 2


def test_enough_is_enough() -> None:
    found = sampled(adding(1, 1, 1), [0, 1, 2], Sampling(orders=300, truncate=0, converge=0.05))
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
