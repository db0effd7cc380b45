"""From the table of losses to what the federation takes, and a site instead. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np

from copfl.experiment.choice import Choice, Validated
from copfl.rivals.records import Array
from copfl.stats import Numbers
from copfl.verdict.drawn import all_rows, lowest, sites_of

Losses = Sequence[Array]  # [rows] of each site; nan: the row was not held out
LEAST = 1e-12  # of a sum of losses by which is divided


def site_losses(losses: Losses, is_rmse: bool) -> Numbers:
    """The loss of each site over its held-out rows; nan without such rows.

    Args:
        losses: Of each row.
        is_rmse: Whether they are squared errors.
    """
    means = np.array([np.nanmean(rows) if np.isfinite(rows).any() else np.nan for rows in losses])
    return np.sqrt(means) if is_rmse else means


def on_common_rows(losses: Mapping[str, Losses]) -> dict[str, list[Array]]:
    """The losses of the rows that every candidate was tried on.

    Candidates that take long are tried on fewer folds, and rows differ more than candidates do.
    """
    sites = range(len(next(iter(losses.values()))))
    known = [~np.any([np.isnan(of_sites[n]) for of_sites in losses.values()], axis=0) for n in sites]
    return {
        name: [np.where(known[n], of_sites[n], np.nan) for n in sites] for name, of_sites in losses.items()
    }


def choose(
    losses: Mapping[str, Losses],
    is_rmse: bool,
    folds: int,
    left_out: Mapping[str, str] | None = None,
    *,
    alone: Collection[str],
    without_exceptions: Collection[str] = (),
    only_shown: Collection[str] = (),
    measure: str = "",
) -> Choice:
    """The candidate with the lowest mean loss over sites; a site departs to what it trains alone and is better at it.

    Of equals the first, which is the simplest. What all sites train alone is taken if its mean loss is lower by a
    standard error, else the best method of the federation: from a method a site can still depart, so of two that
    cannot be told apart the method loses less.

    Args:
        losses: Of each candidate the losses of its held-out rows, the simplest first.
        is_rmse: Whether they are squared errors.
        folds: Their number.
        left_out: Why other candidates are not here.
        alone: The candidates of which nothing leaves a site.
        without_exceptions: Methods whose models cannot hold a site's own.
        only_shown: Candidates that are compared and cannot be trained, such as models of scikit-learn on images.
        measure: As of `Validated`.
    """
    losses = on_common_rows(losses)
    by_site = {name: site_losses(of_sites, is_rmse) for name, of_sites in losses.items()}
    validated = Validated(by_site, dict(left_out or {}), is_rmse, folds, measure)
    able = {name: of_sites for name, of_sites in losses.items() if name not in only_shown}
    found = all_rows(tuple(able), sites_of(able))
    rule = partial(lowest, found, alone=alone, is_rmse=is_rmse)  # which a verdict repeats on rows drawn again
    federation = int(rule(without_exceptions=able)[0, 0])
    sites = rule(without_exceptions=without_exceptions)[0].tolist()
    names = tuple(able)
    return Choice(names[federation], tuple(names[n] for n in sites), validated)


def is_worse(name: str, losses: Mapping[str, Losses], is_rmse: bool) -> bool:
    """Whether a candidate is worse than the best one by more than a standard error, on the rows on which it was tried.

    The best one is that with the lowest loss on all of its rows, of those with the most. The lowest of many
    candidates on the few rows of one fold is lucky, and what is equal to the best would be worse than it.

    Args:
        name: Of the candidate.
        losses: Of all candidates.
        is_rmse: Whether they are squared errors.
    """
    known = {other: sum(int(np.isfinite(rows).sum()) for rows in own) for other, own in losses.items()}
    most = max((count for other, count in known.items() if other != name), default=0)
    whole = [other for other, count in known.items() if other != name and count == most]
    if not most or not known[name]:
        return False
    best = min(whole, key=lambda other: float(np.nanmean(site_losses(losses[other], is_rmse))))
    excess, error = difference(losses[name], losses[best], is_rmse)
    return excess > error


def difference(ours: Losses, theirs: Losses, is_rmse: bool) -> tuple[float, float]:
    """By how much a candidate's mean loss over sites is above another's on their common rows, and its standard error.

    The error is that over the rows, with the sites as given, or over the sites, whichever is larger.

    Args:
        ours: Of one candidate.
        theirs: Of the other.
        is_rmse: Whether they are squared errors.
    """
    of_sites = []
    for own, other in zip(ours, theirs, strict=True):
        both = np.isfinite(own) & np.isfinite(other)
        if both.any():
            excess = own[both] - other[both]
            # The difference of two roots is that of the squares, divided by the sum of the roots.
            roots = np.sqrt(own[both].mean()) + np.sqrt(other[both].mean()) if is_rmse else 1.0
            of_sites.append(excess / max(roots, LEAST))
    if not of_sites:
        return np.nan, np.nan
    means, sizes = np.array([rows.mean() for rows in of_sites]), np.array([len(rows) for rows in of_sites])
    squares = sum(float(((rows - rows.mean()) ** 2).sum()) for rows in of_sites)
    of_row = squares / max(int((sizes - 1).sum()), 1)
    over_rows = np.sqrt((of_row / sizes).sum()) / len(sizes)
    over_sites = means.std(ddof=1) / np.sqrt(len(sizes)) if len(sizes) > 1 else 0.0
    return float(means.mean()), float(max(over_rows, over_sites))
