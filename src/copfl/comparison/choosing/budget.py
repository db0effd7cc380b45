"""What a race may cost, and the stages that fit into it.

A race asks it for its stages, in rounds or, with a price in seconds, in time; `choose` for the limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from copfl.comparison.halving import promoted
from copfl.errors import UsageError

SHORTER = 0.9  # by which a race is made shorter until it fits its budget
FIRST = 0.25  # of the rounds, or more, are trained before anything is dropped
FEWEST = 4  # candidates that race, even where the budget gives them fewer rounds than that
FINALISTS = 2  # or more are trained for all rounds, with this many seeds or more


class Rung(NamedTuple):
    """A stage of the race."""

    rounds: int  # that each run has at its end
    seeds: int  # runs of each candidate
    candidates: int  # that take part

    @property
    def total(self) -> int:
        """The rounds of a candidate's runs at its end."""
        return self.rounds * self.seeds


def limit_of(budget: str | int) -> Budget | None:
    """A number of rounds, or a time such as 90s, 10m or 2h; None if the text is empty."""
    if not str(budget).strip():
        return None
    amount_and_unit = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smh]?)\s*", str(budget))
    if amount_and_unit is None or not float(amount_and_unit[1]):
        raise UsageError(
            f'the budget "{budget}" is neither a number of rounds, such as 300, nor a time, such as 10m'
        )
    seconds = {"": 0, "s": 1, "m": 60, "h": 3600}[amount_and_unit[2]]
    return Budget(float(amount_and_unit[1]) * (seconds or 1), bool(seconds))


class Budget(NamedTuple):
    """What the race may cost."""

    amount: float
    seconds: bool = False  # from the beginning to the end, or else rounds
    usual: bool = False  # not the user's


Price = Callable[[Sequence[Rung]], float]  # what stages cost, in the unit of the limit


def cost(rungs: Sequence[Rung]) -> int:
    """The rounds of all runs; each continues where the stage before ended."""
    before = [0, *(rung.total for rung in rungs)]
    return sum(rung.candidates * (rung.total - done) for rung, done in zip(rungs, before, strict=False))


def affordable(rounds: int, seeds: int, candidates: int, limit: float, price: Price = cost) -> list[Rung]:
    """The stages of the longest race within the limit: with one seed, then with fewer rounds; else none.

    Args:
        rounds: Of a complete run.
        seeds: Of a complete race.
        candidates: How many race.
        limit: What the race may cost, in the unit of `price`.
        price: What stages cost.
    """
    lengths = [max(1, round(rounds * SHORTER**step)) for step in range(1 + _steps(rounds))]
    for length, count in [(rounds, seeds), *((length, 1) for length in lengths)]:
        stages = plan(length, count, candidates, limit, price)
        if price(stages) <= limit:
            return stages
    return []


def raceable(rounds: int, seeds: int, candidates: int, limit: float, price: Price = cost) -> int:
    """How many candidates can race within the limit: as many as have a quarter of the rounds in the first stage.

    Few candidates with many rounds decide more than many with few: in the first rounds most networks still give a
    constant answer, and their order is luck.

    Args:
        rounds: Of a complete run.
        seeds: Of a complete race.
        candidates: How many there are.
        limit: What the race may cost, in the unit of `price`.
        price: What stages cost.
    """
    for count in range(candidates, FEWEST, -1):
        races = (plan(rounds, runs, count, limit, price) for runs in dict.fromkeys((seeds, 1)))
        stages = next((stages for stages in races if price(stages) <= limit), None)
        if stages is not None and stages[0].total >= FIRST * rounds:
            return count
    return min(candidates, FEWEST)


def _steps(rounds: int) -> int:
    """How often a race is made shorter until it has one round."""
    return math.ceil(math.log(rounds) / -math.log(SHORTER))


def plan(rounds: int, seeds: int, candidates: int, limit: float, price: Price = cost) -> list[Rung]:
    """The stages of the race, whose cost is within the limit if the shortest one's is.

    Each stage keeps a third of the candidates, until there are finalists, an eighth of all. The runs of a
    candidate are in a row: the rounds of the first seed, then the second seed's. What a candidate has of
    them grows in proportion from stage to stage; beyond the first seed it has whole runs. The finalists have
    as many seeds as leave half of the rounds to the first stage, which drops most; then that stage is as long
    as the limit allows.

    Args:
        rounds: Of a complete run.
        seeds: The most that a finalist has.
        candidates: How many race.
        limit: What the race may cost, in the unit of `price`.
        price: What stages cost.
    """
    finalists, counts = max(FINALISTS, math.ceil(candidates / 8)), [candidates]
    while counts[-1] > finalists:
        counts.append(max(finalists, promoted(counts[-1])))
    steps = max(1, len(counts) - 1)

    def stages(first: int, last: int) -> list[Rung]:
        amounts = [first * (rounds * last / first) ** (stage / steps) for stage in range(len(counts) - 1)]
        within = [(min(round(amount), rounds), max(1, round(amount / rounds))) for amount in amounts]
        return [Rung(*run, count) for run, count in zip([*within, (rounds, last)], counts, strict=True)]

    least = min(seeds, FINALISTS)
    for last in range(seeds, least - 1, -1):
        fitting = [first for first in range(1, rounds + 1) if price(stages(first, last)) <= limit]
        if fitting and 2 * fitting[-1] >= rounds:
            return stages(fitting[-1], last)
    return stages(max(fitting, default=1), least)


class Speed(NamedTuple):
    """What a stage takes, as measured in the stages before."""

    round: float  # seconds of a round of one run
    overhead: float  # seconds of a stage: processes that start, data that are loaded, first rounds
    processes: int

    def seconds(self, rungs: Sequence[Rung], done: int = 0) -> float:
        """The time of these stages, where each candidate has `done` rounds.

        Args:
            rungs: The stages.
            done: The rounds that each candidate has before them.
        """
        total = 0.0
        for rung in rungs:
            new = rung.total - done  # of each candidate
            if new > 0:
                longest = min(new, rung.rounds)  # of a run: seeds train in parallel, rounds do not
                rounds = max(rung.candidates * new / self.processes, longest)
                total, done = total + self.overhead + rounds * self.round, done + new
        return total
