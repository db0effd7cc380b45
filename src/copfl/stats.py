"""Means, spreads, paired differences and rank correlations, with intervals.

A difference of two methods varies with the clients and with the seeds, and so has three intervals:

- over seeds: each seed gives one difference, the mean of the paired differences of its clients. What varies is what a
  seed draws: weights and batches, and the clients where it draws them, too;
- over clients: each client has its mean over the seeds. It takes the seeds as given, and is too narrow for others;
- over both: the one that answers "is there a difference with other clients, weights and batches?". Where every seed
  draws its own clients it is that over seeds. Where the clients are the same in every seed, such as hospitals,
  it is that of a two-way model of clients and seeds (`TwoWay`).

With one seed nothing is known of the next. What is said then is about these clients and this seed.
The rates of coverage and of false positives are in docs/statistics.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Measure = Callable[[Numbers, Numbers], Numbers]

LEVEL = 0.95
WORST = 0.1  # fraction of the clients
LAST = 5  # evaluations that a value is the mean of, where a run has enough of them
STEPS = 30  # of the search of a p value
RANK_DRAWS = 2000  # of the bootstrap of a rank correlation
SAMPLE_DRAWS = 1000  # of the bootstrap over the test samples of one client


class Spread(NamedTuple):
    """A mean and its standard deviation (n - 1), which is nan of one value."""

    mean: float
    spread: float


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def without_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def half(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2


class Difference(NamedTuple):
    """A row's gain over the reference; all nan where it cannot be computed."""

    mean: float
    seeds: Interval
    clients: Interval
    both: Interval  # over clients and seeds
    p: float  # of no difference, by the interval over both; corrected where there are several rows
    unknown: str = ""  # why it cannot be computed

    @property
    def verdict(self) -> str:
        """The conclusion that the interval over both allows, corrected for the number of rows."""
        if self.unknown:
            return f"not computed: {self.unknown}"
        if not self.p < 1 - LEVEL:
            return "not distinguishable"
        return "higher" if self.mean > 0 else "lower"

    def as_json(self) -> dict[str, Any]:
        """For the files of a comparison."""
        return {
            "mean": self.mean,
            "over_seeds": self.seeds,
            "over_clients": self.clients,
            "over_both": self.both,
            "p": self.p,
            "verdict": self.verdict,
        }


def how_decided(rows: int) -> str:
    """The sentences below a table of differences that say what its verdicts rest on.

    Args:
        rows: How many differences the table has.
    """
    if rows < 2:
        return "The verdict is by the interval over both."
    return (
        f"The verdicts are by the interval over both and hold for all {rows} together (Holm): "
        "an interval alone may exclude zero where its row is not told apart."
    )


class Correlation(NamedTuple):
    """A rank correlation with its interval; all nan where nothing can be ranked."""

    value: float
    low: float
    high: float


def averaged(evaluations: int) -> int:
    """How many of a run's evaluations its value is the mean of: the last third, at most LAST.

    Five of a short run would be all of it, from the first round on.
    """
    return max(1, min(LAST, evaluations // 3))


def spread_of(values: Sequence[float] | Numbers) -> Spread:
    """The mean and spread over seeds."""
    array = np.asarray(values, np.float64)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else math.nan)


def mean_of_known(values: Numbers, axis: int = 0) -> Numbers:
    """The mean along an axis of the values that are not nan; nan where all are."""
    known = ~np.isnan(values)
    total = np.where(known, values, 0).sum(axis)
    return _ratio(total, known.sum(axis).astype(np.float64))


def worst_of(values: Numbers, higher_is_better: bool = True) -> float:
    """The mean over the worst tenth, at least one."""
    known = np.sort(values[~np.isnan(values)])
    known = known if higher_is_better else known[::-1]
    return float(known[: max(1, math.ceil(WORST * len(known) - 1e-9))].mean())


def difference(
    row: Sequence[Numbers],
    reference: Sequence[Numbers],
    level: float = LEVEL,
    same_clients: bool = False,
) -> Difference:
    """The paired difference of two rows.

    Args:
        row: The values of its clients, an array per seed.
        reference: Those of the other row.
        level: Of confidence.
        same_clients: Whether a client is the same one in every seed.
    """
    gains = [difference_of_known(a, b) for a, b in zip(row, reference, strict=True)]
    if reason := unknown_reason(gains):
        nowhere = Interval(math.nan, math.nan)
        return Difference(math.nan, nowhere, nowhere, nowhere, math.nan, reason)
    means = np.array([gain.mean() for gain in gains])
    of_clients = np.full((len(row), max(map(len, row))), np.nan)  # [seeds, clients]
    for seed, (a, b) in enumerate(zip(row, reference, strict=True)):
        of_clients[seed, : len(a)] = a - b
    interval = TwoWay.of(of_clients).interval if same_clients else partial(over_seeds, means)
    return Difference(
        float(means.mean()),
        over_seeds(means, level),
        over_clients(mean_of_known(of_clients), level),
        interval(level),
        _p_value(interval),
    )


class Error(NamedTuple):
    """The standard error of a mean, and its degrees of freedom; 0 of one value."""

    value: float
    freedom: int

    @classmethod
    def of(cls, values: Numbers) -> "Error":
        """Of the mean of independent values: s / √n."""
        count = len(values)
        return cls(float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan, count - 1)

    def half(self, level: float) -> float:
        """Half the width of the t interval."""
        return t_quantile((1 + level) / 2, self.freedom) * self.value


class TwoWay(NamedTuple):
    """The mean of gains over clients and seeds, where the same clients are in every seed.

    The model is gain = mean + effect of the client + effect of the seed + rest, all of them random. With a, b and e the
    half widths of the t intervals over the seeds' means, over the clients' means, and of the rest, the half width
    is √(a² + b² - e²), and at least a and b: the rest is in a and in b, and counts once. It is as wide as the
    interval over seeds if only they differ, and as that over clients if only they do.
    """

    mean: float
    of_seeds: Error
    of_clients: Error
    of_rest: Error

    @classmethod
    def of(cls, gains: Numbers) -> "TwoWay":
        """Of gains [seeds, clients]; nan: the client has none."""
        gains = gains[:, ~np.isnan(gains).all(0)]
        seeds, clients = mean_of_known(gains, 1), mean_of_known(gains)
        mean, freedom = float(seeds.mean()), (len(seeds) - 1) * (len(clients) - 1)
        rest = Error(0.0, max(freedom, 1))  # where a client lacks a seed, it counts twice
        if freedom and not np.isnan(gains).any():
            left = gains - seeds[:, None] - clients + mean
            rest = Error(math.sqrt(float((left**2).sum()) / freedom / gains.size), freedom)
        return cls(mean, Error.of(seeds), Error.of(clients), rest)

    def interval(self, level: float = LEVEL) -> Interval:
        """With this confidence; unbounded for one seed or one client."""
        if not (self.of_seeds.freedom and self.of_clients.freedom):
            return Interval(-math.inf, math.inf)
        a, b, e = (error.half(level) ** 2 for error in self[1:])
        half = math.sqrt(max(a + b - e, a, b))
        return Interval(self.mean - half, self.mean + half)


def _p_value(interval: Callable[[float], Interval]) -> float:
    """The smallest 1 - level at which the interval excludes zero; 1 where none does."""
    if not interval(0.0).without_zero:
        return 1.0
    low, high = -12.0, 0.0  # of its logarithm, by halving
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if interval(1 - 10**middle).without_zero else (middle, high)
    return float(10**high)


def for_all(differences: Mapping[str, Difference]) -> dict[str, Difference]:
    """The differences of several rows with p values that hold for all of them together, by Holm.

    Without any difference at least one is called different in at most 5 % of comparisons.

    Args:
        differences: By the row's name; those that are not computed do not count.
    """
    known = [name for name, found in differences.items() if not found.unknown]
    corrected = dict(zip(known, holm([differences[name].p for name in known]), strict=True))
    return {
        name: found._replace(p=corrected[name]) if name in corrected else found
        for name, found in differences.items()
    }


def difference_of_known(a: Numbers, b: Numbers) -> Numbers:
    """a - b of the clients that have both values; nan: the client never took part."""
    known = ~(np.isnan(a) | np.isnan(b))
    with np.errstate(invalid="ignore"):  # of two infinite values
        return np.asarray(a[known] - b[known])


def unknown_reason(gains: Sequence[Numbers]) -> str:
    """Why the mean of these differences, an array per seed, cannot be computed; "" if it can."""
    empty, infinite = (
        sum(not len(gain) for gain in gains),
        sum(int((~np.isfinite(gain)).sum()) for gain in gains),
    )
    if empty:
        where = "" if len(gains) == 1 else f" of {empty} of {len(gains)} seeds"
        return f"no client{where} has a value under both"
    if infinite:
        return f"{infinite} of {sum(map(len, gains))} values of clients are infinite"
    return ""


def over_seeds(means: Numbers, level: float = LEVEL) -> Interval:
    """mean ± t(n - 1) · s / √n over the seeds' differences; unbounded for one seed."""
    if len(means) < 2:
        return Interval(-math.inf, math.inf)
    mean, half = float(means.mean()), Error.of(means).half(level)
    return Interval(mean - half, mean + half)


@lru_cache(maxsize=4096)  # a page has thousands of intervals, with a few numbers of seeds and of clients
def t_quantile(probability: float, freedom: float) -> float:
    """Of the t distribution with these degrees of freedom."""
    from scipy.special import stdtrit  # what scipy.stats calls, whose import takes four times as long

    return float(stdtrit(freedom, probability))


def outside(distance: float | Numbers, freedom: float) -> Numbers:
    """The probability that a value of this t distribution is farther from 0 than `distance`."""
    from scipy.special import stdtr

    return np.asarray(2 * stdtr(freedom, -distance))


def t_test(values: Numbers, centre: float = 0.0) -> float:
    """The two-sided p value of the mean being `centre`: below 1 - LEVEL where the interval excludes it."""
    distance, error = abs(float(values.mean()) - centre), float(values.std(ddof=1)) / math.sqrt(len(values))
    if error == 0:
        return 0.0 if distance else 1.0
    return float(outside(distance / error, len(values) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values corrected for their number by Holm's step-down procedure, in the same order.

    The smallest of m is multiplied by m, the next by m - 1, and so on; none falls below a smaller one.
    """
    largest, corrected = 0.0, [0.0] * len(p_values)
    for rank, place in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def over_clients(gains: Numbers, level: float = LEVEL) -> Interval:
    """mean ± t(n - 1) · s / √n over the n clients that have a value; unbounded for one client.

    A bootstrap of few clients is too narrow: of two it excludes zero in half of the runs without a difference.

    Args:
        gains: Of each client, its mean over the seeds: the same clients in several seeds, such as hospitals,
            are no further clients. nan: it has none.
        level: Of confidence.
    """
    return over_seeds(gains[~np.isnan(gains)], level)


def over_samples(gain: Callable[[Any], float], samples: int) -> Interval:
    """The bootstrap interval of a gain when a client's test samples are resampled with replacement.

    Draws that do not define it, such as an AUC of one class, are left out. Unbounded of fewer than two
    samples, and where most draws do not define it.

    Args:
        gain: Of the samples at these places: of two models on the same ones, so that it is paired.
        samples: Their number.
    """
    if samples < 2:
        return Interval(-math.inf, math.inf)
    rng = np.random.default_rng(0)  # fixed, so that the same report has the same interval
    gains = np.array([gain(rng.integers(0, samples, samples)) for _ in range(SAMPLE_DRAWS)])
    known = gains[~np.isnan(gains)]
    if 2 * len(known) < len(gains):
        return Interval(-math.inf, math.inf)
    return _quantiles(known, LEVEL)


def _quantiles(means: Numbers, level: float) -> Interval:
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    return Interval(float(low), float(high))


def ranked(values: Numbers) -> Numbers:
    """Ranks along the last axis, 1 for the lowest; equal values share their mean rank, nan has none."""
    from scipy import stats

    return np.asarray(stats.rankdata(values, axis=-1, nan_policy="omit"))


def spearman(a: Numbers, b: Numbers) -> Numbers:
    """The correlation of the ranks along the last axis; nan where a side is constant."""
    x, y = (r - r.mean(-1, keepdims=True) for r in (ranked(a), ranked(b)))
    return _ratio((x * y).sum(-1), np.sqrt((x**2).sum(-1) * (y**2).sum(-1)))


def kendall(a: Numbers, b: Numbers) -> Numbers:
    """Tau-b along the last axis: concordant minus discordant pairs, of those that either orders."""
    # scipy's kendalltau takes one pair of vectors; the bootstrap has thousands.
    x, y = (np.sign(v[..., :, None] - v[..., None, :]) for v in (a, b))
    return _ratio((x * y).sum((-1, -2)), np.sqrt((x**2).sum((-1, -2)) * (y**2).sum((-1, -2))))


def _ratio(above: Any, below: Any) -> Numbers:
    """The quotient; nan where it would divide by zero."""
    return np.asarray(np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0))


def correlation(measure: Measure, a: Sequence[Numbers], b: Sequence[Numbers]) -> Correlation:
    """The mean over seeds of the correlation of a and b, [clients] each.

    The interval resamples the clients, the same ones in all seeds; with ten clients it is wide.
    """
    left, right = np.stack(a), np.stack(b)  # [seeds, clients]
    known = ~(np.isnan(left) | np.isnan(right)).any(0)  # nan: the client never took part
    left, right = left[:, known], right[:, known]
    value = measure(left, right)
    if np.isnan(value).all():
        return Correlation(math.nan, math.nan, math.nan)
    clients = left.shape[1]
    drawn = np.random.default_rng(0).integers(0, clients, (RANK_DRAWS, clients))
    resampled = np.stack([measure(x[drawn], y[drawn]) for x, y in zip(left, right, strict=True)])
    means = mean_of_known(resampled)
    means = means[~np.isnan(means)]  # nan: the same client throughout, which gives no order
    bounds = _quantiles(means, LEVEL) if len(means) else Interval(math.nan, math.nan)
    return Correlation(float(np.nanmean(value)), *bounds)


def agreement(rows: Numbers) -> float:
    """The mean Spearman correlation of every two rows, [rows, clients]; nan of fewer than two."""
    return _mean_correlation([(rows[i], rows[j]) for i in range(len(rows)) for j in range(i)])


def successive_agreement(rows: Numbers) -> float:
    """The mean Spearman correlation of each row with the one before."""
    return _mean_correlation(list(zip(rows[1:], rows[:-1], strict=True)))


def _mean_correlation(pairs: Sequence[tuple[Numbers, Numbers]]) -> float:
    """The mean over pairs of Spearman's correlation over the clients that both rank."""
    common = [(pair, ~(np.isnan(pair[0]) | np.isnan(pair[1]))) for pair in pairs]
    return float(mean_of_known(np.array([spearman(a[known], b[known]) for (a, b), known in common])))
