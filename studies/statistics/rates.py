"""Simulated differences of methods whose truth is known, and how often copfl's intervals and verdicts are right."""

from typing import NamedTuple

import numpy as np

from copfl.stats import LEVEL, Difference, Numbers, TwoWay, difference, for_all, over_seeds

CLIENTS = (2, 3, 5, 10, 30)
SEEDS = (2, 3, 5, 10)
REPEATS = 2000  # of an interval: its rate has a standard error of 0.5 points
COMPARISONS = 400
DRAWS = 500  # of the pivots of a generalised interval
# The standard deviations of the effects of clients and of seeds, and of the rest.
MODELS = {
    "clients": (1.0, 0.0, 0.0),
    "seeds": (0.0, 1.0, 0.0),
    "rest": (0.0, 0.0, 1.0),
    "clients, rest": (1.0, 0.0, 1.0),
    "seeds, rest": (0.0, 1.0, 1.0),
    "all": (1.0, 1.0, 1.0),
}
OWN = "own clients"  # of each seed: a client of one seed is none of another


class Alternative(NamedTuple):
    """A generalised interval in place of copfl's."""

    covered: float  # how often it has the truth in it
    covered_by_copfls: float  # how often copfl's has, on the same differences
    width: float  # of copfl's, the median of the ratios


class Rates(NamedTuple):
    """How often at least one of several rows without a difference is called different."""

    by_row: float  # each row by its own interval
    corrected: float  # as `compare` does


def gains(rng: np.random.Generator, clients: int, seeds: int, model: str) -> Numbers:
    """Differences with the mean 0, [seeds, clients]."""
    of_clients, of_seeds, rest = MODELS["all" if model == OWN else model]
    drawn = (seeds, clients) if model == OWN else (1, clients)
    parts = of_clients * rng.normal(size=drawn) + of_seeds * rng.normal(size=(seeds, 1))
    return np.asarray(parts + rest * rng.normal(size=(seeds, clients)))


def coverage(clients: int, seeds: int, model: str, repeats: int = REPEATS) -> float:
    """How often the interval over clients and seeds has the truth in it.

    Args:
        clients: Their number.
        seeds: Their number.
        model: One of MODELS, or OWN.
        repeats: Simulated comparisons.
    """
    rng, covered = np.random.default_rng([clients, seeds]), 0
    for _ in range(repeats):
        values = gains(rng, clients, seeds, model)
        bounds = over_seeds(values.mean(1)) if model == OWN else TwoWay.of(values).interval()
        covered += not bounds.without_zero
    return covered / repeats


def generalised(found: TwoWay, rng: np.random.Generator) -> float:
    """Half the width of the generalised confidence interval of Weerahandi (1993) for the two-way model.

    Each mean square is divided by a draw of chi-squared over its degrees of freedom, which gives a draw of the
    variance of the mean; the interval has 95 % of the draws of a normal number times its root.

    Args:
        found: The mean with its errors over seeds, over clients, and of the rest.
        rng: Of the draws.
    """
    a, b, e = (error.value**2 * error.freedom / rng.chisquare(error.freedom, DRAWS) for error in found[1:])
    drawn = np.abs(rng.normal(size=DRAWS)) * np.sqrt(np.maximum(a + b - e, 0))
    return float(np.quantile(drawn, LEVEL))


def alternative(clients: int, seeds: int, model: str, repeats: int = REPEATS) -> Alternative:
    """How a generalised interval would do.

    Args:
        clients: Their number.
        seeds: Their number.
        model: One of MODELS.
        repeats: Simulated comparisons.
    """
    rng = np.random.default_rng([clients, seeds])
    drawn = [TwoWay.of(gains(rng, clients, seeds, model)) for _ in range(repeats)]
    own = np.array([found.interval().half for found in drawn])
    other = np.array([generalised(found, rng) for found in drawn])
    means = np.abs([found.mean for found in drawn])
    return Alternative(
        float((means <= other).mean()), float((means <= own).mean()), float(np.median(other / own))
    )


def false_positives(
    rows: int, clients: int, seeds: int, repeats: int = COMPARISONS, same_clients: bool = True
) -> Rates:
    """How often a comparison of rows that are equally good calls one of them different.

    The reference has effects of clients and seeds of its own, which are in the differences of all rows.

    Args:
        rows: Their number, without the reference.
        clients: Their number.
        seeds: Their number.
        repeats: Simulated comparisons.
        same_clients: Whether every seed has the same clients.
    """
    rng, wrong = np.random.default_rng([rows, clients, seeds]), np.zeros(2)
    model = "all" if same_clients else OWN
    for _ in range(repeats):
        reference = list(gains(rng, clients, seeds, model))
        found: dict[str, Difference] = {}
        for row in range(rows):
            values = list(gains(rng, clients, seeds, model))
            found[str(row)] = difference(values, reference, same_clients=same_clients)
        wrong[0] += any(one.both.without_zero for one in found.values())
        wrong[1] += any(one.p < 1 - LEVEL for one in for_all(found).values())
    return Rates(*(wrong / repeats).tolist())
