"""What the sites gain from training together over the best that each has alone, by losses of rows held out.

Who chooses the best of several candidates and reports its losses on the same rows promises too much. So the rows of
each site are drawn again (`drawn`), the choice is made again on what was drawn, on both sides, and counts for the rows
that were not drawn (Tsamardinos, Greasidou, Borboudakis 2018). Over many draws a row has two losses by choices that
did not see it:

    together_r = Σ_c share_cr loss_cr     share: how often, of the draws without row r, its site had candidate c

and the same of the choice among what is trained alone. Nothing is trained again. A site's gain is the mean over its
rows of alone minus together; of squared errors, the difference of the roots of the means.

What varies is said apart:

- these sites: the rows. The variance of a site's mean over rows is multiplied by 1 + held out / trained on, as models
  of different folds share rows (Nadeau and Bengio 2003), and that over the choices of the draws is added.
- a new site like these: the sites.
- each site: the gain that n rows like its own lead one to expect is one of N(μ + β/n, τ²), with every τ weighted by
  its likelihood, and its variance is moderated by those of the other sites (Smyth 2004). A site is called better or
  worse by its own rows, corrected for the number of sites (Holm).

docs/verdict.md has the rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from copfl.errors import UsageError
from copfl.rivals.records import Array
from copfl.stats import LEVEL, Interval, Numbers, holm, mean_of_known, outside, over_seeds, t_quantile
from copfl.tables import plain
from copfl.verdict.drawn import Choose, Losses, Site, all_rows, drawn, moments, sites_of, tables

DRAWS, FEWEST_DRAWS = 2_000, 500  # of few rows, and of many
DRAWN = 30_000_000  # rows altogether, but for the fewest draws
EQUAL = 1e-9  # differences, as a fraction of the losses, that are rounding
LEAST = 1e-300  # of a mean square
FEWEST_SITES = 4  # of which anything is said about a new one
FEWEST_MODERATED = 4  # sites by whose variances another's is moderated
FREEDOM = 1e6  # the normal distribution's, for a t distribution
FEWEST_TO_BOUND = 8  # sites whose differences say how unsure their gains are
FEWEST_FOR_SIZES = 8  # sites by which is told how gains depend on their rows
FEWEST_NAMED = 4  # rows of a site that is called better or worse
NODES = 128  # values of τ
FARTHEST = 3.0  # the largest of them, in units of the range of the gains
STEPS = 50  # of the search of a quantile
BETTER, WORSE, AS_ALL, UNCLEAR, EQUALLY, UNKNOWN = WORDS = (
    "better together",
    "better alone",
    "as all sites show",  # its own rows do not
    "no clear difference",
    "the same",
    "too few rows",
)


class Estimate(NamedTuple):
    """A gain with its interval; nan: not known."""

    gain: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 and -1 where the interval is above and below zero, else 0."""
        return int(self.low > 0) - int(self.high < 0)


class SiteGain(NamedTuple):
    """What one site gains."""

    gain: float  # given what all sites show
    low: float
    high: float
    measured: float  # on its own rows alone
    rows: int
    together: str  # the candidate that it has with the federation; one of those alone where it departs
    alone: str  # the best candidate that it has without
    word: str  # of WORDS; BETTER and WORSE are wrong of any site in 5 of 100 federations at most


class Verdict(NamedTuple):
    """What training together is worth. A gain is positive where it is better than alone."""

    is_rmse: bool  # the loss of a site is a root mean squared error, and not a mean loss
    these: Estimate  # the mean over these sites that is to be expected of other rows of theirs
    error: float  # the standard error of that mean
    fresh: Interval  # in which the mean over as many other rows of these sites is
    like_these: Estimate  # the mean over other sites like these; nan: too few sites
    new_site: Interval  # in which the gain of one more site is; nan: too few sites
    loss_together: float  # means over the sites
    loss_alone: float
    sites: tuple[SiteGain, ...]
    others: Mapping[str, Estimate] = {}  # the gain in other metrics, by their name

    def named(self, word: str) -> list[int]:
        """The sites of which this is said.

        Args:
            word: As of `SiteGain`.
        """
        return [n for n, site in enumerate(self.sites) if site.word == word]


class Shares(NamedTuple):
    """How often, of the draws without a row, its site had each candidate; nan: no draw was without it."""

    together: list[Numbers]  # [candidates, rows] of each site
    alone: list[Numbers]
    spread: Numbers  # [sites], the variance of a site's gain over the choices of the draws
    spread_of_mean: float  # the same of the mean over the sites


class Measured(NamedTuple):
    """What the rows of each site say, [sites]; nan: nothing."""

    gain: Numbers
    variance: Numbers  # of a site's gain over its rows; nan of one unit
    units: Numbers
    together: Numbers  # the loss
    alone: Numbers


def corrected_gain(
    losses: Losses,
    *,
    together: Collection[str],
    alone: Collection[str],
    choose: Choose,
    only_shown: Collection[str] = (),
    units: Sequence[Array] | None = None,
    is_rmse: bool = False,
    folds: int = 5,
    draws: int | None = None,
    seed: int = 0,
    pairs: Losses | None = None,
    others: Mapping[str, Losses] | None = None,
) -> Verdict:
    """What the sites gain from training together over the best that each has alone.

    Args:
        losses: Of each candidate, the simplest first, the losses of each site's rows by models that did not see them;
            nan: not held out, or no model. A candidate that was dropped before all folds must not be among them.
        together: Methods of the federation.
        alone: Candidates that a site trains alone, at least one.
        choose: The choice. It is asked twice: for methods and what a site can depart to, and for what is alone.
        only_shown: Of what is alone, models that a run cannot train, so that no site departs to them.
        units: Which rows of a site belong together, such as those of one patient; None: each is alone.
        is_rmse: Whether losses are squared errors, of which a site's loss is the root of the mean.
        folds: Into how many parts rows were divided.
        draws: How often rows are drawn again; None: DRAWS, of many rows fewer.
        seed: Of the draws.
        pairs: Losses of the same rows by models that lack two folds, the row's own and another, by which the gain is
            carried on to models of all rows. The choices do not see them.
        others: Further metrics by their name, as tables like the losses where less is better; see `pseudo_values`
            for those that are no mean over rows.
    """
    sides = (
        [name for name in losses if name in together or (name in alone and name not in only_shown)],
        [name for name in losses if name in alone],
    )
    if not sides[1] or not any(name in together for name in losses):
        raise UsageError(
            "a verdict compares what is trained together with what is trained alone, and one of them has no losses; "
            "evaluate one candidate of each at least"
        )
    used = {name: losses[name] for name in losses if name in sides[0] or name in sides[1]}
    names, sites = tuple(used), sites_of(used, units)
    whole = all_rows(names, sites)
    picks = [[side[n] for n in choose(whole.only(side))[0].tolist()] for side in sides]
    rows = sum(len(site.rows) for site in sites)
    usual = max(FEWEST_DRAWS, min(DRAWS, DRAWN // max(rows, 1)))
    shares = _shares(names, sites, sides, choose, is_rmse, draws or usual, seed)
    found = measured(sites, shares, is_rmse, _carried_on(used, pairs, sites, alone, folds))
    sizes = np.array([len(rows) for rows in used[names[0]]])
    held_out = np.array([len(site.rows) for site in sites])
    shared = 1 + held_out / (np.maximum(sizes, 1) * (1 - 1 / folds))
    errors = _errors(found, shared, shares.spread)
    these, error, fresh = _these_sites(found, errors, shares.spread_of_mean, shared)
    of_sites, new_site = _of_sites(found, errors, list(zip(*picks, strict=True)), held_out.tolist())
    return Verdict(
        is_rmse,
        these,
        error,
        fresh,
        _like_these(found, these),
        new_site,
        float(mean_of_known(found.together)),
        float(mean_of_known(found.alone)),
        of_sites,
        {name: _in_other(table, sites, names, shares, shared) for name, table in (others or {}).items()},
    )


def _carried_on(
    losses: Losses, pairs: Losses | None, sites: Sequence[Site], alone: Collection[str], folds: int
) -> list[Numbers]:
    """By how much losses change from models that lack a fold, a fraction f of the rows, to those of all rows.

    What is trained alone suffers more where a fold is held out, so cross-validation promises too much. Where two
    folds are held out at once, models have the fraction g. A loss that falls as 1 / rows is carried on:
    L(1) = L(f) - (L(g) - L(f)) (1/f - 1) / (1/g - 1/f). Candidates without such losses stay as they are; where one of
    those alone has none, all stay, as it would be at a disadvantage. So do sites of two rows.

    Args:
        losses: Of models that lack a fold.
        pairs: Of models that lack two.
        sites: Their rows.
        alone: Candidates that a site trains alone.
        folds: Into how many parts rows were divided.

    Returns:
        [candidates, rows] of each site.
    """
    changes = [np.zeros(site.losses.shape) for site in sites]
    if pairs is None or any(name in losses and name not in pairs for name in alone):
        return changes
    for n, (change, site) in enumerate(zip(changes, sites, strict=True)):
        parts = min(folds, site.units)
        if parts <= 2:
            continue
        more, most = 1 / (1 - 1 / parts), 1 / (1 - 2 / parts)
        for row, name in enumerate(losses):
            if name in pairs:
                worse = np.asarray(pairs[name][n], np.float64)[site.rows] - site.losses[row]
                change[row] = np.where(np.isfinite(worse), -worse * (more - 1) / (most - more), 0)
    return changes


def _shares(
    names: Sequence[str],
    sites: Sequence[Site],
    sides: Sequence[Sequence[str]],
    choose: Choose,
    is_rmse: bool,
    draws: int,
    seed: int,
) -> Shares:
    """The choices on rows that are drawn again."""
    every = np.arange(len(names))[:, None]
    shares = [[np.zeros((len(names), len(site.rows))) for site in sites] for _ in sides]
    places = [np.array([names.index(name) for name in side]) for side in sides]
    losses = _site_loss(all_rows(names, sites).means[0], is_rmse)  # [candidates, sites]
    gains, sums = [], tables(sites)
    for weights in drawn(sites, len(names), draws, seed):
        found = moments(names, sums, weights)
        picks = [own[choose(found.only(side))] for own, side in zip(places, sides, strict=True)]
        of_draws = [np.take_along_axis(losses, pick, 0) for pick in picks]
        gains.append(of_draws[1] - of_draws[0])
        for n, weight in enumerate(weights):
            is_out = (weight == 0).astype(np.float64)
            for side, pick in zip(shares, picks, strict=True):
                side[n] += (pick[:, n] == every).astype(np.float64) @ is_out
    for side in shares:
        for own in side:
            with np.errstate(invalid="ignore"):
                own /= own.sum(0)
    every_gain = np.concatenate(gains)  # [draws, sites]
    return Shares(shares[0], shares[1], every_gain.var(0), float(mean_of_known(every_gain, 1).var()))


def _site_loss(means: Any, is_rmse: bool) -> Numbers:
    return np.sqrt(means) if is_rmse else np.asarray(means)


def measured(
    sites: Sequence[Site], shares: Shares, is_rmse: bool, changes: Sequence[Numbers] | None = None
) -> Measured:
    """The gain of each site, by the choices that did not see its rows.

    Args:
        sites: The rows.
        shares: Of the candidates.
        is_rmse: As of `corrected_gain`.
        changes: Of the losses, to models of all rows; None: there is none.
    """
    rows: dict[int, tuple[Numbers, Numbers, Array]] = {}
    for n, site in enumerate(sites):
        own, change = (
            np.stack([_weighted(side[n], table) for side in (shares.together, shares.alone)])
            for table in (site.losses, site.losses * 0 if changes is None else changes[n])
        )
        if (known := ~np.isnan(own).any(0)).any():
            # Of equal models the losses differ by rounding where the choices went to and fro.
            is_equal = np.abs(own[1] - own[0]) <= EQUAL * np.nan_to_num(np.abs(own)).max()
            own[1], change[1] = np.where(is_equal, own[0], own[1]), np.where(is_equal, change[0], change[1])
            rows[n] = own[:, known], change[:, known], np.unique(site.unit[known], return_inverse=True)[1]
    found = np.full((5, len(sites)), np.nan)
    # A change of a mean square is one of its root by the slope at the mean over sites: at a site of two rows the mean
    # may be next to nothing.
    typical = np.array([own.mean(1) for own, _, _ in rows.values()]).mean(0) if rows else np.ones(2)
    for n, (own, change, unit) in rows.items():
        means = own.mean(1)
        slopes = [np.ones(2)] * 2
        if is_rmse:
            slopes = [1 / (2 * np.sqrt(np.maximum(at, LEAST))) for at in (means, typical)]
        together, alone = _site_loss(means, is_rmse) + slopes[1] * change.mean(1)
        moved = slopes[0][:, None] * (own - means[:, None])
        moved = moved + slopes[1][:, None] * (change - change.mean(1, keepdims=True))
        count = int(unit.max()) + 1
        of_units = np.bincount(unit, moved[1] - moved[0]) / len(unit)
        variance = (of_units**2).sum() * count / (count - 1) if count > 1 else np.nan
        found[:, n] = alone - together, variance, count, together, alone
    return Measured(*found)


def _weighted(shares: Numbers, losses: Numbers) -> Numbers:
    """[rows]: the mean over the candidates; nan where no draw was without the row."""
    return np.asarray((shares * np.where(shares > 0, losses, 0)).sum(0))


def _in_other(
    table: Losses, sites: Sequence[Site], names: Sequence[str], shares: Shares, shared: Numbers
) -> Estimate:
    """The gain of these sites in another metric of which less is better, by the same choices.

    Args:
        table: Of the candidates.
        sites: Their rows.
        names: Of the candidates.
        shares: Of the candidates.
        shared: [sites], the factor for rows that models share.
    """
    translated = []
    for n, site in enumerate(sites):
        own = np.stack([np.asarray(table[name][n], np.float64)[site.rows] for name in names])
        translated.append(site._replace(losses=np.where(np.isfinite(own), own, np.nan)))
    # What the choices of the draws are worth in this metric is small beside its rows, and left out.
    found = measured(translated, shares, is_rmse=False)
    return _these_sites(found, _errors(found, shared, np.zeros(len(sites))), 0.0, shared)[0]


def pseudo_values(metric: Callable[[Array], float], rows: int) -> Numbers:
    """[rows], whose mean is a metric that is no mean over rows, such as an AUC: the jackknife's (Tukey 1958).

    Args:
        metric: Of the rows at these places.
        rows: Their number, at least two.
    """
    every = np.arange(rows)
    without = np.array([metric(np.delete(every, row)) for row in every])
    return rows * metric(every) - (rows - 1) * without


class _Errors(NamedTuple):
    """[sites]; nan: not known."""

    rows: Numbers  # the variance of a site's gain as rows vary, by its own rows where it has two
    moderated: Numbers  # the same, moderated by the other sites', and as choices vary
    freedom: Numbers  # of t, of the moderated one

    @property
    def as_normal(self) -> Numbers:
        """The variances of the normal distributions whose intervals are as wide as those of t."""
        factors = [_t(f) / _t(FREEDOM) if f > 0 else math.nan for f in self.freedom.tolist()]
        return np.asarray(self.moderated * np.array(factors) ** 2)


def _t(freedom: float) -> float:
    return t_quantile((1 + LEVEL) / 2, freedom)


def _errors(found: Measured, shared: Numbers, spread: Numbers) -> _Errors:
    """The variances of the sites' gains, those of few rows moderated by all others'.

    A row's variance at a site is one of a scaled inverse χ² with d₀ degrees of freedom and scale s₀², both by the
    moments of the logarithms; with d of its own, the site's is (d₀ s₀² + d s²) / (d₀ + d).

    Args:
        found: What the rows say.
        shared: [sites], the factor for rows that models share.
        spread: [sites], the variance over choices.
    """
    from scipy.special import digamma, polygamma

    freedom = np.where(found.units > 1, found.units - 1, 0.0)
    of_rows = np.where(freedom > 0, found.variance * found.units, 0.0)
    usable = of_rows > 0
    prior, prior_freedom = 0.0, 0.0
    if usable.sum() >= FEWEST_MODERATED:
        half = freedom[usable] / 2
        logs = np.log(of_rows[usable]) - digamma(half) + np.log(half)
        excess = float(logs.var(ddof=1) - polygamma(1, half).mean())
        prior_freedom = 2 * _inverse_trigamma(excess) if excess > 0 else FREEDOM
        prior = math.exp(float(logs.mean()) + float(digamma(prior_freedom / 2)) - math.log(prior_freedom / 2))
    total = freedom + prior_freedom
    is_equal = (found.gain == 0) & (of_rows == 0) & (spread <= (EQUAL * found.alone) ** 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        moderated = shared * (prior_freedom * prior + freedom * of_rows) / total / found.units + spread
    moderated = np.where(is_equal, 0.0, moderated)
    if usable.any():  # what a site of one row has
        usual = prior if prior_freedom else float(of_rows[usable].mean())
        of_rows = np.where((freedom > 0) | is_equal, of_rows, usual)
    with np.errstate(invalid="ignore"):
        rows = np.where(is_equal | usable.any(), shared * of_rows / found.units, np.nan)
    return _Errors(rows, moderated, np.where(is_equal, FREEDOM, np.minimum(total, FREEDOM)))


def _inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = value, by Newton's steps on 1 / trigamma, which is nearly linear (Smyth 2004)."""
    from scipy.special import polygamma

    if value > 1e7:
        return 1 / math.sqrt(value)
    if value < 1 / FREEDOM:
        return FREEDOM
    x = 0.5 + 1 / value
    for _ in range(STEPS):
        trigamma = float(polygamma(1, x))
        x += trigamma * (1 - trigamma / value) / float(polygamma(2, x))
    return x


def _these_sites(
    found: Measured, errors: _Errors, spread: float, shared: Numbers
) -> tuple[Estimate, float, Interval]:
    """The mean over the sites that is to be expected, its standard error, and where it is on as many other rows.

    Degrees of freedom are those of Satterthwaite (1946). What rows and the models of a site do to its gain is also in
    the differences of many sites, but for the luck of the models that are trained in the end. In simulations an
    interval over sites that is narrower is too narrow, and the one over rows too wide, so it is the mean of their
    squares.

    Args:
        found: What the rows say.
        errors: Of the sites.
        spread: The variance of the mean over choices.
        shared: [sites], the factor for rows that models share.
    """
    known = ~np.isnan(found.gain)
    gain = float(mean_of_known(found.gain))
    parts = errors.rows[known] / known.sum() ** 2
    if np.isnan(parts).any() or not len(parts):
        return Estimate(gain, math.nan, math.nan), math.nan, Interval(math.nan, math.nan)
    freedom = np.maximum(found.units[known] - 1, 1)
    total = float(parts.sum())
    own = float((parts / shared[known]).sum())
    joint = total**2 / float((parts**2 / freedom).sum()) if total else FREEDOM
    error = math.sqrt(total + spread)
    half = _t(min(joint, FREEDOM)) * error
    if known.sum() >= FEWEST_TO_BOUND and (of_sites := over_seeds(found.gain[known]).half) < half:
        half = math.sqrt((half**2 + max(of_sites, _t(min(joint, FREEDOM)) * math.sqrt(own)) ** 2) / 2)
        error = half / _t(FREEDOM)
    wider = math.hypot(half, _t(min(joint, FREEDOM)) * math.sqrt(own))  # other rows vary, too
    return Estimate(gain, gain - half, gain + half), error, Interval(gain - wider, gain + wider)


class _Posterior(NamedTuple):
    """The gains of the sites given all rows: for each τ their normal distributions, and its weight."""

    weight: Numbers  # [τ]
    mean: Numbers  # [τ, sites]
    deviation: Numbers  # [τ, sites]
    new: tuple[Numbers, Numbers]  # mean and deviation [τ, 1] of one more site, as large as the others

    @classmethod
    def of(cls, gain: Numbers, variance: Numbers, units: Numbers) -> _Posterior:
        """Of sites whose gain and its variance, above 0, are known. All values of μ and τ are alike before.

        Args:
            gain: [sites].
            variance: [sites].
            units: [sites].
        """
        small = 1 / units - (1 / units).mean()
        columns = [np.ones(len(gain))]
        if len(gain) >= FEWEST_FOR_SIZES and np.ptp(units):
            columns.append(small / np.abs(small).max())
        design = np.stack(columns, 1)  # [sites, 1 or 2]
        widest = max(float(np.ptp(gain)), math.sqrt(float(variance.min())))
        between = (FARTHEST * widest * ((np.arange(NODES) + 0.5) / NODES) ** 2) ** 2  # τ², dense near 0
        # A site that gains or loses much has rows that differ much. By its own variance it would hardly count for τ,
        # and sites would seem more alike than they are.
        pooled = (variance * units).mean() / units
        precision = 1 / (pooled + between[:, None])
        gram = np.einsum("ts,sp,sq->tpq", precision, design, design)
        # β is one of N(0, τ²) at the site with the fewest rows, so that this site alone does not decide on it.
        slopes = len(columns) - 1
        gram[:, 1:, 1:] += (1 / between)[:, None, None] * np.eye(slopes)
        inverse = np.linalg.inv(gram)
        solution = np.einsum("tpq,ts,sq,s->tp", inverse, precision, design, gain)
        common = solution @ design.T
        error = np.einsum("sp,tpq,sq->ts", design, inverse, design)  # variance of the common gain
        log_weight = np.log(precision).sum(1) - (precision * (gain - common) ** 2).sum(1)
        log_weight += (
            np.linalg.slogdet(inverse)[1] + np.log(between) / 2
        )  # the distance between the values of τ
        weight = np.exp((log_weight - log_weight.max()) / 2)
        own = between[:, None] / (variance + between[:, None])  # what the site's own rows count
        deviation = np.sqrt(own * variance + (1 - own) ** 2 * error)
        new = solution[:, :1], np.sqrt(between[:, None] + inverse[:, 0, :1])
        return cls(weight / weight.sum(), own * gain + (1 - own) * common, deviation, new)


def _quantiles(
    weight: Numbers, mean: Numbers, deviation: Numbers, probabilities: Sequence[float]
) -> list[Numbers]:
    """[sites] for each probability, of a mixture of normal distributions, by halving."""
    from scipy.special import ndtr

    found = []
    for probability in probabilities:
        low, high = (mean - 9 * deviation).min(0), (mean + 9 * deviation).max(0)
        for _ in range(STEPS):
            middle = (low + high) / 2
            is_low = weight @ ndtr((middle - mean) / deviation) < probability
            low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
        found.append((low + high) / 2)
    return found


def _of_sites(
    found: Measured, errors: _Errors, names: Sequence[tuple[str, str]], rows: Sequence[int]
) -> tuple[tuple[SiteGain, ...], Interval]:
    """What is said of each site, and the interval of one more.

    Args:
        found: What the rows say.
        errors: Of the sites.
        names: Of each site what it has together and alone.
        rows: Of each site.
    """
    tails = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    is_equal = errors.moderated == 0
    variance = errors.as_normal
    unequal = np.flatnonzero(~np.isnan(variance) & ~is_equal & ~np.isnan(found.gain))
    gain, low, high = (np.where(is_equal, 0.0, np.nan) for _ in range(3))
    new = Interval(math.nan, math.nan)
    if len(unequal) >= FEWEST_SITES:
        posterior = _Posterior.of(found.gain[unequal], variance[unequal], found.units[unequal])
        gain[unequal] = posterior.weight @ posterior.mean
        low[unequal], high[unequal] = _quantiles(*posterior[:3], tails)
        new = Interval(*(float(end[0]) for end in _quantiles(posterior.weight, *posterior.new, tails)))
    else:  # nothing is known of how much sites differ
        half = _t(FREEDOM) * np.sqrt(variance[unequal])
        gain[unequal] = found.gain[unequal]
        low[unequal], high[unequal] = gain[unequal] - half, gain[unequal] + half
    words = [EQUALLY if equal else UNKNOWN for equal in is_equal.tolist()]
    p_values = [
        float(outside(abs(g) / math.sqrt(v), f))
        for g, v, f in zip(
            found.gain[unequal], errors.moderated[unequal], errors.freedom[unequal], strict=True
        )
    ]
    for site, p in zip(unequal.tolist(), holm(p_values), strict=True):
        if found.units[site] >= FEWEST_NAMED and p < 1 - LEVEL:
            words[site] = BETTER if found.gain[site] > 0 else WORSE
        else:
            words[site] = UNCLEAR if low[site] <= 0 <= high[site] else AS_ALL
    table = zip(gain, low, high, found.gain, rows, names, words, strict=True)
    return tuple(
        SiteGain(float(g), float(lo), float(hi), float(own), int(count), has, else_, word)
        for g, lo, hi, own, count, (has, else_), word in table
    ), new


def _like_these(found: Measured, these: Estimate) -> Estimate:
    """The mean over sites like these: as sites vary, and not narrower than as only rows do."""
    known = found.gain[~np.isnan(found.gain)]
    if len(known) < FEWEST_SITES or math.isnan(these.low):
        return Estimate(these.gain, math.nan, math.nan)
    half = max(over_seeds(known).half, (these.high - these.low) / 2)
    return Estimate(these.gain, these.gain - half, these.gain + half)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """For the files of a run; null for what is not known."""
    content = verdict._asdict() | {
        "these": verdict.these._asdict(),
        "fresh": verdict.fresh._asdict(),
        "like_these": verdict.like_these._asdict(),
        "new_site": verdict.new_site._asdict(),
        "sites": [site._asdict() for site in verdict.sites],
        "others": {name: other._asdict() for name, other in verdict.others.items()},
    }
    return dict(plain(content))


def from_json(content: Mapping[str, Any]) -> Verdict:
    """The inverse of `as_json`; one of `foreign.DAMAGE` where it is something else.

    Args:
        content: Of the file.
    """
    return Verdict(
        is_rmse=bool(content["is_rmse"]),
        these=Estimate(*_numbers(content["these"], Estimate._fields)),
        error=_number(content["error"]),
        fresh=Interval(*_numbers(content["fresh"], Interval._fields)),
        like_these=Estimate(*_numbers(content["like_these"], Estimate._fields)),
        new_site=Interval(*_numbers(content["new_site"], Interval._fields)),
        loss_together=_number(content["loss_together"]),
        loss_alone=_number(content["loss_alone"]),
        sites=tuple(_site(site) for site in content["sites"]),
        others={
            str(name): Estimate(*_numbers(other, Estimate._fields))
            for name, other in content["others"].items()
        },
    )


def _site(content: Mapping[str, Any]) -> SiteGain:
    word = str(content["word"])
    if word not in WORDS:
        raise ValueError(f"nothing says {word!r} of a site")
    gain, low, high, own = _numbers(content, SiteGain._fields[:4])
    names = str(content["together"]), str(content["alone"])
    return SiteGain(gain, low, high, own, int(content["rows"]), *names, word)


def _numbers(content: Mapping[str, Any], fields: Sequence[str]) -> list[float]:
    return [_number(content[field]) for field in fields]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
