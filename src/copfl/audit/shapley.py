"""Shapley values of a set function: exactly, or from sampled orders that are truncated (GTG-Shapley).

A game maps sets of players to their values. It may value a set in several ways at once, so it returns a row
per set; players are whole numbers.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from copfl.stats import Numbers

Players = frozenset[int]
Game = Callable[[Sequence[Players]], Numbers]  # [sets, ways]


class Sampling(NamedTuple):
    """How orders are sampled, after GTG-Shapley (Liu et al. 2022)."""

    orders: int = 40  # at most
    truncate: float = 0.002  # values that differ less from that of all players count as equal to it
    converge: float = 0.05  # sampling ends when the standard errors are this fraction of the values
    seed: int = 0
    batch: int = 5  # sets of an order that are valued in one call: faster, but a truncation wastes some


DEFAULT = Sampling()


class Shapley(NamedTuple):
    """The Shapley value of each player, in the order of the players."""

    value: Numbers  # [players, ways]
    error: Numbers  # [players, ways], standard errors; zero where nothing was sampled
    orders: int = 0  # that were sampled; 0: all sets were valued, or none had to be


def shapley(game: Game, players: Sequence[int], how: Sampling = DEFAULT) -> Shapley:
    """Each player's mean gain over all orders in which the players may join.

    All sets are valued where that costs no more than the orders. Truncation between rounds: the values are
    zero if all players together change less than `truncate`.

    Args:
        game: The value of each of some sets of players.
        players: Their numbers.
        how: When all sets are valued, and how many orders are drawn otherwise.
    """
    game = remembered(game)
    nobody, everybody = game([frozenset(), frozenset(players)])
    if _complete(nobody, everybody, how):
        nothing = np.zeros((len(players), len(nobody)))
        return Shapley(nothing, nothing)
    if 2 ** len(players) <= how.orders * len(players):
        return exact(game, players)
    return sampled(game, players, how)


def exact(game: Game, players: Sequence[int]) -> Shapley:
    """The mean over all orders, from the values of all sets.

    Args:
        game: The value of each of some sets of players.
        players: Their numbers.
    """
    count = len(players)
    sets = [frozenset(some) for size in range(count + 1) for some in itertools.combinations(players, size)]
    values = dict(zip(sets, game(sets), strict=True))
    result = np.zeros((count, len(values[frozenset()])))
    for index, player in enumerate(players):
        for before in (some for some in sets if player not in some):
            fraction = 1 / (count * math.comb(count - 1, len(before)))  # of the orders with this set before
            result[index] += fraction * (values[before | {player}] - values[before])
    return Shapley(result, np.zeros_like(result))


def sampled(game: Game, players: Sequence[int], how: Sampling) -> Shapley:
    """The mean over sampled orders; each player comes first equally often, the others follow at random.

    Args:
        game: The value of each of some sets of players.
        players: Their numbers.
        how: How many orders are drawn, and their seed.
    """
    game = remembered(game)
    rng = np.random.default_rng(how.seed)
    gains: list[Numbers] = []  # per order, [players, ways]
    while len(gains) < how.orders:
        first = len(gains) % len(players)
        rest = rng.permutation([index for index in range(len(players)) if index != first])
        gains.append(_gains(game, players, [first, *rest.tolist()], how))
        if len(gains) % len(players) == 0 and _converged(np.stack(gains), how.converge):
            break
    orders = np.stack(gains)
    return Shapley(orders.mean(0), _errors(orders), len(gains))


def _gains(game: Game, players: Sequence[int], order: Sequence[int], how: Sampling) -> Numbers:
    """The gain of each player in this order of their places, [players, ways].

    Truncation within an order: a player that joins a set with the value of all players gains nothing.
    """
    value, everybody = game([frozenset(), frozenset(players)])
    gains = np.zeros((len(players), len(value)))
    joined = [frozenset(players[index] for index in order[: count + 1]) for count in range(len(order))]
    for start in range(0, len(order), how.batch):
        if _complete(value, everybody, how):
            break
        for index, after in zip(order[start:], game(joined[start : start + how.batch]), strict=False):
            if _complete(value, everybody, how):
                break
            gains[index], value = after - value, after
    return gains


def _complete(value: Numbers, everybody: Numbers, how: Sampling) -> bool:
    """Whether a set has the value of all players."""
    return how.truncate > 0 and bool((np.abs(everybody - value) <= how.truncate).all())


def remembered(game: Game) -> Game:
    """The same game, which values no set twice."""
    known: dict[Players, Numbers] = {}

    def value(sets: Sequence[Players]) -> Numbers:
        new = [some for some in dict.fromkeys(sets) if some not in known]
        if new:
            known.update(zip(new, game(new), strict=True))
        return np.stack([known[some] for some in sets])

    return value


def _errors(gains: Numbers) -> Numbers:
    """Of the mean over orders; the balanced first places make the true errors a little smaller."""
    count = len(gains)
    return gains.std(0, ddof=1) / math.sqrt(count) if count > 1 else np.full_like(gains[0], np.inf)


def _converged(gains: Numbers, fraction: float) -> bool:
    """Whether the errors are below this fraction of the values, in every way of valuing."""
    return bool((_errors(gains).mean(0) <= fraction * np.abs(gains.mean(0)).mean(0)).all())
