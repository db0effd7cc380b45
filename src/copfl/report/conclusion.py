"""What a report says first: who gains, what it cost, and which differences are distinguishable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from copfl.core.metrics import MetricInfo
from copfl.experiment.gains import EQUAL
from copfl.experiment.progress import span
from copfl.report.run_data import RunData, Runs, paired
from copfl.stats import Numbers, over_clients
from copfl.tables import size

NAMED = 5  # clients that a sentence names
OVER_CLIENTS = "95 % interval over clients"


def of_runs(runs: Runs) -> list[str]:
    """The paragraphs above everything else."""
    if len(runs) == 1:
        return [*_gain(runs[0]), f"Cost: {_cost(runs[0])}."]
    gains = [f"{run.label}: {_gain(run)[0]}" for run in runs if _measured(run)]
    costs = "; ".join(f"{run.label}: {_cost(run)}" for run in runs)
    return [*_compared(runs), *gains, f"Cost. {costs}."]


def _measured(run: RunData) -> bool:
    """Whether there is a gain to speak of; local training has none over itself."""
    return run.algorithm != "local" and run.gains is not None


def _gain(run: RunData) -> list[str]:
    """Who gains over training alone, and who does not."""
    found, metric = run.gains, run.primary
    if found is None:
        values = run.last(metric.name)
        if np.isnan(values).all():
            return ["No client has been evaluated yet."]
        mean = f"{metric.text(float(np.nanmean(values)))}{metric.unit}"
        return [
            f"Mean {metric.title} of the clients: {mean}. Whether they gain is not known: "
            "the run did not train them alone as a baseline."
        ]
    known = np.flatnonzero(~np.isnan(found.gain))
    gain = found.gain[known]
    better = known[gain > EQUAL]
    low, high = over_clients([gain])
    clear = len(gain) > 1 and (low > 0 or high < 0)
    verdict = "" if clear else " On average, no gain is distinguishable."
    first = (
        f"{len(better)} of {len(known)} clients gain over training alone. Mean gain: "
        f"{_points(metric, float(gain.mean()))} ({OVER_CLIENTS}: {_bounds(metric, low, high)}).{verdict}"
    )
    order = sorted(map(int, known), key=lambda n: -float(found.gain[n]))
    most = [n for n in order if found.gain[n] > EQUAL]
    least = [n for n in reversed(order) if found.gain[n] <= EQUAL]
    named = [("Largest gains", most), ("No gain", least)]
    texts = [f"{title}: {_named(clients, found.gain, metric)}." for title, clients in named if clients]
    return [first, " ".join(texts if least else [*texts, "Every client gains."])]


def _named(clients: Sequence[int], gain: Numbers, metric: MetricInfo) -> str:
    """Such as "client 3 (+8.1), client 5 (+6.0) and 2 more"."""
    texts = [f"client {n} ({metric.text(float(gain[n]), sign='+')})" for n in clients[:NAMED]]
    more = f" and {len(clients) - NAMED} more" if len(clients) > NAMED else ""
    return ", ".join(texts) + more


def _points(metric: MetricInfo, value: float) -> str:
    return f"{metric.text(value, sign='+')}{' points' if metric.fraction else ''}"


def _bounds(metric: MetricInfo, low: float, high: float) -> str:
    return f"{metric.text(low, sign='+')} to {metric.text(high, sign='+')}"


def _cost(run: RunData) -> str:
    """The rounds, their time and the bytes of one client."""
    rounds = f"{len(run.records)} rounds" + (f" in {span(sum(run.seconds))}" if run.seconds else "")
    if not run.has("bytes_up"):
        return rounds
    up, down = (size(float(np.nanmean(run.metric(way)))) for way in ("bytes_up", "bytes_down"))
    return f"{rounds}, {up} up and {down} down per client and round"


def _compared(runs: Runs) -> list[str]:
    """Which differences to the first run are distinguishable."""
    metric, texts = runs[0].primary, []
    for pair in paired(runs):
        mean, (low, high) = float(pair.difference.mean()), pair.interval
        amount = f"{_points(metric, mean)} ({_bounds(metric, low, high)})"
        verdict = metric.verdict("higher" if mean > 0 else "lower")
        texts.append(f"{pair.label}: {verdict if pair.distinguishable else 'not distinguishable'}, {amount}.")
    if not texts:
        return []
    about = (
        f"Mean {metric.title} compared with {runs[0].label}, client by client ({OVER_CLIENTS} in brackets):"
    )
    return [" ".join([about, *texts]), "One run of each says nothing about other seeds; copfl compare does."]
