"""Does it pay to federate these clients? What a race shows, and what it does not.

A race asks it at its end; `choose` asks it again with what sites have alone.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from copfl.experiment.analysis.convergence import relevant, rising_text
from copfl.experiment.analysis.gains import Gains, constant_text
from copfl.measures.metrics import MetricInfo
from copfl.rivals.records import TITLES, Rivals
from copfl.stats import Difference, Interval, Numbers, mean_of_known, over_clients, unknown_reason
from copfl.tables import capital

FEDERATE, NO_GAIN, UNDECIDED = "federate", "no relevant gain", "not enough evidence"
STAY_ALONE = "stay alone"
ENOUGH_SEEDS = 2


class Against(NamedTuple):
    """A federated method against training alone, after as many rounds with the same seeds."""

    label: str
    difference: Difference  # of the metric, corrected for the number of methods
    rounds: int
    seeds: int
    rises: float  # what it still gained in the last third of its evaluations; 0: nothing relevant


class Verdict(NamedTuple):
    kind: str  # FEDERATE, NO_GAIN, UNDECIDED or STAY_ALONE
    text: str  # what is answered, a colon, and why

    @property
    def answer(self) -> str:
        """Such as "To federate pays for these clients and this seed", without why."""
        return self.text.partition(":")[0]


def verdict(
    methods: Sequence[Against],
    alone: float,
    alone_rises: float,
    metric: MetricInfo,
    rounds: int,
    rates: Mapping[str, Collection[float]],
    best_gains: Gains | None = None,
) -> Verdict:
    """The verdict of a race, with its rounds, its tuning and its interval.

    Args:
        methods: every federated method that was compared with training alone, the best first.
        alone: the metric of training alone.
        alone_rises: what training alone still gained in the last third of its evaluations.
        metric: what was measured.
        rounds: that a run has when it is complete.
        rates: by algorithm, the learning rates that it was raced with.
        best_gains: of the best method, over constant answers; None: they are not known.
    """
    if not methods:
        return Verdict(UNDECIDED, "Not enough evidence: no method was compared with training alone.")
    best, least = methods[0], relevant(metric, alone)
    bounds = gain(best.difference.clients, metric)
    tried = sorted({rate for of_method in rates.values() for rate in of_method})
    tuned = bool(rates) and min(map(len, rates.values())) > 1
    how = (
        f"after {best.rounds} of {rounds} rounds, {_seeds(best.seeds)}, "
        f"{_rates(tried) if tuned else f'{_rates(tried)}, not tuned'}"
    )
    unit = " points" if metric.fraction else ""
    shown = (
        f"{best.label} {metric.text(best.difference.mean, sign='+')}{unit} "
        f"{metric.interval(*best.difference.clients)}"
    )
    if math.isinf(bounds.low):
        shown += " (no interval: too few sites)"
    if best.rounds == rounds and bounds.low > alone_rises:
        later = (
            f" {capital(rising_text({best.label: best.rises}, metric))}: the difference may change."
            if best.rises
            else ""
        )
        if best_gains is not None and (constant := constant_text(best_gains)):
            over = best_gains.over_constant_bounds
            text = (
                f"{constant}, and {best.label} is not shown to be better ({metric.interval(*over)}{unit}): "
                f"{shown} to training alone, {how}.{later}"
            )
            if over.high < least:
                return Verdict(NO_GAIN, f"No useful gain: {text}")
            more = "What to run next: more sites, or more validation samples."
            return Verdict(UNDECIDED, f"Not enough evidence: {text} {more}")
        both = gain(best.difference.both, metric)
        if both.low > alone_rises:
            return Verdict(
                FEDERATE,
                f"To federate pays: {shown} to training alone, {how}; {_both(best, metric)}.{later}",
            )
        these = f"these sites and {'this seed' if best.seeds == 1 else f'these {best.seeds} seeds'}"
        others = (
            "nothing is known of another seed"
            if best.seeds == 1
            else f"not shown for others: {_both(best, metric)}"
        )
        return Verdict(
            FEDERATE,
            f"To federate pays for {these}: {shown} to training alone, {how}; {others}.{later}",
        )
    open_questions = _open_questions(methods, alone_rises, metric, rounds, tuned)
    size = f"{metric.text(least)}{unit}"
    if bounds.low > 0:
        begin = f"Not enough evidence: {shown} to training alone, but only {how}."
    elif all(gain(method.difference.clients, metric).high < least for method in methods):
        which = f"each of {len(methods)} methods" if len(methods) > 1 else "the one method"
        excluded = f"a gain of {size} over training alone is excluded for {which}"
        if not open_questions:
            return Verdict(NO_GAIN, f"No method is better than training alone: {excluded} ({shown}), {how}.")
        begin = f"Not enough evidence: {excluded} ({shown}), but only {how}."
    else:
        begin = f"Not enough evidence: {shown} to training alone, {how}; a gain of {size} is not excluded."
        open_questions = [*open_questions, "more sites, more seeds, or more validation samples"]
    return Verdict(UNDECIDED, f"{begin} What to run next: {'; '.join(open_questions)}.")


def against_rivals(race: Verdict, label: str, values: Numbers, rivals: Rivals) -> Verdict:
    """The verdict of a race, beside the best that clients have alone by scikit-learn.

    A rival that is as good on average is the answer: it needs no federation.

    Args:
        race: The verdict against training the same network alone.
        label: The best method.
        values: Its primary metric at each client, on the samples that decide.
        rivals: On the same samples.
    """
    metric, title, gains = rivals.metric, TITLES[rivals.chosen], rivals.gain(values)
    known = gains[~np.isnan(gains)]
    if reason := unknown_reason([known]):
        return race._replace(
            text=f"{race.text} It is not compared with {title} at each site alone: {reason}."
        )
    mean, bounds = float(known.mean()), over_clients(known)
    theirs, unit = float(mean_of_known(rivals.best)), " points" if metric.fraction else ""
    shown = (
        f"{label} {metric.text(mean, sign='+')}{unit} {metric.interval(*bounds)} to {title} that each site "
        f"trains alone ({metric.text(theirs)}{metric.unit}), positive is better"
    )
    if mean <= 0:
        return Verdict(STAY_ALONE, f"Stay alone, take {title}: {shown}. Among networks: {race.text}")
    if bounds.low > 0:
        return race._replace(text=f"{race.text} Beside what sites have alone: {shown}.")
    if race.kind == FEDERATE:
        more = "What to run next: more sites, or more validation samples."
        return Verdict(UNDECIDED, f"Not enough evidence: {shown}. {more} Among networks: {race.text}")
    return race._replace(text=f"{race.text} Beside what sites have alone: {shown}.")


def gain(bounds: Interval, metric: MetricInfo) -> Interval:
    """The interval of a difference as a gain, positive where it is better.

    Args:
        bounds: Of a difference of the metric.
        metric: Says whether high is better.
    """
    return bounds if metric.higher_is_better else Interval(-bounds.high, -bounds.low)


def _open_questions(
    methods: Sequence[Against], alone_rises: float, metric: MetricInfo, rounds: int, tuned: bool
) -> list[str]:
    """What would have to be run before anything is concluded."""
    rising = {method.label: method.rises for method in methods if method.rises}
    if alone_rises:
        rising = {"training alone": alone_rises, **rising}
    questions = []
    if rising:
        questions.append(f"more rounds ({rising_text(rising, metric)})")
    elif methods[0].rounds < rounds:
        questions.append(f"all {rounds} rounds")
    if not tuned:
        questions.append("several learning rates for each method (tune)")
    if methods[0].seeds < ENOUGH_SEEDS:
        questions.append(f"{ENOUGH_SEEDS} seeds or more")
    return questions


def _both(method: Against, metric: MetricInfo) -> str:
    """The interval that holds for other clients and seeds."""
    return f"{metric.interval(*method.difference.both)} over sites and seeds"


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count > 1)}"


def _rates(rates: Sequence[float]) -> str:
    return f"learning rate{'s' * (len(rates) > 1)} {', '.join(f'{rate:g}' for rate in rates) or 'unknown'}"
