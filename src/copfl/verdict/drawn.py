"""Rows of each site drawn again, and what a choice sees of them.

A choice that is repeated on thousands of draws cannot look at rows. All that it needs of a site are moments: the
means of the losses, and of the products of every two. So a choice is a function of `Moments`, of any number of draws
at once, and the choice on all rows is that of one draw which has each row once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.errors import UsageError
from copfl.rivals.records import Array
from copfl.stats import Numbers

Losses = Mapping[str, Sequence[Array]]  # of each candidate, the simplest first, [rows] of each site
Ints = NDArray[np.int64]

NUMBERS = 16_000_000  # at a time
# As of the exceptions of a first run.
ERRORS = 2.0  # standard errors by which what a site trains alone is better, for the site to depart
ERRORS_ALONE = 1.0  # by which what all sites train alone is better than a method of the federation
FEWEST_ROWS = 20  # of a site that departs
LEAST = 1e-12  # of a variance


class Site(NamedTuple):
    """The rows of a site on which all candidates that it has can be compared."""

    losses: Numbers  # [candidates, rows]; nan: the site does not have the candidate
    unit: Ints  # [rows], from 0: rows of one unit are drawn together
    rows: Ints  # [rows], which of the site's rows these are

    @property
    def units(self) -> int:
        return int(self.unit.max(initial=-1)) + 1


class Moments(NamedTuple):
    """What a choice sees of the rows that were drawn."""

    names: tuple[str, ...]  # of the candidates, the simplest first
    rows: Numbers  # [draws, sites], with repetitions
    means: Numbers  # [draws, candidates, sites], nan: the site does not have the candidate, or no row
    # [draws, candidates, candidates, sites], of the losses minus the row's mean over the candidates
    products: Numbers

    def only(self, names: Collection[str]) -> Moments:
        """Those of some candidates.

        Args:
            names: Of the candidates.
        """
        kept = [n for n, name in enumerate(self.names) if name in names]
        if len(kept) == len(self.names):
            return self
        return Moments(
            tuple(self.names[n] for n in kept),
            self.rows,
            self.means[:, kept],
            self.products[:, kept][:, :, kept],
        )


# What each site has, [draws, sites]: places among the names of the moments.
Choose = Callable[[Moments], Ints]


def sites_of(losses: Losses, units: Sequence[Array] | None = None) -> list[Site]:
    """The rows of each site on which all candidates that it has are known.

    A candidate that was dropped before all folds must be left out: otherwise only the rows of its folds are compared.

    Args:
        losses: Of the candidates; nan: the row was not held out, or there is no model.
        units: [rows] of each site, what belongs together; None: each row is alone.
    """
    if not losses:
        raise UsageError("no candidate has losses; at least one is needed")
    sizes = {name: [len(rows) for rows in of_sites] for name, of_sites in losses.items()}
    first = next(iter(sizes.values()))
    if wrong := [name for name, own in sizes.items() if own != first]:
        raise UsageError(
            f"the losses of {wrong[0]} have other sites or rows than those of {next(iter(sizes))}; "
            "give all candidates the same rows, with nan where one has no loss"
        )
    if units is not None and [len(unit) for unit in units] != first:
        raise UsageError("the units have other sites or rows than the losses; name a unit for each row")
    found = []
    for site, size in enumerate(first):
        table = np.stack([np.asarray(of_sites[site], np.float64) for of_sites in losses.values()])
        table = np.where(np.isfinite(table), table, np.nan)
        has = ~np.isnan(table).all(1) if size else np.zeros(len(table), bool)
        rows = np.flatnonzero(~np.isnan(table[has]).any(0)) if has.any() else np.arange(0)
        unit = rows if units is None else np.asarray(units[site])[rows]
        found.append(Site(table[:, rows], np.unique(unit, return_inverse=True)[1].astype(np.int64), rows))
    return found


class Table(NamedTuple):
    """What the moments of a site are sums of."""

    candidates: Ints  # that it has
    rows: Numbers  # [rows, c + c²]: of each of its c candidates the loss, and of every two the product


def tables(sites: Sequence[Site]) -> list[Table]:
    """Of each site.

    Args:
        sites: Their rows.
    """
    found = []
    for site in sites:
        has = np.flatnonzero(~np.isnan(site.losses).any(1)) if site.units else np.arange(0)
        own = site.losses[has]
        centred = own - own.mean(0) if len(has) else own
        pairs = (centred[:, None] * centred).reshape(len(has) ** 2, own.shape[1])
        found.append(Table(has, np.ascontiguousarray(np.concatenate([own, pairs]).T)))
    return found


def moments(names: Sequence[str], sites: Sequence[Table], weights: Sequence[Numbers]) -> Moments:
    """The moments of drawn rows.

    Args:
        names: Of the candidates.
        sites: What is summed.
        weights: [draws, rows] of each site, how often each row was drawn.
    """
    draws, count = len(weights[0]), len(names)
    rows = np.stack([weight.sum(1) for weight in weights], 1)
    means = np.full((draws, count, len(sites)), np.nan)
    products = np.full((draws, count, count, len(sites)), np.nan)
    for n, (site, weight) in enumerate(zip(sites, weights, strict=True)):
        if not (size := len(site.candidates)):
            continue
        of_draws = (weight @ site.rows) / rows[:, n, None]
        if size == count:
            means[:, :, n], products[:, :, :, n] = (
                of_draws[:, :size],
                of_draws[:, size:].reshape(-1, size, size),
            )
        else:
            has = site.candidates
            means[:, has, n] = of_draws[:, :size]
            products[:, has[:, None], has[None], n] = of_draws[:, size:].reshape(-1, size, size)
    return Moments(tuple(names), rows, means, products)


def all_rows(names: Sequence[str], sites: Sequence[Site]) -> Moments:
    """The moments of each row once: what the choice itself sees.

    Args:
        names: Of the candidates.
        sites: Their rows.
    """
    return moments(names, tables(sites), [np.ones((1, len(site.rows))) for site in sites])


def drawn(sites: Sequence[Site], candidates: int, draws: int, seed: int) -> Iterator[list[Numbers]]:
    """How often each row is drawn, [draws, rows] of each site, some draws at a time.

    As many units as a site has are drawn, with replacement.

    Args:
        sites: Whose rows are drawn.
        candidates: Their number.
        draws: Altogether.
        seed: Of the draws.
    """
    rng = np.random.default_rng(seed)
    numbers = sum(len(site.rows) for site in sites) + (2 + candidates) * candidates * len(sites)
    at_once = max(1, min(draws, NUMBERS // max(numbers, 1)))
    for begin in range(0, draws, at_once):
        size = min(at_once, draws - begin)
        weights = []
        for site in sites:
            count = site.units
            places = rng.integers(0, max(count, 1), (size, count)) + count * np.arange(size)[:, None]
            of_units = np.bincount(places.ravel(), minlength=size * count).reshape(size, count)
            of_rows = of_units if count == len(site.rows) else of_units[:, site.unit]
            weights.append(of_rows.astype(np.float64))
        yield weights


def lowest(
    found: Moments, *, alone: Collection[str], is_rmse: bool, without_exceptions: Collection[str] = ()
) -> Ints:
    """What each site has, [draws, sites]: the lowest mean over sites, but at sites that depart.

    Of equals the first. What all sites train alone is taken if its mean loss is lower by `ERRORS_ALONE`, else the
    best method of the federation. A site departs to what it trains alone and is better at it by its own rows, shrunk
    to what all show.

    Args:
        found: What was drawn.
        alone: The candidates that a site trains alone.
        is_rmse: Whether losses are squared errors, of which a site's loss is the root of the mean.
        without_exceptions: Methods whose models cannot hold a site's own.
    """
    names = found.names
    own = [n for n, name in enumerate(names) if name in alone]
    methods = [n for n, name in enumerate(names) if name not in alone]
    by_site = np.sqrt(found.means) if is_rmse else found.means
    known = ~np.isnan(by_site).any(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(known, by_site, 0).sum(2) / known.sum(2)  # [draws, candidates]
    means = np.where(np.isnan(means), np.inf, means)
    taken = means.argmin(1)
    if own and methods:
        best = np.asarray(methods)[means[:, methods].argmin(1)]
        gain = _gains(found, taken, best)
        at = ~np.isnan(gain.mean)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(at, gain.mean, 0).sum(1) / at.sum(1)
            error = np.sqrt(np.where(at, gain.variance, 0).sum(1)) / at.sum(1)
        is_shown = ~at.any(1) | (mean > ERRORS_ALONE * error)
        taken = np.where(np.isin(taken, own) & ~is_shown, best, taken)
    result = np.repeat(taken[:, None], found.rows.shape[1], axis=1)
    if not own:
        return result
    at_best = np.full(result.shape, np.inf)
    stays = np.isin(taken, [n for n, name in enumerate(names) if name in without_exceptions])
    for other in own:
        better = _are_better(_gains(found, np.full_like(taken, other), taken))
        better &= (taken != other)[:, None] & ~stays[:, None] & (by_site[:, other] < at_best)
        result = np.where(better, other, result)
        at_best = np.where(better, by_site[:, other], at_best)
    return result


class SiteGains(NamedTuple):
    """[draws, sites], as of the exceptions of a first run; nan: not known."""

    mean: Numbers
    variance: Numbers
    rows: Numbers


def _gains(found: Moments, ours: Ints, theirs: Ints) -> SiteGains:
    """What each site gains from our candidate over theirs, one of each draw, as a fraction of the two losses."""
    draw = np.arange(len(ours))
    first, second = found.means[draw, ours], found.means[draw, theirs]
    square = (
        found.products[draw, ours, ours]
        + found.products[draw, theirs, theirs]
        - 2 * found.products[draw, ours, theirs]
    )
    total = first + second
    with np.errstate(invalid="ignore", divide="ignore"):
        known = total > 0
        mean = np.where(known, (second - first) / total, np.nan)
        squares = np.where(known, found.rows * np.maximum(square / total**2 - mean**2, 0), 0)
        rows = np.where(known, found.rows, 0)
        freedom = np.maximum(rows - 1, 0)
        pooled = squares.sum(1, keepdims=True) / freedom.sum(1, keepdims=True)
        of_rows = np.maximum(pooled, squares / np.maximum(freedom, 1))
        is_known = freedom.any(1, keepdims=True)
        variance = np.where(known & is_known, np.maximum(of_rows, LEAST) / rows, np.nan)
    return SiteGains(np.where(is_known, mean, np.nan), variance, rows)


def site_gains(ours: Sequence[Array], theirs: Sequence[Array]) -> SiteGains:
    """What each site gains from our losses over theirs, of all rows that both know: [sites].

    Args:
        ours: [rows] of each site, nan: not held out.
        theirs: Of the same rows.
    """
    found = all_rows(("theirs", "ours"), sites_of({"theirs": theirs, "ours": ours}))
    return SiteGains(*(values[0] for values in _gains(found, np.array([1]), np.array([0]))))


def _are_better(gains: SiteGains) -> NDArray[np.bool_]:
    """[draws, sites]: where the posterior of a site's own gain, N(μ, τ²) over the sites, is above zero by ERRORS."""
    known = ~np.isnan(gains.mean)
    mean, variance = np.where(known, gains.mean, 0), np.where(known, gains.variance, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = known / variance
        sums = weight.sum(1, keepdims=True)
        centre = (weight * mean).sum(1, keepdims=True) / sums
        excess = (weight * (mean - centre) ** 2).sum(1, keepdims=True) - (known.sum(1, keepdims=True) - 1)
        scale = sums - (weight**2).sum(1, keepdims=True) / sums
        several = known.sum(1, keepdims=True) > 1
        between = np.where(several, np.maximum(excess / scale, 0), 0)
        total = known / (variance + between)
        common = (total * mean).sum(1, keepdims=True) / total.sum(1, keepdims=True)
        own = between / (between + variance)
        posterior = own * mean + (1 - own) * common
        error = np.sqrt(own * variance + (1 - own) ** 2 / total.sum(1, keepdims=True))
    better: NDArray[np.bool_] = (
        known & (gains.rows >= FEWEST_ROWS) & (mean > 0) & (posterior > ERRORS * error)
    )
    return better
