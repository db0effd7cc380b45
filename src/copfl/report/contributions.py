"""Each client's part in a run, side by side: benefit, weight, data, bytes, presence, own gain.

The summary, the report, the audit and the coordinator's page show the same numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from copfl.charts import Dots, Line, values_of
from copfl.experiment import records
from copfl.experiment.analysis.benefit import (
    Benefit,
    group_benefit,
    halves_of,
    rounds_wanted,
    worth_to_itself,
)
from copfl.experiment.analysis.gains import Gains
from copfl.measures.metrics import MetricInfo
from copfl.stats import Numbers, mean_of_known
from copfl.tables import NONE, Table, interval, number, plain, size

UNIT = 1000  # benefits are shown in thousandths
ROWS = 30  # of more clients than this, those whose benefit differs most from the mean client's
ABOUT = (
    "Benefit to the others: how much lower their loss is, in thousandths per round, with this site in one "
    "of two random halves of the uploads than with the mean site. Its own judgement does not count. "
    "Higher, lower: than the mean site, corrected for the number of sites. Rank: those that no interval "
    "excludes; - where all others are not distinguishable. It is no measure of effort: a site that sends "
    "nothing new may be above those whose updates disturb the others (docs/audit.md)."
)
ABOUT_ITSELF = (
    "To itself: how much more its uploads lower its own loss than those of the others do, by its own "
    "account. Where it is not above 0, what it sends may be broken, or nothing."
)


class Contributions(NamedTuple):
    """[clients] each; nan where it is not known."""

    names: Sequence[str]
    benefit: Benefit
    rounds: int  # that were measured
    weight: Numbers  # mean over the rounds; 1 is an equal weight
    samples: Numbers  # to train on
    transferred: Numbers  # bytes in both directions, over all rounds
    taken_part: Numbers  # rounds
    gain: Numbers | None  # over training alone
    metric: MetricInfo  # of the gain
    to_itself: Benefit


def contributions(
    lines: list[records.Record],
    names: Sequence[str],
    samples: Sequence[float] | None,
    gains: Gains | None,
    metric: MetricInfo,
) -> Contributions | None:
    """Of the records of a run; None where it did not measure the benefit.

    Args:
        lines: The records, of a simulation or of a federation's server.
        names: Of the clients.
        samples: To train on, of each client; None: not known.
        gains: Over training alone; None: not known.
        metric: The primary one.
    """
    clients = len(names)
    halves = halves_of(lines, clients)
    if halves is None:
        return None
    weight, up, down = (records.table(lines, name, clients) for name in ("weight", "bytes_up", "bytes_down"))
    present = np.zeros((len(lines), clients), bool)
    for row, line in zip(present, lines, strict=True):
        row[[n for n in line["clients"] if n not in line["left_out"]]] = True
    return Contributions(
        names=names,
        benefit=group_benefit(*halves),
        rounds=len(lines),
        weight=mean_of_known(relative_weights(weight)),
        samples=np.full(clients, np.nan) if samples is None else np.array(samples, np.float64),
        transferred=np.nansum(up + down, 0),
        taken_part=present.sum(0).astype(np.float64),
        gain=None if gains is None else gains.gain,
        metric=metric,
        to_itself=worth_to_itself(*halves),
    )


def relative_weights(rows: Numbers) -> Numbers:
    """Weights or scores divided by their mean in each round, [rounds, clients]: 1 is an equal weight."""
    known = ~np.isnan(rows)
    total = np.where(known, rows, 0).sum(1, keepdims=True)
    count = known.sum(1, keepdims=True)
    with np.errstate(over="ignore"):  # nodes of a federation may report any numbers
        weights = np.divide(rows * count, total, out=np.ones_like(rows), where=total > 0)
    return np.where(known & np.isfinite(weights), weights, np.nan)


def with_interval(benefit: Benefit, client: int) -> str:
    """Such as "+1.20 [+0.30, +2.10]", in thousandths; "-" where it is not known.

    Args:
        benefit: Of each client.
        client: Its number.
    """
    low, high = benefit.interval(client)
    if math.isnan(low):
        return NONE
    return f"{number(UNIT * benefit.value[client], '+.2f')} {interval(UNIT * low, UNIT * high, '+.2f')}"


def table(contributions: Contributions) -> Table:
    """A row per client."""
    benefit, clients = contributions.benefit, len(contributions.names)
    chosen = list(range(clients))
    notes = [ABOUT]
    if clients > ROWS:
        chosen = sorted(np.argsort(np.nan_to_num(benefit.p_values, nan=2.0), kind="stable")[:ROWS].tolist())
        notes.insert(0, f"The {ROWS} of {clients} sites whose benefit differs most clearly.")
    if contributions.rounds < (wanted := rounds_wanted(clients)):
        notes.append(
            f"{contributions.rounds} rounds are few for {clients} sites: {wanted} or more give narrower intervals."
        )
    verdicts, ranks = benefit.verdicts, benefit.ranks

    def rank(n: int) -> str:
        low, high = ranks[n]
        return NONE if (low, high) == (1, clients) else str(low) if low == high else f"{low} to {high}"

    ends = [benefit.interval(n) for n in range(clients)]
    columns: dict[str, Callable[[int], str]] = {
        "client": lambda n: contributions.names[n],
        "benefit": lambda n: number(UNIT * benefit.value[n], "+.2f"),
        "95 % interval": lambda n: interval(UNIT * ends[n].low, UNIT * ends[n].high, "+.2f"),
        "verdict": lambda n: verdicts[n],
        "rank": rank,
    }
    columns["to itself"] = lambda n: with_interval(contributions.to_itself, n)
    notes.append(ABOUT_ITSELF)
    if not np.isnan(contributions.weight).all():
        columns["weight"] = lambda n: number(contributions.weight[n], ".2f")
    if not np.isnan(contributions.samples).all():
        columns["samples"] = lambda n: number(contributions.samples[n], ",.0f")
    columns["sent"] = lambda n: size(contributions.transferred[n])
    columns["rounds"] = lambda n: f"{contributions.taken_part[n]:.0f} of {contributions.rounds}"
    if (gain := contributions.gain) is not None:
        columns["own gain"] = lambda n: contributions.metric.text(gain[n], sign="+")
    rows = [[cell(n) for cell in columns.values()] for n in chosen]
    return Table("What each site contributes", list(columns), rows, notes)


def chart(contributions: Contributions) -> Dots:
    """A dot per client with its interval."""
    bounds = np.array([contributions.benefit.interval(n) for n in range(len(contributions.names))])
    low, high = (values_of(UNIT * np.where(np.isfinite(ends), ends, math.nan)) for ends in bounds.T)
    series = [
        Line(
            "benefit",
            values_of(UNIT * contributions.benefit.value),
            low,
            high,
            contributions.benefit.verdicts,
        )
    ]
    title, x_title = "Benefit to the others", "benefit, in thousandths of the loss per round"
    return Dots("benefit", title, ABOUT, list(contributions.names), x_title, series, digits=2, zero=True)


def as_json(contributions: Contributions) -> dict[str, Any]:
    """All of it; what is not known is null."""
    benefit = contributions.benefit
    content = {
        "benefit": benefit.value,
        "standard_error": benefit.error,
        "degrees_of_freedom": benefit.freedom,
        "interval": [benefit.interval(n) for n in range(len(contributions.names))],
        "p_value": benefit.p_values,
        "verdict": benefit.verdicts,
        "ranks": benefit.ranks,
        "weight": contributions.weight,
        "samples": contributions.samples,
        "bytes": contributions.transferred,
        "rounds_taken_part": contributions.taken_part,
        "gain": contributions.gain,
        "rounds": contributions.rounds,
        "to_itself": contributions.to_itself._asdict(),
    }
    return dict(plain(content))


def of_json(content: dict[str, Any], names: Sequence[str], metric: MetricInfo) -> Contributions:
    """What `as_json` gave, with the names of the clients.

    Args:
        content: As it was read.
        names: Of the clients.
        metric: The primary one of the run.
    """

    def numbers(key: str) -> Numbers:
        return np.array(content[key], np.float64)

    benefit = Benefit(numbers("benefit"), numbers("standard_error"), int(content["degrees_of_freedom"]))
    of_clients = numbers("weight"), numbers("samples"), numbers("bytes"), numbers("rounds_taken_part")
    gain = None if content["gain"] is None else numbers("gain")
    is_to_itself = content["to_itself"]
    value, error = (np.array(is_to_itself[name], np.float64) for name in ("value", "error"))
    to_itself = Benefit(value, error, int(is_to_itself["freedom"]))
    return Contributions(names, benefit, int(content["rounds"]), *of_clients, gain, metric, to_itself)
