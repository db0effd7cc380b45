"""The candidates of a first run, and which of them the federation takes, and which a site instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from copfl.experiment.first_run.exceptions import are_better, site_gains
from copfl.rivals.records import TITLES, Array
from copfl.settings.schema import Run
from copfl.stats import Numbers

Losses = Sequence[Array]  # [rows] of each site; nan: the row was not held out
# Standard errors by which what all sites train alone must be better than a method of the federation. From a method a
# site can still depart, so of two that cannot be told apart the method loses less.
ERRORS_ALONE = 1.0


class Candidate(NamedTuple):
    """A method of the federation, or a kind of model that each site trains alone."""

    name: str
    run: Run | None = None  # None: each site alone
    rival: str = ""  # the kind of model alone, of copfl.rivals.records


class Validated(NamedTuple):
    """What the cross-validation says of the candidates, the simplest first."""

    by_site: dict[str, Numbers]  # of each candidate its loss at each site, nan: not known; see `site_losses`
    left_out: dict[str, str]  # why a candidate was not validated, or not to its end
    is_rmse: bool  # the loss of a site is a root mean squared error, and not a mean log loss
    folds: int

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return "RMSE" if self.is_rmse else "log loss"

    @property
    def means(self) -> dict[str, float]:
        """The mean over the sites at which all candidates have a loss; inf where there is none."""
        known = ~np.isnan(np.stack(list(self.by_site.values()))).any(0)
        return {name: float(v[known].mean()) if known.any() else np.inf for name, v in self.by_site.items()}


class FirstRunChoice(NamedTuple):
    """What the federation takes, and each site."""

    federation: str  # the name of a candidate
    sites: tuple[str, ...]  # the same, but for the exceptions
    validated: Validated

    @property
    def exceptions(self) -> dict[int, str]:
        """The candidate of each site that departs."""
        return {n: name for n, name in enumerate(self.sites) if name != self.federation}


def site_losses(losses: Losses, is_rmse: bool) -> Numbers:
    """The loss of each site over its held-out rows; nan without such rows.

    Args:
        losses: Of each row.
        is_rmse: Whether they are squared errors.
    """
    means = np.array([np.nanmean(rows) if np.isfinite(rows).any() else np.nan for rows in losses])
    return np.sqrt(means) if is_rmse else means


def chosen(
    losses: Mapping[str, Losses],
    is_rmse: bool,
    folds: int,
    left_out: Mapping[str, str] | None = None,
    *,
    alone: Collection[str],
    without_exceptions: Collection[str] = (),
) -> FirstRunChoice:
    """The candidate with the lowest mean loss over sites; a site departs to what it trains alone and is better at it.

    Of equals the first, which is the simplest. What all sites train alone is taken if its mean loss is lower by
    `ERRORS_ALONE`, else the best method of the federation.

    Args:
        losses: Of each candidate the losses of its held-out rows, the simplest first.
        is_rmse: Whether they are squared errors.
        folds: Their number.
        left_out: Why other candidates are not here.
        alone: The candidates that a site trains alone. A run trains one method, so a site can depart to these only.
        without_exceptions: Methods whose models cannot hold a site's own.
    """
    by_site = {name: site_losses(of_sites, is_rmse) for name, of_sites in losses.items()}
    validated = Validated(by_site, dict(left_out or {}), is_rmse, folds)
    means = validated.means
    federation = min(means, key=lambda name: means[name])
    methods = [name for name in losses if name not in alone]
    if federation in alone and methods:
        best = min(methods, key=lambda name: means[name])
        federation = federation if _is_shown(losses[federation], losses[best]) else best
    departures = () if federation in without_exceptions else [name for name in losses if name in alone]
    usual = losses[federation]
    better = {name: are_better(losses[name], usual) for name in departures if name != federation}
    sites = [
        min(
            (name for name in better if better[name][n]),
            key=lambda name: by_site[name][n],
            default=federation,
        )
        for n in range(len(usual))
    ]
    return FirstRunChoice(federation, tuple(sites), validated)


def _is_shown(ours: Losses, theirs: Losses) -> bool:
    """Whether our losses are lower on average over the sites, by more than `ERRORS_ALONE`."""
    gains = site_gains(ours, theirs)
    known = ~np.isnan(gains.mean)
    if not known.any():
        return True
    mean, error = gains.mean[known].mean(), np.sqrt(gains.variance[known].sum()) / known.sum()
    return bool(mean > ERRORS_ALONE * error)


def with_network(choice: FirstRunChoice, name: str, by_site: Numbers) -> FirstRunChoice:
    """The choice with one more candidate, whose models no site can exchange for one of its own.

    Args:
        choice: Among the others.
        name: Of the candidate.
        by_site: Its loss at each site.
    """
    validated = choice.validated._replace(by_site={**choice.validated.by_site, name: by_site})
    means = validated.means
    if means[name] < means[choice.federation]:
        return FirstRunChoice(name, (name,) * len(choice.sites), validated)
    return choice._replace(validated=validated)


def title_of(name: str) -> str:
    """A candidate in words.

    Args:
        name: Of the candidate.
    """
    kind = name.removesuffix(" alone")
    return f"{TITLES[kind]} at each client alone" if kind in TITLES else name
