"""What is known of each client's part in a run, side by side: benefit, weight, data, bytes, presence, own gain."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from copfl.charts import Dots, Line, values_of
from copfl.core.metrics import MetricInfo
from copfl.experiment import records
from copfl.experiment.benefit import Benefit, of_records, rounds_wanted
from copfl.experiment.gains import Gains
from copfl.stats import Numbers, mean_of_known
from copfl.tables import NONE, Table, interval, number, plain, size

UNIT = 1000  # benefits are shown in thousandths
ROWS = 30  # of more clients than this, those whose benefit differs most from the mean client's
ABOUT = (
    "Benefit to the others: how much lower their loss is, in thousandths per round, with this client in one of two "
    "random halves of the uploads than with the mean client. Its own judgement does not count. Higher, lower: than the "
    "mean client, corrected for the number of clients. It is no measure of effort: a client that sends nothing new "
    "may be above those whose updates disturb the others (docs/audit.md)."
)


class Contributions(NamedTuple):
    """[clients] each; nan where it is not known."""

    names: Sequence[str]
    benefit: Benefit
    rounds: int  # that were measured
    weight: Numbers  # mean over the rounds; 1 is an equal weight
    samples: Sequence[int]  # to train on
    transferred: Numbers  # bytes in both directions, over all rounds
    taken_part: Numbers  # rounds
    gain: Numbers | None  # over training alone
    metric: MetricInfo  # of the gain


def contributions(
    lines: list[records.Record],
    names: Sequence[str],
    samples: Sequence[int],
    gains: Gains | None,
    metric: MetricInfo,
) -> Contributions | None:
    """Of the records of a run; None where it did not measure the benefit."""
    clients = len(names)
    benefit = of_records(lines, clients)
    if benefit is None:
        return None
    weight, up, down = (records.table(lines, name, clients) for name in ("weight", "bytes_up", "bytes_down"))
    present = ~np.isnan(weight)
    return Contributions(
        names=names,
        benefit=benefit,
        rounds=len(lines),
        weight=mean_of_known(weight * present.sum(1, keepdims=True)),
        samples=samples,
        transferred=np.nansum(up + down, 0),
        taken_part=present.sum(0).astype(np.float64),
        gain=None if gains is None else gains.gain,
        metric=metric,
    )


def table(found: Contributions) -> Table:
    """A row per client."""
    benefit, clients = found.benefit, len(found.names)
    chosen = list(range(clients))
    notes = [ABOUT]
    if clients > ROWS:
        chosen = sorted(np.argsort(np.nan_to_num(benefit.p_values, nan=2.0), kind="stable")[:ROWS].tolist())
        notes.insert(
            0,
            f"The {ROWS} of {clients} clients whose benefit differs most clearly.",
        )
    if found.rounds < (wanted := rounds_wanted(clients)):
        notes.append(
            f"{found.rounds} rounds are few for {clients} clients: {wanted} or more give narrower intervals."
        )
    verdicts, ranks = benefit.verdicts, benefit.ranks
    rows = []
    for n in chosen:
        ends = benefit.interval(n)
        low, high = ranks[n]
        rank = NONE if (low, high) == (1, clients) else str(low) if low == high else f"{low} to {high}"
        cells = [
            found.names[n],
            number(UNIT * benefit.value[n], "+.2f"),
            interval(UNIT * ends.low, UNIT * ends.high, "+.2f"),
            verdicts[n],
            rank,
            number(found.weight[n], ".2f"),
            f"{found.samples[n]:,}",
            size(found.transferred[n]),
            f"{found.taken_part[n]:.0f} of {found.rounds}",
        ]
        rows.append([*cells, *([] if found.gain is None else [found.metric.text(found.gain[n], sign="+")])])
    head = ["client", "benefit", "95 % interval", "verdict", "rank", "weight", "samples", "sent", "rounds"]
    own = [] if found.gain is None else ["own gain"]
    return Table("What each client contributes", [*head, *own], rows, notes)


def chart(found: Contributions) -> Dots:
    """A dot per client with its interval."""
    bounds = np.array([found.benefit.interval(n) for n in range(len(found.names))])
    low, high = (values_of(UNIT * np.where(np.isfinite(ends), ends, math.nan)) for ends in bounds.T)
    series = [Line("benefit", values_of(UNIT * found.benefit.value), low, high, found.benefit.verdicts)]
    title, x_title = "Benefit to the others", "benefit, in thousandths of the loss per round"
    return Dots("benefit", title, ABOUT, list(found.names), x_title, series, digits=2, zero=True)


def as_json(found: Contributions) -> dict[str, Any]:
    """All of it; what is not known is null."""
    benefit = found.benefit
    content = {
        "benefit": benefit.value,
        "standard_error": benefit.error,
        "degrees_of_freedom": benefit.freedom,
        "interval": [benefit.interval(n) for n in range(len(found.names))],
        "p_value": benefit.p_values,
        "verdict": benefit.verdicts,
        "ranks": benefit.ranks,
        "weight": found.weight,
        "samples": list(found.samples),
        "bytes": found.transferred,
        "rounds_taken_part": found.taken_part,
        "gain": found.gain,
    }
    return dict(plain(content))
