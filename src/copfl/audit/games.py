"""Shapley values of a set function: exactly, or from sampled orders that stop where nothing more is to be gained.

A game is a function from sets of players to what each set is worth. It may value a set in several ways at once, so it
gives a row per set; players are named by whole numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Players = frozenset[int]
Game = Callable[[Sequence[Players]], Numbers]  # [sets, ways]


class Sampling(NamedTuple):
    """How orders are sampled, after GTG-Shapley (Liu et al. 2022)."""

    orders: int = 40  # at most
    truncate: float = 0.002  # what is within this of the whole is taken for the whole
    converge: float = 0.05  # enough when the standard errors are this small a part of the values
    seed: int = 0
    at_once: int = (
        5  # steps of an order that are valued together, which is quicker; a cut may waste the last of them
    )


DEFAULT = Sampling()


class Shares(NamedTuple):
    """What each player is worth, in the order of the players."""

    value: Numbers  # [players, ways]
    error: Numbers  # [players, ways], standard errors; zero where nothing was sampled
    orders: int  # how many were walked; 0: all sets were valued, or none had to be
    sets: int  # how many sets were valued


def shapley(game: Game, players: Sequence[int], how: Sampling) -> Shares:
    """Each player's mean gain over all orders in which the players may join.

    All sets are valued where that costs no more than the orders. Truncation between rounds: a round that changed
    nothing, by `truncate`, gives everybody nothing.
    """
    game = remembered(game)
    nobody, everybody = game([frozenset(), frozenset(players)])
    if _is_whole(nobody, everybody, how):
        nothing = np.zeros((len(players), len(nobody)))
        return Shares(nothing, nothing, 0, 2)
    if 2 ** len(players) <= how.orders * len(players):
        return exact(game, players)
    return sampled(game, players, how)


def exact(game: Game, players: Sequence[int]) -> Shares:
    """The mean over all orders, from the values of all sets."""
    count = len(players)
    sets = [frozenset(who) for size in range(count + 1) for who in itertools.combinations(players, size)]
    worth = dict(zip(sets, game(sets), strict=True))
    value = np.zeros((count, len(worth[frozenset()])))
    for place, player in enumerate(players):
        for before in sets:
            if player not in before:
                share = 1 / (
                    count * math.comb(count - 1, len(before))
                )  # of the orders in which just these come before
                value[place] += share * (worth[before | {player}] - worth[before])
    return Shares(value, np.zeros_like(value), 0, len(sets))


def sampled(game: Game, players: Sequence[int], how: Sampling) -> Shares:
    """The mean over sampled orders; each player comes first equally often, the others follow at random.

    Truncation within an order: those who join a set that is worth as much as all of them, by `truncate`, gain nothing.
    """
    known: dict[Players, Numbers] = {}
    game = remembered(game, known)
    nobody, whole = game([frozenset(), frozenset(players)])
    rng = np.random.default_rng(how.seed)
    gains: list[Numbers] = []  # per order, [players, ways]
    while len(gains) < how.orders:
        first = len(gains) % len(players)
        rest = rng.permutation([place for place in range(len(players)) if place != first])
        gains.append(_walked(game, players, [first, *rest.tolist()], nobody, whole, how))
        if len(gains) % len(players) == 0 and _converged(np.stack(gains), how.converge):
            break
    orders = np.stack(gains)
    return Shares(orders.mean(0), _errors(orders), len(gains), len(known))


def _walked(
    game: Game, players: Sequence[int], order: Sequence[int], nobody: Numbers, whole: Numbers, how: Sampling
) -> Numbers:
    """What each player gains in this order of their places, [players, ways]."""
    gain, worth = np.zeros((len(players), len(whole))), nobody
    joined = [frozenset(players[place] for place in order[: count + 1]) for count in range(len(order))]
    for start in range(0, len(order), how.at_once):
        if _is_whole(worth, whole, how):
            break
        for place, after in zip(order[start:], game(joined[start : start + how.at_once]), strict=False):
            if _is_whole(worth, whole, how):
                break
            gain[place], worth = after - worth, after
    return gain


def _is_whole(worth: Numbers, whole: Numbers, how: Sampling) -> bool:
    """Whether this is as good as what all are worth."""
    return how.truncate > 0 and bool((np.abs(whole - worth) <= how.truncate).all())


def remembered(game: Game, known: dict[Players, Numbers] | None = None) -> Game:
    """The same game, which values no set twice; what it knows is kept in `known`."""
    memory: dict[Players, Numbers] = {} if known is None else known

    def value(sets: Sequence[Players]) -> Numbers:
        new = [who for who in dict.fromkeys(sets) if who not in memory]
        if new:
            memory.update(zip(new, game(new), strict=True))
        return np.stack([memory[who] for who in sets])

    return value


def _errors(gains: Numbers) -> Numbers:
    """Of the mean over orders; the orders are a little more even than chance, so this errs on the safe side."""
    count = len(gains)
    return gains.std(0, ddof=1) / math.sqrt(count) if count > 1 else np.full_like(gains[0], np.inf)


def _converged(gains: Numbers, part: float) -> bool:
    """Whether, in every way of valuing, the errors are this small a part of the values."""
    return bool((_errors(gains).mean(0) <= part * np.abs(gains.mean(0)).mean(0)).all())
