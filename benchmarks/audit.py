"""How each way of weighting treats four anomalous clients, and what that costs the others: results/audit.json.

    python benchmarks/audit.py [--rounds 15] [--long 60] [--seeds 3] [--out results/audit.json]

The federation is that of `copfl audit --synthetic`. Every variant runs with and without anomalies, and without each
anomalous client; COWA (our interpretation) is audited as well. It takes five minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl import stats
from copfl.audit import audit as auditing
from copfl.audit import replay
from copfl.audit import tables as audit_tables
from copfl.audit.audit import Audit, Cache, Metrics
from copfl.audit.synthetic import ANOMALIES, DUPLICATED, NAMES, RIDER, ROUNDS, TITLE, WRONG, experiment
from copfl.experiment.result import Experiment, Result
from copfl.experiment.training import OnRound, execute
from copfl.report.contributions import relative_weights
from copfl.stats import LAST, Numbers
from copfl.tables import Table, as_text, plain, with_spread

REGULAR = [DUPLICATED, 5, 6, 7]  # the clients whose accuracy measures the cost
LONG = 60  # rounds until wrong labels are memorised
DEFAULT, HELD_OUT, FEDCE = "COWA (our interpretation)", "trust=held_out", "FedCE"
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {"name": "copfl"},
    HELD_OUT: {"name": "copfl", "trust": "held_out"},
    "equal weights": {"name": "copfl", "score": "none"},
    FEDCE: {"name": "fedce"},
}
TRUST = (DEFAULT, HELD_OUT)  # variants that also run with a false score, and until labels are memorised
BASELINES = (HELD_OUT, FEDCE)  # variants whose scores the audit of the first includes


class Variant(NamedTuple):
    """The results of one variant. Accuracies are means over the regular clients, [seeds]."""

    name: str
    weights: dict[str, Numbers]  # by score, [seeds, clients]: 1 is an equal weight
    accuracy: dict[str, Numbers]  # "anomalous" and "clean": personal, after training
    accuracy_global: dict[str, Numbers]
    gains: dict[
        str, Numbers
    ]  # by anomaly: personal accuracy minus that of training without the anomalous client
    gains_global: dict[str, Numbers]
    false_score: Numbers | None  # [seeds], the weight of a free rider that sends the score of honest training
    memorised: Numbers | None  # [seeds], the weight of wrong labels that the client's model has memorised


class Study(NamedTuple):
    """All variants, and the audit of the first."""

    seeds: list[int]
    variants: list[Variant]
    audit: Audit


def study(
    seeds: Sequence[int] = (0, 1, 2),
    variants: Sequence[str] = tuple(VARIANTS),
    rounds: int = ROUNDS,
    long: int = LONG,
) -> Study:
    """The study; the first variant is audited, with the scores of the others in BASELINES on its clients."""

    def make(seed: int, variant: str | None) -> Experiment:
        return experiment(VARIANTS[variant or variants[0]], seed, rounds=rounds)

    baselines = [name for name in variants[1:] if name in BASELINES]
    found = auditing.audit(make, seeds, baselines=baselines, names=NAMES, title=variants[0])
    return Study(list(seeds), [_variant(name, seeds, rounds, long) for name in variants], found)


def _run(
    variant: str, stored: Cache, seed: int, rounds: int, kind: str = "anomalous", gone: int | None = None
) -> Metrics:
    """The metrics of a run, see `experiment`; with `gone`, without the uploads of this client."""

    def work(on_round: OnRound) -> Result:
        e = experiment(VARIANTS[variant], seed, kind, rounds)
        return execute(e, None, on_round) if gone is None else replay.without(e, [gone], on_round)

    return stored.run(f"{seed}-{kind}-{gone}", rounds, work)


def _variant(name: str, seeds: Sequence[int], rounds: int, long: int) -> Variant:
    def regular(runs: Sequence[Metrics], what: str) -> Numbers:
        return np.array([np.nanmean(np.array(run[what], np.float64)[REGULAR]) for run in runs])

    def weight(run: Metrics, score: str, last: int = 0) -> Numbers:
        return np.asarray(relative_weights(np.array(run["scores"][score], np.float64))[-last:].mean(0))

    run = partial(_run, name, Cache())
    kinds = {kind: [run(seed, rounds, kind) for seed in seeds] for kind in ("anomalous", "clean")}
    without = {
        label: [run(seed, rounds, gone=client) for seed in seeds] for label, client in ANOMALIES.items()
    }
    anomalous = kinds["anomalous"]
    accuracy, accuracy_global = (
        {kind: regular(runs, what) for kind, runs in kinds.items()}
        for what in ("accuracy", "accuracy_global")
    )
    gains, gains_global = (
        {label: regular(anomalous, what) - regular(runs, what) for label, runs in without.items()}
        for what in ("accuracy", "accuracy_global")
    )
    false_score = memorised = None
    if name in TRUST:
        false_score = np.array([weight(run(seed, rounds, "false_score"), "weight")[RIDER] for seed in seeds])
        memorised = np.array([weight(run(seed, long), "weight", LAST)[WRONG] for seed in seeds])
    scores = {score: np.stack([weight(one, score) for one in anomalous]) for score in anomalous[0]["scores"]}
    return Variant(name, scores, accuracy, accuracy_global, gains, gains_global, false_score, memorised)


NOTES = {
    "weights": "Mean ± standard deviation over seeds; in brackets the mean rank, 1 is the largest weight.",
    "trust": "False score: the free rider sends the score of honest training with its noise. Memorised: the "
    f"last {LAST} rounds of a longer run, when the client's model has memorised its wrong labels.",
    "accuracy": "Mean ± standard deviation over seeds. Clean: the same clients with correct labels, honest "
    "updates and their own samples. The global model is evaluated on the regular clients' test samples.",
    "gains": "Their accuracy with the anomalous client minus that of training without it, mean ± standard "
    "deviation over seeds. Negative: they are better without it.",
}


def tables_of(found: Study, details: bool = True) -> list[Table]:
    """The tables of the study and of its audit."""
    limits, accuracies = [], []
    for v in found.variants:
        weight = v.weights["weight"]
        if v.false_score is not None:
            numbers = (weight[:, RIDER], v.false_score, weight[:, WRONG], v.memorised)
            limits.append([v.name, *map(_number, numbers)])
        kinds = [part[kind] for part in (v.accuracy, v.accuracy_global) for kind in ("clean", "anomalous")]
        accuracies.append([v.name, *map(_percent, kinds)])
    head = [
        f"{what}, {kind}" for what in ("personal", "global model") for kind in ("clean", "with anomalies")
    ]
    gains = "Gain of the regular clients from each anomalous client, in points of"
    rows, rows_global = (
        [[v.name, *(_percent(getattr(v, kind)[name], "+.1f") for name in ANOMALIES)] for v in found.variants]
        for kind in ("gains", "gains_global")
    )
    trust = ["", "free rider", "false score", "wrong labels", "memorised"]
    return [
        _weight_table(found),
        Table("Limits of trust: weights", trust, limits, [NOTES["trust"]]),
        Table("Accuracy of the regular clients in %", ["", *head], accuracies, [NOTES["accuracy"]]),
        Table(f"{gains} personal accuracy", ["", *ANOMALIES], rows),
        Table(f"{gains} the global model's accuracy", ["", *ANOMALIES], rows_global, [NOTES["gains"]]),
        *audit_tables.tables_of(found.audit, details),
    ]


def _weight_table(found: Study) -> Table:
    rows = []
    for variant in found.variants:
        for score, weights in variant.weights.items():
            if score == "weight" or variant.name == DEFAULT:
                title = variant.name if score == "weight" else f"- its {audit_tables.SCORE_TITLES[score]}"
                ranks = stats.ranked(-weights).mean(0)
                varied = bool(np.ptp(weights) >= 1e-9)
                shown = (*ANOMALIES.values(), DUPLICATED)
                cells = [_number(weights[:, n]) + f" ({ranks[n]:.1f})" * varied for n in shown]
                rows.append([title, *cells, _number(weights[:, REGULAR[1:]].mean(1))])
    head = ["", *ANOMALIES, "duplicated", "regular"]
    return Table("Weight of each client; 1 is an equal weight", head, rows, [NOTES["weights"]])


def _number(values: Numbers | None) -> str:
    return "-" if values is None else with_spread(*stats.spread_of(values), ".2f")


def _percent(values: Numbers, digits: str = ".1f") -> str:
    mean, spread = stats.spread_of(values)
    return with_spread(100 * mean, 100 * spread, digits)


def as_json(found: Study) -> dict[str, Any]:
    """All results."""
    return {
        "title": TITLE,
        "seeds": found.seeds,
        "clients": NAMES,
        "variants": [plain(variant._asdict()) for variant in found.variants],
        "audit": audit_tables.as_json(found.audit),
    }


def main() -> None:
    """Runs the study, prints its tables and writes its numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--long", type=int, default=LONG)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = study(range(given.seeds), rounds=given.rounds, long=given.long)
    print("\n\n".join(as_text(table, 120) for table in tables_of(found)))
    if given.out is not None:
        given.out.write_text(json.dumps(as_json(found), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
