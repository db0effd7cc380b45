"""Times until an event: how well risks order them, curves of survival, and how good probabilities of it are.

Targets are rows [time, event]: the event was seen at this time (1), or the sample was lost sight of then (0, censored).
With a third column, [time, event, start], a row is at risk from after its start: a patient that entered late, or one
that has a row for each stretch of time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.stats import Numbers

PAIRS_AT_ONCE = 1_000_000  # that are compared in one step
LEAST_UNCENSORED = 0.05  # so no row counts more than twenty
NORMAL = 1.959964  # deviations on both sides that have 95 % of a normal distribution


def times_and_events(targets: NDArray[np.floating]) -> tuple[Numbers, NDArray[np.bool_]]:
    """The first two columns of targets."""
    return np.asarray(targets[:, 0], np.float64), np.asarray(targets[:, 1]) > 0.5


def starts(targets: NDArray[np.floating]) -> Numbers | None:
    """[n], after which each row is at risk; None: from the beginning."""
    return np.asarray(targets[:, 2], np.float64) if targets.shape[1] > 2 else None


def risks(predictions: NDArray[np.floating]) -> Numbers:
    """[n], larger where the event is expected earlier.

    Args:
        predictions: Risks [n, 1], or the probabilities [n, k] that the event has happened by each of k times.
    """
    return np.asarray(predictions.sum(tuple(range(1, predictions.ndim)), dtype=np.float64))


def concordance(risk: Numbers, targets: NDArray[np.floating], weights: Numbers | None = None) -> float:
    """Harrell's C: of the comparable pairs, the share in which the earlier event has the larger risk.

    A pair is comparable if one had its event before the time of the other, or at the time at which the other was
    censored; with starts, if the other was at risk at the time of the event. Equal risks count half.

    Args:
        risk: [n].
        targets: Of the rows.
        weights: [n], what each pair of a row's event counts; None: 1.

    Raises:
        ValueError: No pair is comparable.
    """
    time, seen = times_and_events(targets)
    weights = np.ones(len(time)) if weights is None else weights
    events, start, pairs, right = np.flatnonzero(seen), starts(targets), 0.0, 0.0
    for some in np.array_split(events, 1 + len(events) * len(time) // PAIRS_AT_ONCE):
        at, own = time[some, None], risk[some, None]
        later = (time > at) | ((time == at) & ~seen)  # [events, samples]
        if start is not None:
            later &= start < at
        ordered, tied = ((later & found).sum(1) for found in (own > risk, own == risk))
        pairs += float(weights[some] @ later.sum(1))
        right += float(weights[some] @ (ordered + 0.5 * tied))
    if not pairs:
        raise ValueError("no two samples are comparable")
    return right / pairs


def uno_concordance(risk: Numbers, targets: NDArray[np.floating]) -> float:
    """Uno's C (Uno et al. 2011): `concordance` as it would be if nobody were censored.

    The pairs of an event count 1 / G², where G is the share that is not censored before it, estimated from these rows.

    Raises:
        ValueError: No pair is comparable, or rows have starts.
    """
    if starts(targets) is not None:
        raise ValueError("rows that start later have no curve of their censoring")
    time, seen = times_and_events(targets)
    return concordance(risk, targets, np.where(seen, uncensored(targets).just_before(time), 1.0) ** -2)


class Curve(NamedTuple):
    """A step function: its value before the first time, and from each time on."""

    times: Numbers  # [k], ascending
    values: Numbers  # [k]
    before: float = 0.0

    def at(self, times: Numbers) -> Numbers:
        """The value at each of these times."""
        return np.concatenate([[self.before], self.values])[np.searchsorted(self.times, times, side="right")]

    def just_before(self, times: Numbers) -> Numbers:
        """The value before the step at each of these times."""
        return np.concatenate([[self.before], self.values])[np.searchsorted(self.times, times, side="left")]


class KaplanMeier(NamedTuple):
    """The share without an event from each time on, and 95 % intervals by the logarithm of minus the logarithm."""

    survival: Curve
    low: Numbers  # [k]
    high: Numbers
    at_risk: NDArray[np.int64]  # just before each time


def kaplan_meier(targets: NDArray[np.floating]) -> KaplanMeier:
    """Kaplan and Meier's estimate, with Greenwood's variance; at least one row.

    With starts it is that of those who are at risk (Tsai, Jewell and Wang 1987), and it falls to 0 where all of few
    have the event.
    """
    times, events, at_risk = _steps(targets)
    survival: Numbers = np.cumprod(1 - events / at_risk, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.cumsum(events / (at_risk * (at_risk - events)))
        spread = NORMAL * np.sqrt(variance) / np.abs(np.log(survival))
        low, high = (survival ** np.exp(sign * spread) for sign in (1, -1))
    is_inside = (survival > 0) & (survival < 1)
    low, high = (np.where(is_inside, bound, survival) for bound in (low, high))
    return KaplanMeier(Curve(times, survival, 1.0), low, high, at_risk)


def uncensored(known: NDArray[np.floating]) -> Curve:
    """Kaplan and Meier's estimate of not being censored yet; an event precedes what is censored at its time.

    Args:
        known: Rows [n, 2] from which it is estimated.
    """
    time, seen = times_and_events(known)
    times, censored = np.unique(time[~seen], return_counts=True)
    ends, events = np.sort(time), np.sort(time[seen])
    left = len(time) - np.searchsorted(ends, times, side="left")
    left -= np.searchsorted(events, times, side="right") - np.searchsorted(events, times, side="left")
    return Curve(times, np.cumprod(1 - censored / left, dtype=np.float64), 1.0)


def _steps(targets: NDArray[np.floating]) -> tuple[Numbers, NDArray[np.int64], NDArray[np.int64]]:
    """The times at which events were seen, how many, and how many rows were at risk just before."""
    time, seen = times_and_events(targets)
    times, place = np.unique(time[seen], return_inverse=True)
    at_risk = summed_at_risk(np.ones(len(time), np.int64), targets, times)
    return times, np.bincount(place, minlength=len(times)), at_risk


def summed_at_risk(values: NDArray[Any], targets: NDArray[np.floating], times: Numbers) -> NDArray[Any]:
    """[k, ...], for each of k times the sum of the values over the rows that are at risk just before it.

    Args:
        values: [n, ...].
        targets: Of the rows.
        times: [k].
    """

    def from_then_on(ends: Numbers) -> NDArray[Any]:
        """The sums over the rows whose end is at the time or later."""
        order = np.argsort(ends)
        sums = np.cumsum(values[order][::-1], axis=0)[::-1]
        none = np.zeros((1, *values.shape[1:]), values.dtype)
        return np.asarray(np.concatenate([sums, none])[np.searchsorted(ends[order], times, side="left")])

    time, _ = times_and_events(targets)
    start = starts(targets)
    return from_then_on(time) if start is None else from_then_on(time) - from_then_on(start)


def baseline_hazard(risk: Numbers, targets: NDArray[np.floating]) -> Curve:
    """Breslow's estimate of the cumulative hazard of a sample of risk 0.

    Args:
        risk: [n], logarithms of hazards, of the rows that it is estimated from.
        targets: Of these rows.
    """
    times, events, _ = _steps(targets)
    top = float(risk.max(initial=0.0))  # so that no exponential is infinite
    at_risk = summed_at_risk(np.exp(risk - top), targets, times)
    return Curve(times, np.cumsum(events / at_risk) * np.exp(-top))


def survival_at(times: Numbers, risk: Numbers, hazard: Curve) -> Numbers:
    """[n, k], the probability that there is no event up to each of k times.

    Args:
        times: [k].
        risk: [n], logarithms of hazards.
        hazard: The cumulative hazard of a sample of risk 0.
    """
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # of an infinite risk, before the first event, it is not known
        return np.asarray(np.exp(-np.exp(risk)[:, None] * hazard.at(times)[None]))


def medians(risk: Numbers, hazard: Curve) -> Numbers:
    """[n], the first time at which no more than half are without an event; infinite if the curve ends above."""
    with np.errstate(over="ignore"):
        needed = np.log(2) * np.exp(-risk)
    place = np.searchsorted(hazard.values, needed, side="left")
    return np.asarray(np.append(hazard.times, np.inf)[place])


def survival_in_intervals(times: Numbers, incidences: Numbers, cuts: Sequence[float]) -> Numbers:
    """[n, k], the probability that there is no event up to each of k times, linear between the cuts; nan beyond them.

    Args:
        times: [k].
        incidences: [n, cuts], the probability that the event has happened by each cut.
        cuts: The ends of the intervals, ascending.
    """
    at, known = (
        np.array([0.0, *cuts]),
        np.concatenate([np.ones((len(incidences), 1)), 1 - incidences], axis=1),
    )
    rows = [np.interp(times, at, row, right=np.nan) for row in known]
    return np.array(rows).reshape(len(incidences), len(times))


def medians_in_intervals(incidences: Numbers, cuts: Sequence[float]) -> Numbers:
    """[n], when half are left, linear between the cuts; infinite if more are left at the last one.

    Args:
        incidences, cuts: As of `survival_in_intervals`.
    """
    at = np.array([0.0, *cuts])
    known = np.concatenate([np.zeros((len(incidences), 1)), incidences], axis=1)
    return np.array([np.interp(0.5, row, at, right=np.inf) for row in known]).reshape(len(incidences))


def brier_scores(
    survival: Numbers, times: Numbers, targets: NDArray[np.floating], known: NDArray[np.floating]
) -> Numbers:
    """[k], the squared error of probabilities at each time, weighted for those who were censored before it.

    Graf et al. 1999: a row whose event was seen by then counts 1 / G(its time), one that is still at risk 1 / G(t),
    where G is Kaplan and Meier's estimate of not being censored yet.

    Args:
        survival: [n, k], the probability that there is no event up to each time.
        times: [k].
        targets: Of the rows, [n, 2].
        known: Rows [m, 2] from which G is estimated, such as those of training.
    """
    time, seen = times_and_events(targets)
    uncensored_until = uncensored(known)
    died = seen[:, None] & (time[:, None] <= times)
    lives = time[:, None] > times
    weight_died = np.maximum(uncensored_until.just_before(time), LEAST_UNCENSORED)[:, None]
    weight_lives = np.maximum(uncensored_until.at(times), LEAST_UNCENSORED)[None]
    errors = died * survival**2 / weight_died + lives * (1 - survival) ** 2 / weight_lives
    return np.asarray(errors.mean(0))


def integrated_brier(
    survival: Numbers, times: Numbers, targets: NDArray[np.floating], known: NDArray[np.floating]
) -> float:
    """The mean of `brier_scores` between the first and the last time, by trapezia; of one time its own.

    Args:
        survival, times, targets, known: As of `brier_scores`.
    """
    scores = brier_scores(survival, times, targets, known)
    if len(times) == 1:
        return float(scores[0])
    widths = np.diff(times)
    return float((widths * (scores[1:] + scores[:-1]) / 2).sum() / widths.sum())
