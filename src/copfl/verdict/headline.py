"""A verdict as a sentence and as a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from copfl.charts import GainChart, GainRow, folded
from copfl.rivals.records import Array
from copfl.stats import t_quantile
from copfl.verdict.verdict import (
    AS_ALL,
    BETTER,
    EQUALLY,
    UNCLEAR,
    UNKNOWN,
    WORSE,
    Estimate,
    SiteGain,
    Verdict,
)

MEAN = "All sites (mean)"
MARKS = {BETTER: "▲", WORSE: "▼", AS_ALL: "≈", UNCLEAR: "=", EQUALLY: "=", UNKNOWN: "?"}  # beside the words


class Check(NamedTuple):
    """What test rows say, which nobody looked at."""

    test: Estimate  # the mean gain over the sites that have test rows; nan: not known
    agrees: bool


def checked(verdict: Verdict, together: Sequence[Array], alone: Sequence[Array]) -> Check:
    """Whether test rows agree with a verdict: their gain is what it leads one to expect, up to chance.

    Args:
        verdict: Of other rows.
        together: Losses of each site's test rows by what it has with the federation.
        alone: The same of the best that it has alone.
    """
    gains, variances = [], []
    for ours, theirs in zip(together, alone, strict=True):
        known = np.isfinite(ours) & np.isfinite(theirs)
        if not known.any():
            continue
        rows = np.stack([ours, theirs])[:, known].astype(np.float64)
        means = rows.mean(1)
        roots = np.sqrt(means) if verdict.is_rmse else means
        slopes = 1 / (2 * np.maximum(roots, 1e-12)) if verdict.is_rmse else np.ones(2)
        influence = slopes @ ((rows - means[:, None]) * [[-1.0], [1.0]])
        gains.append(float(roots[1] - roots[0]))
        variances.append(float(influence.var(ddof=1)) / len(influence) if len(influence) > 1 else math.nan)
    if not gains or np.isnan(variances).all():
        return Check(Estimate(math.nan, math.nan, math.nan), True)
    # A site of one row varies as the others do.
    variance = float(np.where(np.isnan(variances), np.nanmean(variances), variances).sum()) / len(gains) ** 2
    gain, normal = float(np.mean(gains)), t_quantile(0.975, 1e6)
    half = normal * math.sqrt(variance)
    distance = abs(gain - verdict.these.gain)
    agrees = not distance > normal * math.sqrt(
        variance + verdict.error**2
    )  # nan: no interval, no disagreement
    return Check(Estimate(gain, gain - half, gain + half), agrees)


def headline(verdict: Verdict, sites: str = "sites", check: Check | None = None) -> str:
    """The verdict in a sentence or two.

    Args:
        verdict: What is told.
        sites: Their name in the plural, such as hospitals.
        check: By test rows.
    """
    said = [headline_of(word_of(verdict), [site.word for site in verdict.sites], sites)]
    if check is not None and not math.isnan(check.test.gain):
        if check.agrees:
            said.append("The test rows agree.")
        else:
            said.append(
                f"The test rows disagree: they show {signed(check.test.gain)} where {signed(verdict.these.gain)} "
                "was to be expected."
            )
    return " ".join(said)


def headline_of(of_mean: str, words: Sequence[str], sites: str = "sites") -> str:
    """The headline without the test rows' say.

    Args:
        of_mean: What is said of the mean over the sites, such as UNCLEAR.
        words: What is said of each site.
        sites: As of `headline`.
    """
    first = {
        BETTER: "Training together gains.",
        UNCLEAR: "No gain shown.",
        WORSE: "Training alone is better.",
        UNKNOWN: "Too few rows to tell whether training together gains.",
    }[of_mean]
    if of_mean != UNKNOWN and set(words) == {EQUALLY}:
        return "Training together is the same as training alone."
    return " ".join(filter(None, [first, "" if of_mean == UNKNOWN else _of_sites(words, sites)]))


def word_of(verdict: Verdict) -> str:
    """What is said of the mean over the sites."""
    if not verdict.sites or math.isnan(verdict.these.low):
        return UNKNOWN
    return {1: BETTER, 0: UNCLEAR, -1: WORSE}[verdict.these.sign]


def _of_sites(words: Sequence[str], sites: str) -> str:
    """How many are better or worse off; nothing of one site, and where all are the same or unknown."""
    count, better, worse = len(words), words.count(BETTER), words.count(WORSE)
    if count < 2 or not better + worse + words.count(UNCLEAR):
        return ""
    if not better and not worse:
        return f"None of {count} {sites} is clearly better or worse off."
    if better and worse:
        return f"Of {count} {sites}, {better} {_are(better)} clearly better off and {worse} {_are(worse)} worse off."
    number, word, other = (better, "better", "worse") if better else (worse, "worse", "better")
    if number == count:
        return f"All {count} {sites} are clearly {word} off."
    return f"Of {count} {sites}, {number} {_are(number)} clearly {word} off and none is clearly {other} off."


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def statements(verdict: Verdict, sites: str = "sites") -> list[str]:
    """What is shown of these sites and of a new one, a sentence each.

    Args:
        verdict: What is told.
        sites: Their name in the plural.
    """
    loss = "RMSE" if verdict.is_rmse else "loss"
    said = [
        f"These {sites}: the {loss} falls by {signed(verdict.these.gain)} on average{_interval(verdict.these)}."
    ]
    if not math.isnan(verdict.fresh.low):
        low, high = verdict.fresh
        said.append(
            f"As many other rows of theirs: between {signed(low)} and {signed(high)} in 95 of 100 cases."
        )
    if math.isnan(verdict.like_these.low):
        return [*said, f"A new site like these: {len(verdict.sites)} {sites} are too few to tell."]
    said.append(
        f"Other {sites} like these: by {signed(verdict.like_these.gain)} on average{_interval(verdict.like_these)}."
    )
    if not math.isnan(verdict.new_site.low):
        low, high = verdict.new_site
        said.append(f"One new site: between {signed(low)} and {signed(high)} in 95 of 100 cases.")
    return said


def _interval(estimate: Estimate) -> str:
    if math.isnan(estimate.low):
        return ", with too few rows for an interval"
    return f" (95 % interval {signed(estimate.low)} to {signed(estimate.high)})"


def signed(value: float) -> str:
    """A gain with its sign and two digits that count."""
    digits = (
        2 if not value or not math.isfinite(value) else min(8, max(0, 1 - math.floor(math.log10(abs(value)))))
    )
    return f"{value:+.{digits}f}"


def chart(
    verdict: Verdict, labels: Sequence[str], sites: str = "sites", check: Check | None = None
) -> GainChart:
    """The verdict's chart.

    Args:
        verdict: What is drawn.
        labels: The names of the sites.
        sites: Their name in the plural.
        check: By test rows.
    """
    rows, left_out = folded([row_of(*site) for site in zip(labels, verdict.sites, strict=True)])
    loss = "RMSE" if verdict.is_rmse else "loss"
    mean = GainRow(MEAN, *verdict.these, word_of(verdict), MARKS[word_of(verdict)])
    about = (
        f"The gain of each site over the best model that it has alone, by the {loss} of rows that no model saw, with "
        "its 95 % interval. What all sites show counts for each."
    )
    reach = max(
        (abs(value) for row in (mean, *rows) for value in row[1:4] if math.isfinite(value)), default=0.0
    )
    return GainChart(
        name="verdict",
        title=headline(verdict, sites, check),
        about=about,
        rows=rows,
        x_title=f"{loss} of the best model alone minus {loss} together, on rows held out (95 % interval)",
        mean=mean if len(verdict.sites) > 1 else None,
        folded=left_out,
        digits=min(8, max(0, 1 - math.floor(math.log10(reach)))) if reach else 1,
    )


def row_of(label: str, site: SiteGain) -> GainRow:
    """A site's row of the chart.

    Args:
        label: Its name.
        site: What it gains.
    """
    return GainRow(label, site.gain, site.low, site.high, site.word, MARKS[site.word])
