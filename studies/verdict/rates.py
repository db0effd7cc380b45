"""Simulated federations with a known truth: means of values, of each site alone or with the others.

A site's values are its level plus noise. Alone, its model is the mean of its own values. Together, it is the mean
shrunk to that of all sites by the true ratio (`levels`), or the mean of all sites (`common`). The gain is known without
drawing a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from copfl.rivals.effort import FOLDS
from copfl.rivals.records import Array
from copfl.stats import Numbers
from copfl.verdict.drawn import Ints, Moments
from copfl.verdict.verdict import BETTER, WORSE, corrected_gain

ROWS = (2, 4, 8, 20, 60)  # of each site
MIXED = 0  # each site has one of these numbers
SITES = 20
LEVELS, COMMON = "levels", "common"
CASES = ((LEVELS, 0.3), (COMMON, 0.3), (COMMON, 1.0))  # what is together, and the deviation of the levels
TOGETHER, ALONE = "together", "alone"
Table = dict[str, list[Numbers]]


class Simulated(NamedTuple):
    losses: Table
    pairs: Table
    expected: Numbers  # [sites], the gain of models of as many rows
    realised: Numbers  # [sites], of the models of these rows


class Rates(NamedTuple):
    sites: float  # intervals of sites that have the expected gain in them
    realised: float  # those that have the gain of the very models in them
    mean: float  # intervals of the mean over the sites with its gain in them
    wrong: float  # federations in which a site is called better or worse, and the expected gain is not
    named: float  # sites that are called so, in a federation


def simulated(sizes: Numbers, kind: str, deviation: float, rng: np.random.Generator) -> Simulated:
    """One federation.

    Args:
        sizes: [sites], rows.
        kind: What is trained together.
        deviation: Of the sites' levels; the noise has 1.
        rng: Draws.
    """
    level = deviation * rng.normal(size=len(sizes))
    values = [own + rng.normal(size=size) for own, size in zip(level, sizes, strict=True)]

    def models(kept: Sequence[Array]) -> tuple[Numbers, Numbers]:
        common = np.concatenate([own[mask] for own, mask in zip(values, kept, strict=True)]).mean()
        pairs = zip(values, kept, strict=True)
        alone = np.array([own[mask].mean() if mask.any() else common for own, mask in pairs])
        count = np.array([mask.sum() for mask in kept])
        weight = count / (count + deviation**-2) if kind == LEVELS else 0.0
        return alone, common + weight * (alone - common)

    folds = [rng.permutation(size) % FOLDS for size in sizes]

    def table(lacking: int) -> Table:
        """Of models that lack so many folds, the row's own and the next ones."""
        losses = {name: [np.full(size, np.nan) for size in sizes] for name in (TOGETHER, ALONE)}
        for part in range(FOLDS):
            others = [
                {(part + n) % min(FOLDS, size) for n in range(lacking)} if part < size else set()
                for size in sizes
            ]
            alone, together = models(
                [~np.isin(own, list(lack)) for own, lack in zip(folds, others, strict=True)]
            )
            for site, (own, y) in enumerate(zip(folds, values, strict=True)):
                held = own == part
                losses[ALONE][site][held] = (y[held] - alone[site]) ** 2
                losses[TOGETHER][site][held] = (y[held] - together[site]) ** 2
        return losses

    alone, together = models([np.ones(size, bool) for size in sizes])
    if kind == COMMON:
        expected = 1 / sizes - (level - together) ** 2
    else:
        weight = sizes / (sizes + deviation**-2)
        expected = 1 / sizes - weight**2 / sizes - ((1 - weight) * level) ** 2
    return Simulated(table(1), table(2), expected, (alone - level) ** 2 - (together - level) ** 2)


def only(found: Moments) -> Ints:
    """The choice where there is one candidate of each side: the first."""
    return np.zeros(found.rows.shape, np.int64)


def rates(rows: int, kind: str, deviation: float, federations: int = 100, seed: int = 0) -> Rates:
    """How often a verdict is right.

    Args:
        rows: Of a site; MIXED: one of ROWS.
        kind: What is trained together.
        deviation: Of the sites' levels.
        federations: How many are drawn.
        seed: Of the draws.
    """
    rng, found = np.random.default_rng(seed), []
    for _ in range(federations):
        sizes = rng.choice(ROWS, SITES) if rows == MIXED else np.full(SITES, rows)
        federation = simulated(sizes, kind, deviation, rng)
        verdict = corrected_gain(
            federation.losses,
            together=[TOGETHER],
            alone=[ALONE],
            choose=only,
            draws=100,
            pairs=federation.pairs,
        )
        low, high = (np.array([getattr(site, end) for site in verdict.sites]) for end in ("low", "high"))
        covered = [
            ((low <= gain) & (gain <= high)).mean() for gain in (federation.expected, federation.realised)
        ]
        better, worse = verdict.named(BETTER), verdict.named(WORSE)
        wrong = (federation.expected[better] <= 0).any() or (federation.expected[worse] >= 0).any()
        truth = federation.realised.mean()
        of_mean = verdict.these.low <= truth <= verdict.these.high
        found.append((*covered, of_mean, wrong, len(better) + len(worse)))
    return Rates(*np.mean(np.array(found, float), 0).tolist())


def page_of_rates() -> str:
    """The table of docs/verdict.md."""
    lines = [
        "| together | deviation | rows | sites | the very models | mean | wrong | named |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, deviation in CASES:
        for rows in (*ROWS, MIXED):
            one = rates(rows, kind, deviation)
            cells = [f"{100 * rate:.1f}" for rate in one[:4]] + [f"{one.named:.2f}"]
            lines.append(f"| {kind} | {deviation} | {rows or 'mixed'} | {' | '.join(cells)} |")
    return "\n".join(lines)
