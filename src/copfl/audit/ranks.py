"""Rank correlations, and how sure one can be of them with few clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
DRAWS = 2000
LEVEL = 0.95


class Correlation(NamedTuple):
    """A rank correlation with its interval; all nan where there is nothing to rank."""

    value: float
    low: float
    high: float


def ranked(values: Numbers) -> Numbers:
    """Ranks from 1 for the lowest on, along the last axis; equal values share the mean of theirs."""
    below = (values[..., None, :] < values[..., :, None]).sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).sum(-1)
    result: Numbers = below + (equal + 1) / 2
    return result


def spearman(a: Numbers, b: Numbers) -> Numbers:
    """The correlation of the ranks, along the last axis; nan where one of them says nothing."""
    x, y = (r - r.mean(-1, keepdims=True) for r in (ranked(a), ranked(b)))
    return _ratio((x * y).sum(-1), np.sqrt((x**2).sum(-1) * (y**2).sum(-1)))


def kendall(a: Numbers, b: Numbers) -> Numbers:
    """Pairs in the same order minus pairs in reverse, of those that either orders (tau-b), along the last axis."""
    x, y = (np.sign(v[..., :, None] - v[..., None, :]) for v in (a, b))
    return _ratio((x * y).sum((-1, -2)), np.sqrt((x**2).sum((-1, -2)) * (y**2).sum((-1, -2))))


def _ratio(above: Numbers, below: Numbers) -> Numbers:
    return np.asarray(np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0))


Measure = Callable[[Numbers, Numbers], Numbers]


def correlation(measure: Measure, a: Sequence[Numbers], b: Sequence[Numbers]) -> Correlation:
    """The mean over seeds of the correlation of a and b, which are [clients] each; the clients are drawn again for the
    interval, the same ones in all seeds. It is about these very clients: with ten of them it is wide.
    """
    left, right = np.stack(a), np.stack(b)  # [seeds, clients]
    known = ~(np.isnan(left) | np.isnan(right)).any(0)  # a client that never took part says nothing
    left, right = left[:, known], right[:, known]
    value = measure(left, right)
    if np.isnan(value).all():
        return Correlation(np.nan, np.nan, np.nan)
    rng = np.random.default_rng(0)  # the same table has the same interval
    clients = left.shape[1]
    drawn = rng.integers(0, clients, (DRAWS, clients))
    again = _means(
        np.stack([measure(x[drawn], y[drawn]) for x, y in zip(left, right, strict=True)])
    )  # [draws]
    again = again[~np.isnan(again)]  # a draw of one client over and over has no order
    low, high = np.quantile(again, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)) if len(again) else (np.nan, np.nan)
    return Correlation(float(np.nanmean(value)), float(low), float(high))


def _means(values: Numbers) -> Numbers:
    """Over the first axis, of what is known."""
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0).sum(0), known.sum(0).astype(np.float64))


def agreement(rows: Numbers) -> float:
    """The mean Spearman correlation of every two rows, [rows, clients]; nan of fewer than two."""
    pairs = [(i, j) for i in range(len(rows)) for j in range(i)]
    return _mean([_common(rows[i], rows[j]) for i, j in pairs])


def from_one_to_the_next(rows: Numbers) -> float:
    """The mean Spearman correlation of each row with the one before."""
    return _mean([_common(a, b) for a, b in zip(rows[1:], rows[:-1], strict=True)])


def _common(a: Numbers, b: Numbers) -> float:
    """Spearman's correlation over the clients that both rank."""
    known = ~(np.isnan(a) | np.isnan(b))
    return float(spearman(a[known], b[known]))


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not np.isnan(v)]
    return float(np.mean(known)) if known else float("nan")
