"""What the verdict of a study's half says, and what the other half shows."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.stats import Interval, Numbers, over_seeds
from copfl.verdict.drawn import all_rows, lowest, sites_of
from copfl.verdict.verdict import BETTER, WORSE, Verdict, corrected_gain
from studies.verdict.losses import ALONE, TOGETHER, Array, Federation, Halves, federation, halves

NORMAL = 1.96
TESTED = 0  # the fold that is for testing in the way of before


class Job(NamedTuple):
    federation: str
    split: int


@cache
def _read(name: str, folder: Path | None) -> Federation:
    return federation(name, folder)


def record(job: Job, folder: Path | None) -> dict[str, Any]:
    """One division, with and without carrying losses on to all rows.

    Args:
        job: Which.
        folder: Of the files.
    """
    data = _read(job.federation, folder)
    losses = halves(data, job.split)
    return {
        "sites": int(data.site.max()) + 1,
        "median": float(np.median(np.bincount(data.site))) / 2,
        **{
            name: judged(losses, data.is_rmse, carried=carried)._asdict()
            for name, carried in (("carried", True), ("folds", False))
        },
    }


class Division(NamedTuple):
    """One division of a federation's rows."""

    gain: float  # corrected
    interval: Interval  # of what is to be expected
    fresh: Interval  # of as many other rows
    once: Interval  # of the choice of all rows, by the same rows
    tested: Interval  # a fifth of the rows for testing, over the sites
    paired: Interval  # the same, over the rows
    truth: float
    truth_error: float  # of the truth, over its rows
    called: int  # sites that are called better or worse
    contradicted: int  # of these, gains of the other sign in the other half
    refuted: int  # of these, with two standard errors


def judged(divided: Halves, is_rmse: bool, draws: int = 500, carried: bool = True) -> Division:
    """The verdict of one division, and its truth.

    Args:
        divided: The losses.
        is_rmse: Whether they are squared errors.
        draws: Of the verdict.
        carried: Whether losses are carried on to all rows.
    """
    choose = partial(lowest, alone=ALONE, is_rmse=is_rmse)
    verdict = corrected_gain(
        divided.study,
        together=TOGETHER,
        alone=ALONE,
        choose=choose,
        is_rmse=is_rmse,
        draws=draws,
        pairs=divided.pairs if carried else None,
    )
    once = _of_rows(divided.study, verdict, is_rmse)
    truth = _of_rows(divided.truth, verdict, is_rmse)
    trained = {
        name: [np.where(fold == TESTED, np.nan, rows) for rows, fold in zip(sites, divided.fold, strict=True)]
        for name, sites in divided.study.items()
    }
    tested = {
        name: [rows[fold == TESTED] for rows, fold in zip(sites, divided.fold, strict=True)]
        for name, sites in divided.study.items()
    }
    sites, names = sites_of(trained), tuple(trained)
    whole = all_rows(names, sites)
    own = [name for name in names if name in ALONE]
    picks = choose(whole)[0], choose(whole.only(own))[0]
    of_test = _gains(
        [tested[names[n]][i] for i, n in enumerate(picks[0])],
        [tested[own[n]][i] for i, n in enumerate(picks[1])],
        is_rmse,
    )
    called = [*verdict.named(BETTER), *verdict.named(WORSE)]
    signed = np.array([np.sign(verdict.sites[n].measured) for n in called])
    opposite = -signed * truth[0][called] if called else np.zeros(0)
    known = of_test[0][~np.isnan(of_test[0])]
    mean, error = _mean(*truth)
    return Division(
        verdict.these.gain,
        Interval(verdict.these.low, verdict.these.high),
        verdict.fresh,
        _around(*_mean(*once)),
        over_seeds(known),
        _around(*_mean(*of_test)),
        mean,
        error,
        len(called),
        int((opposite > 0).sum()),
        int((opposite > NORMAL * np.sqrt(truth[1][called])).sum()) if called else 0,
    )


def _of_rows(losses: dict[str, list[Array]], verdict: Verdict, is_rmse: bool) -> tuple[Numbers, Numbers]:
    """The gain of each site from what it has been given, and its variance over rows."""
    return _gains(
        [losses[site.together][n] for n, site in enumerate(verdict.sites)],
        [losses[site.alone][n] for n, site in enumerate(verdict.sites)],
        is_rmse,
    )


def _gains(together: list[Array], alone: list[Array], is_rmse: bool) -> tuple[Numbers, Numbers]:
    gains, variances = np.full((2, len(together)), np.nan)
    for n, (ours, theirs) in enumerate(zip(together, alone, strict=True)):
        if not len(ours):
            continue
        roots = np.sqrt([ours.mean(), theirs.mean()]) if is_rmse else np.array([ours.mean(), theirs.mean()])
        rows = theirs / (2 * roots[1]) - ours / (2 * roots[0]) if is_rmse else theirs - ours
        gains[n] = roots[1] - roots[0]
        variances[n] = rows.var(ddof=1) / len(rows) if len(rows) > 1 else np.nan
    return gains, variances


def _mean(gains: Numbers, variances: Numbers) -> tuple[float, float]:
    known = ~np.isnan(gains)
    usual = np.where(np.isnan(variances), np.nanmean(variances), variances)[known]
    return float(gains[known].mean()), float(np.sqrt(usual.sum())) / int(known.sum())


def _around(mean: float, error: float) -> Interval:
    return Interval(mean - NORMAL * error, mean + NORMAL * error)
