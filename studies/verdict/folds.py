"""What folds do to a gain and its error: simulated sites with a linear model each, and one with levels for all.

The gain is the mean squared error alone minus that together, and its truth is that of 1,000 other rows of each site.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from copfl.rivals.effort import FOLDS
from copfl.stats import Numbers

NORMAL = 1.96
TESTED = 1_000
SIZES = (
    (4, 60, 10, 0.2),
    (100, 8, 3, 0.2),
    (100, 20, 3, 0.2),
    (50, 20, 8, 0.2),
    (20, 60, 10, 0.2),
    (100, 8, 3, 1.0),
)
SHARED = 1 + FOLDS / (FOLDS - 1)  # the factor of a variance over rows


class OfFolds(NamedTuple):
    """In units of the standard error over rows, or in percent of the federations."""

    bias: float
    variance: float  # of the gain minus the truth, in units of that over rows
    covered: float  # the expected gain, with the factor
    fresh: float  # the gain on as many other rows, with the factor and their own variance


def of_folds(
    sites: int, rows: int, columns: int, deviation: float, federations: int = 100
) -> tuple[OfFolds, OfFolds]:
    """Of five folds, and carried on to all rows.

    Args:
        sites: Their number.
        rows: Of each.
        columns: Of a row.
        deviation: Of the sites' coefficients and levels; the noise has 1.
        federations: How many are drawn.
    """
    rng, found = np.random.default_rng(0), []
    fold = np.arange(rows) % FOLDS
    for _ in range(federations):
        slopes = (1 + deviation * rng.normal(size=(sites, columns))) / np.sqrt(columns)
        levels = deviation * rng.normal(size=(sites, 1))

        def draw(count: int, slopes: Numbers = slopes, levels: Numbers = levels) -> tuple[Numbers, Numbers]:
            x = rng.normal(size=(sites, count, columns))
            return x, np.einsum("snd,sd->sn", x, slopes) + levels + rng.normal(size=(sites, count))

        x, y = draw(rows)
        single, pairs = np.zeros((2, sites, rows))
        for part in range(FOLDS):
            own, next_one = fold == part, fold == (part + 1) % FOLDS
            single[:, own] = _gains(x[:, ~own], y[:, ~own], x[:, own], y[:, own], deviation)
            both = own | next_one
            pairs[:, both] += _gains(x[:, ~both], y[:, ~both], x[:, both], y[:, both], deviation) / 2
        truths = [_gains(x, y, *draw(count), deviation).mean() for count in (TESTED, rows)]
        # 1/f - 1 and 1/g - 1/f with f = 4/5 and g = 3/5
        for losses in (single, single - (pairs - single) * 0.25 / (5 / 3 - 5 / 4)):
            of_rows = losses.var(1, ddof=1).mean() / rows / sites
            found.append((losses.mean() - truths[0], losses.mean() - truths[1], of_rows))
    table = np.array(found).reshape(federations, 2, 3)
    return _rates(table[:, 0]), _rates(table[:, 1])


def _rates(found: Numbers) -> OfFolds:
    expected, fresh, of_rows = found.T
    return OfFolds(
        float(expected.mean() / np.sqrt(of_rows.mean())),
        float(expected.var() / of_rows.mean()),
        float(100 * (np.abs(expected) <= NORMAL * np.sqrt(SHARED * of_rows)).mean()),
        float(100 * (np.abs(fresh) <= NORMAL * np.sqrt((SHARED + 1) * of_rows)).mean()),
    )


def _gains(x: Numbers, y: Numbers, asked: Numbers, answers: Numbers, deviation: float) -> Numbers:
    """[sites, rows]: squared errors of a ridge regression of each site minus those of one with levels."""
    slopes, constants = _ridge(x, y)
    alone = np.einsum("snd,sd->sn", asked, slopes) + constants
    within = (
        (x - x.mean(1, keepdims=True)).reshape(1, -1, x.shape[2]),
        (y - y.mean(1, keepdims=True)).reshape(1, -1),
    )
    common = _ridge(*within)[0][0]
    left = y - x @ common
    weight = left.shape[1] / (left.shape[1] + deviation**-2)
    levels = left.mean() + weight * (left.mean(1, keepdims=True) - left.mean())
    return np.asarray((alone - answers) ** 2 - (asked @ common + levels - answers) ** 2)


def _ridge(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    centre, middle = x.mean(1, keepdims=True), y.mean(1, keepdims=True)
    centred = x - centre
    gram = np.einsum("snd,sne->sde", centred, centred) + np.eye(x.shape[2])
    slopes = np.linalg.solve(gram, np.einsum("snd,sn->sd", centred, y - middle)[..., None])[..., 0]
    return slopes, middle - np.einsum("sod,sd->so", centre, slopes)


def page_of_folds() -> str:
    """The table of docs/verdict.md."""
    lines = [
        "| sites | rows | columns | deviation | | bias | variance | expected | fresh |",
        "| ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for size in SIZES:
        for name, one in zip(("five folds", "carried on"), of_folds(*size), strict=True):
            lines.append(
                f"| {' | '.join(map(str, size))} | {name} | {one.bias:+.1f} | {one.variance:.1f} | "
                f"{one.covered:.0f} | {one.fresh:.0f} |"
            )
    return "\n".join(lines)
