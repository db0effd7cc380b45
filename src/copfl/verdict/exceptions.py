"""At which sites another candidate is better: the evidence of a site's own rows, shrunk to what the others show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.rivals.records import Array
from copfl.stats import Numbers

ERRORS = 2.0  # standard errors by which an exception is better
# Of fewer rows the losses depend on each other too much: where three rows are of one class, the constant answer of two
# of them is right for the third, and wrong for the next patient.
FEWEST_ROWS = 20
LEAST = 1e-12  # of a variance


class SiteGains(NamedTuple):
    """What each site gains from another candidate, as a fraction of the two losses. [sites], nan: not known."""

    mean: Numbers  # (theirs - ours) / (theirs + ours), from -1 to 1
    variance: Numbers  # of the mean, over the rows of the site
    rows: Numbers  # with both losses


def site_gains(ours: Sequence[Array], theirs: Sequence[Array]) -> SiteGains:
    """The gains of the sites at which both losses are known.

    A few rows of one class seem to have no variance at all, so a site's variance is at least the pooled one of all
    sites, whose gains are fractions to make them comparable.

    Args:
        ours: [rows] of each site, nan: not held out.
        theirs: Of the same rows.
    """
    means, squares, counts = (np.full(len(ours), value) for value in (np.nan, 0.0, 0.0))
    for site, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        known = np.isfinite(own) & np.isfinite(other)
        total = own[known].mean() + other[known].mean() if known.any() else 0.0
        if total > 0:
            rows = (other[known] - own[known]) / total
            means[site], counts[site] = rows.mean(), len(rows)
            squares[site] = ((rows - rows.mean()) ** 2).sum()
    freedom = np.maximum(counts - 1, 0)
    if not freedom.any():
        return SiteGains(np.full(len(ours), np.nan), np.full(len(ours), np.nan), counts)
    of_rows = np.maximum(squares.sum() / freedom.sum(), squares / np.maximum(freedom, 1))
    with np.errstate(divide="ignore"):
        return SiteGains(means, np.where(counts > 0, np.maximum(of_rows, LEAST) / counts, np.nan), counts)


def are_better(ours: Sequence[Array], theirs: Sequence[Array]) -> NDArray[np.bool_]:
    """[sites]: where our losses are lower by two standard errors, given what all sites show.

    The gains are random effects, g ~ N(μ, τ²), with τ² of DerSimonian and Laird (1986). What counts is the posterior
    of a site's own gain: few rows count little beside the other sites, and of many sites few depart by chance.

    Args:
        ours: As of `site_gains`.
        theirs: As of `site_gains`.
    """
    gains = site_gains(ours, theirs)
    known = ~np.isnan(gains.mean)
    mean, variance = gains.mean[known], gains.variance[known]
    better = np.zeros(len(ours), bool)
    if not len(mean):
        return better
    weight = 1 / variance
    centre = (weight * mean).sum() / weight.sum()
    excess = (weight * (mean - centre) ** 2).sum() - (len(mean) - 1)
    scale = weight.sum() - (weight**2).sum() / weight.sum()
    between = max(0.0, excess / scale) if len(mean) > 1 else 0.0
    total = 1 / (variance + between)
    common = (total * mean).sum() / total.sum()
    own = between / (between + variance)  # what the site's own rows count
    posterior = own * mean + (1 - own) * common
    error = np.sqrt(own * variance + (1 - own) ** 2 / total.sum())
    better[known] = (gains.rows[known] >= FEWEST_ROWS) & (mean > 0) & (posterior > ERRORS * error)
    return better
