"""Does it pay? The answer of a run, which every page and the terminal say first: a sentence, and a chart of the sites.

Where candidates were tried on rows held out, it is the verdict of these rows. Else it is what the test rows say of the
models beside the best that sites have alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from copfl.charts import GainChart, GainRow, folded
from copfl.experiment.analysis.against_rivals import RIVALS
from copfl.experiment.analysis.gains import EQUAL, GAINS
from copfl.experiment.recording import Recording
from copfl.experiment.verdict import CHECK, VERDICT
from copfl.measures.metrics import MetricInfo
from copfl.rivals.records import CONSTANT, TITLES
from copfl.sections import Section
from copfl.stats import LEVEL, Interval, Numbers, holm, mean_of_known, outside, over_clients, t_quantile
from copfl.tables import listed
from copfl.verdict.headline import MARKS, MEAN, Check, headline_of, row_of, statements
from copfl.verdict.headline import chart as chart_of
from copfl.verdict.verdict import BETTER, EQUALLY, UNCLEAR, UNKNOWN, WORSE, Verdict

SITES = "sites"
ALONE = "the same model, trained alone"
NO_INTERVAL = "no interval"  # of a site
FREEDOM = 1e6  # the normal distribution's, for a t distribution


class Answer(NamedTuple):
    """Whether it pays, and for whom."""

    chart: GainChart  # its title is the headline
    said: Sequence[str]  # below it, a sentence each
    rows: Mapping[int, GainRow]  # of every site of which something is known; the chart folds them
    alone: str  # what the gain is over

    @property
    def headline(self) -> str:
        return self.chart.title


class Alone(NamedTuple):
    """What sites have without the federation: a kind of model, on the test rows of each."""

    title: str
    values: Numbers  # [sites], the primary metric
    bounds: Sequence[Interval]  # of the gain over it, on each site's test rows; (): not known


def answer_of(run: Recording) -> Answer | None:
    """The answer of a run; None where nothing is known of the sites alone."""
    verdict: Verdict | None = VERDICT.__get__(run, Recording)
    if verdict is not None:
        return of_verdict(verdict, run.site_names, CHECK.__get__(run, Recording))
    return of_test_rows(run)


def of_verdict(verdict: Verdict, names: Sequence[str], check: Check | None = None) -> Answer:
    """The answer by rows held out.

    Args:
        verdict: What these rows say.
        names: Of the sites.
        check: What the test rows say of it.
    """
    rows = {n: row_of(*site) for n, site in enumerate(zip(names, verdict.sites, strict=True))}
    said = statements(verdict, SITES) if len(rows) > 1 else []
    return Answer(chart_of(verdict, names, SITES, check), said, rows, "the best model alone")


def section_of(answer: Answer) -> Section:
    """The answer as the first section of a page.

    Args:
        answer: By `answer_of`, or `of_verdict` where a page has a verdict and no run.
    """
    return Section("verdict", "Verdict", answer.headline, [answer.chart], notes=answer.said)


def of_several(answers: Mapping[str, Answer]) -> Section | None:
    """The mean of each run or method in one chart; None of none, or where they are measured in different units.

    Args:
        answers: By the name of the run.
    """
    charts = [found.chart for found in answers.values()]
    if (
        not charts
        or len({(chart.x_title.partition(":")[0], chart.unit, chart.digits) for chart in charts}) > 1
    ):
        return None
    rows = [
        (found.chart.mean or next(iter(found.rows.values())))._replace(label=label)
        for label, found in answers.items()
    ]
    over = list(dict.fromkeys(found.alone for found in answers.values()))
    about = "The mean gain over the best model that sites have alone"
    about += f": {over[0]}." if len(over) == 1 else "."
    x_title = charts[0].x_title
    if len(over) > 1:
        x_title = f"{x_title.partition(':')[0]}: gain over the best model alone (95 % interval)"
    chart = charts[0]._replace(rows=rows, about=about, x_title=x_title, mean=None, folded=0, row_title="run")
    return means_section(chart, "runs")


def means_section(chart: GainChart, what: str) -> Section:
    """The section of means over sites, a row each.

    Args:
        chart: Without a title.
        what: Its rows are, in the plural.
    """
    gain, lose = ([row.label for row in chart.rows if row.words == word] for word in (BETTER, WORSE))
    count = len(chart.rows)
    if gain:
        title = f"Training together gains with {len(gain)} of {count} {what}: {listed(gain, 3)}."
    elif len(lose) == count:
        title = f"Training alone is better than all {count} {what}."
    else:
        title = f"None of {count} {what} shows a gain."
    rows, left_out = folded(chart.rows)
    return Section("verdict", "Verdict", title, [chart._replace(title=title, rows=rows, folded=left_out)])


def of_test_rows(run: Recording) -> Answer | None:
    """The answer by test rows; None where nothing is known of the sites alone.

    The gain is over the best that sites have alone on average. It is taken by the same test rows, which favours what
    is alone.

    Args:
        run: With its findings.
    """
    if not run.records or not run.has(run.primary.name) or (best := best_alone(run)) is None:
        return None
    metric, personal = run.primary, run.of_honest
    gains = np.asarray(metric.gain(personal, best.values))
    known = np.flatnonzero(np.isfinite(gains)).tolist()
    if not known:
        return None
    bounds = [best.bounds[n] if best.bounds else Interval(math.nan, math.nan) for n in known]
    found = of_gains(metric, best.title, [run.site_names[n] for n in known], gains[known], bounds)
    return found._replace(rows=dict(zip(known, found.rows.values(), strict=True)))


def of_gains(
    metric: MetricInfo, alone: str, names: Sequence[str], gains: Numbers, bounds: Sequence[Interval]
) -> Answer:
    """The answer by gains on test rows.

    Args:
        metric: Which was measured.
        alone: What the gains are over.
        names: Of the sites.
        gains: Of each; positive is better.
        bounds: Of each gain, over the test rows of its site; not finite: not known.
    """
    words = _words(gains, bounds)
    factor, points = metric.factor, "points" if metric.fraction else ""
    rows = [
        GainRow(name, factor * gain, *_finite(factor, own), word, MARKS.get(word, ""))
        for name, gain, own, word in zip(names, gains.tolist(), bounds, words, strict=True)
    ]
    over = over_clients(gains) if len(gains) > 1 else bounds[0]
    low, high = _finite(factor, over)
    sign = int(low > 0) - int(high < 0)
    of_mean = UNKNOWN if math.isnan(low) else {1: BETTER, 0: UNCLEAR, -1: WORSE}[sign]
    mean = GainRow(MEAN, factor * float(gains.mean()), low, high, of_mean, MARKS[of_mean])
    shown, left_out = folded(rows)
    has_bounds = any(math.isfinite(row.low) for row in rows)
    about = (
        f"The gain of each site over {alone}, which is the best that sites have alone on average, on each site's own "
        "test rows."
    )
    about += (
        " A bar is the 95 % interval over these rows; the words are corrected for the number of sites."
        if has_bounds
        else " There is no interval of a single site: its gain may be chance."
    )
    if len(rows) == 1:
        about = f"The gain over {alone}, the best of what this site has alone, on its own test rows, with its interval."
    title = metric.title if not metric.fraction else f"{metric.title}, {points}"
    chart = GainChart(
        name="verdict",
        title=headline_of(of_mean, words, SITES),
        about=about,
        rows=shown,
        x_title=f"{title}: together minus {alone} (95 % interval)"
        if metric.higher_is_better
        else f"{title}: {alone} minus together (95 % interval)",
        mean=mean if len(rows) > 1 else None,
        folded=left_out,
        digits=_digits(metric),
        unit=" points" if metric.fraction else "",
    )
    text = metric.text(float(gains.mean()), sign="+")
    interval = f" (95 % interval {low:+.{chart.digits}f} to {high:+.{chart.digits}f})" * math.isfinite(low)
    gain = f"{text}{chart.unit} {metric.title} on average over {alone}{interval}, on test rows."
    return Answer(chart, [gain] if len(rows) > 1 else [], dict(enumerate(rows)), alone)


def cells_of(answer: Answer, site: int) -> tuple[str, str, str]:
    """The gain of a site, its interval and its verdict with a mark, for a table; "" where nothing is known.

    Args:
        answer: Of the run.
        site: Its number.
    """
    row = answer.rows.get(site)
    return ("", "", "") if row is None else cells(row, answer.chart.digits)


def cells(row: GainRow, digits: int) -> tuple[str, str, str]:
    """The gain, its interval and its verdict with a mark.

    Args:
        row: Of a chart.
        digits: Of its numbers.
    """
    gain = f"{row.gain:+z.{digits}f}" if math.isfinite(row.gain) else ""
    bounds = f"{row.low:+z.{digits}f} to {row.high:+z.{digits}f}" if math.isfinite(row.low) else ""
    return gain, bounds, f"{row.mark} {row.words}".strip()


def best_alone(run: Recording) -> Alone | None:
    """The best of what is known of the sites alone: a rival, the same model trained alone, the constant answer.

    Args:
        run: With its findings.
    """
    rivals, analysis = RIVALS.__get__(run, Recording), GAINS.__get__(run, Recording)
    found = []
    if rivals is not None:
        found.append(Alone(f"{TITLES[rivals.chosen]} alone", rivals.best, rivals.interval))
    if analysis is not None and not np.isnan(analysis.alone).all():
        found.append(Alone(ALONE, analysis.alone, analysis.intervals))
        if rivals is None and not np.isnan(analysis.constant).all():
            found.append(Alone(TITLES[CONSTANT], analysis.constant, ()))
    if not found:
        return None
    metric = run.primary
    # Of equals the first: a rival has more evidence than the others.
    return max(found, key=lambda one: metric.score(float(mean_of_known(one.values))))


def _words(gains: Numbers, bounds: Sequence[Interval]) -> list[str]:
    """What is said of each site, wrong of any of them with about 5 %: intervals as p values, corrected by Holm."""
    errors = np.array([own.half for own in bounds], np.float64) / t_quantile(0.975, FREEDOM)
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.abs(gains) / errors
    known = np.flatnonzero(np.isfinite(errors) & (errors > 0))
    words = [
        EQUALLY if abs(gain) <= EQUAL and own == (0, 0) else NO_INTERVAL if math.isnan(own.low) else UNKNOWN
        for gain, own in zip(gains.tolist(), bounds, strict=True)
    ]
    for place, p in zip(known.tolist(), holm(outside(distances[known], FREEDOM).tolist()), strict=True):
        # Both: an interval of draws is not symmetric.
        is_clear = p < 1 - LEVEL and bounds[place].without_zero
        words[place] = UNCLEAR if not is_clear else BETTER if gains[place] > 0 else WORSE
    return words


def _finite(factor: float, bounds: Interval) -> tuple[float, float]:
    """The ends of an interval in a chart; nan where it has none."""
    return (factor * bounds.low, factor * bounds.high) if np.isfinite(bounds).all() else (math.nan, math.nan)


def _digits(metric: MetricInfo) -> int:
    return 1 if metric.factor == 100 else 3
