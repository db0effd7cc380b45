"""An audit as tables, Markdown and JSON.

`copfl audit` prints and writes them.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from copfl import stats
from copfl.audit.audit import BENEFIT, Audit
from copfl.experiment.reading import AUDIT_FORMAT
from copfl.files import write_bytes
from copfl.report import contributions
from copfl.report.contributions import UNIT
from copfl.report.run_charts import CONTRIBUTIONS
from copfl.stats import mean_of_known
from copfl.tables import Table, as_markdown, interval, number, plain, with_spread

SCORE_TITLES = {
    "weight": "weight",
    "gradient_score": "gradient part",
    "prediction_score": "prediction part",
    BENEFIT: "benefit to the others",
}
MEASURES = {"Spearman": stats.spearman, "Kendall": stats.kendall}


def label(score: str) -> str:
    """Such as "weight", or "fedce: gradient part"."""
    algorithm, _, name = score.rpartition(" ")
    return f"{algorithm}: {SCORE_TITLES.get(name, name)}" if algorithm else SCORE_TITLES.get(name, name)


def tables_of(audit: Audit, details: bool = True) -> list[Table]:
    """The tables of an audit; Kendall's correlations are details.

    Args:
        audit: The result.
        details: Whether Kendall's correlations are shown.
    """
    measures = [_correlations(audit, name) for name in MEASURES if details or name == "Spearman"]
    return [_clients(audit), *_contributed(audit), *measures, _stability(audit)]


def _contributed(audit: Audit) -> list[Table]:
    """The benefit with its interval beside the other numbers of each client, a table per seed that has it."""
    tables = []
    for seed in audit.seeds:
        if seed.contributions is not None:
            table = contributions.table(seed.contributions._replace(names=audit.names))
            tables.append(table._replace(title=f"{table.title}, seed {seed.seed}"))
    return tables


NOTES = {
    "clients": "weight: 1 is an equal weight, mean over rounds; rank 1 is the largest. Leave-one-out: the "
    "gain in the others' personal models, or in the global model on all test samples, over training "
    "without the client. Shapley: its Shapley value of each round's uploads, summed over the rounds, for the "
    "global model and for the personal models. ± standard error over clients and sampled orders.",
    "benefit": "Benefit: to the others, in thousandths of their loss per round, from random halves of "
    "the uploads.",
    "correlations": "+1: the same order, -1: the reverse, 0: no relation. In brackets the central 95 % of "
    "the values when the clients are resampled: an interval that contains 0 is inconclusive.",
    "stability": "Of the clients' ranks in a round and the next, in the two halves, and under two seeds.",
    "not reproduced": "The run was not reproduced here with the numbers of its folder (another machine or "
    "version?): the repetition is audited.",
    "one seed": " One seed was run; --seeds 0,1,2 measures the variation between seeds.",
}


def _clients(audit: Audit) -> Table:
    weight = audit.mean("scores", "weight")
    rank, metric = stats.ranked(-weight), audit.metric
    accuracy = mean_of_known(np.stack([seed.accuracy for seed in audit.seeds]))
    means = [(audit.mean("values", name), audit.mean("errors", name)) for name in audit.contributions]
    errors = [seed.contributions.benefit.error for seed in audit.seeds if seed.contributions is not None]
    benefits: list[list[str]] = [[] for _ in audit.names]
    if errors:
        pairs = zip(
            audit.mean("scores", BENEFIT), np.sqrt(np.square(errors).sum(0)) / len(errors), strict=True
        )
        benefits = [[with_spread(UNIT * value, UNIT * error, "+.2f")] for value, error in pairs]
    rows = []
    for n, name in enumerate(audit.names):
        gains = [metric.text(value[n], error[n], sign="+") for value, error in means]
        tested = metric.text(accuracy[n])
        rows.append([name, number(weight[n], ".2f"), number(rank[n], "g"), *benefits[n], *gains, tested])
    head = [
        "",
        "weight",
        "rank",
        *(["benefit"] if errors else []),
        *(CONTRIBUTIONS[name] for name in audit.contributions),
        metric.title,
    ]
    title = f"Contribution of each client in {metric.gains}, {audit.title}"
    about = f"{NOTES['clients']} {NOTES['benefit']}" if errors else NOTES["clients"]
    return Table(title, head, rows, [about + _seeds(audit)])


def _correlations(audit: Audit, measure: str) -> Table:
    def cell(score: str, contribution: str) -> str:
        value, low, high = audit.correlation(MEASURES[measure], score, contribution)
        return number(value, "+.2f") + ("" if math.isnan(value) else f" {interval(low, high, '+.2f')}")

    title = f"{measure}'s rank correlation between the scores and the measured contributions"
    head = ["", *(CONTRIBUTIONS[name] for name in audit.contributions)]
    rows = [[label(score), *(cell(score, name) for name in audit.contributions)] for score in audit.scores]
    return Table(title, head, rows, [NOTES["correlations"] + _seeds(audit)])


def _stability(audit: Audit) -> Table:
    rows = []
    for name in (*audit.scores, *audit.contributions):
        kind = "values" if name in CONTRIBUTIONS else "scores"
        compared_with = ("next_round", "halves")
        rounds = [float(audit.mean(what, name)) if kind == "scores" else None for what in compared_with]
        numbers = [*rounds, audit.between_seeds(kind, name)]
        rows.append([CONTRIBUTIONS.get(name) or label(name), *(number(value, "+.2f") for value in numbers)])
    note = NOTES["stability"] + (NOTES["one seed"] if len(audit.seeds) < 2 else "")
    head = ["", "from round to round", "first half, second half", "between seeds"]
    return Table("Stability of the ranks: Spearman's rank correlation", head, rows, [note])


def _seeds(audit: Audit) -> str:
    seeds = ", ".join(str(seed.seed) for seed in audit.seeds)
    return f" Means over the seeds {seeds}." if len(audit.seeds) > 1 else ""


def remarks(audit: Audit) -> list[str]:
    """Remarks on the method that a reader needs."""
    lines = []
    if not all(seed.exact for seed in audit.seeds):
        lines += [
            "The servers rebuilt from the uploads are not the run's bit for bit; expect small differences."
        ]
    if any(seed.reproduced is False for seed in audit.seeds):
        lines += [NOTES["not reproduced"]]
    metric, least = audit.metric, audit.sampling.truncate
    points = f"{100 * least:g} points" if metric.fraction else f"{100 * least:g} % of the {metric.title}"
    if orders := sum(seed.orders for seed in audit.seeds):
        return [*lines, f"Shapley values come from {orders} sampled orders, truncated within {points}."]
    return [*lines, f"Shapley values are exact within each round; rounds that gain under {points} count 0."]


def as_json(audit: Audit) -> dict[str, Any]:
    """All results; numbers that are not finite are null."""
    kinds = {"scores": audit.scores, "values": audit.contributions, "errors": audit.contributions}
    content = {
        "format": AUDIT_FORMAT,
        "title": audit.title,
        "clients": audit.names,
        "rounds": audit.rounds,
        "sampling": audit.sampling._asdict(),
        "metric": audit.metric.as_json(),
        "seeds": [
            seed._asdict()
            | {"contributions": seed.contributions and contributions.as_json(seed.contributions)}
            for seed in audit.seeds
        ],
        "mean": {kind: {name: audit.mean(kind, name) for name in names} for kind, names in kinds.items()},
        "correlations": [
            {
                "score": score,
                "contribution": name,
                **{measure.lower(): audit.correlation(f, score, name) for measure, f in MEASURES.items()},
            }
            for score in audit.scores
            for name in audit.contributions
        ],
        "between_seeds": {
            name: audit.between_seeds(kind, name) for kind in ("scores", "values") for name in kinds[kind]
        },
        "remarks": remarks(audit),
    }
    return dict(plain(content))


def write(folder: Path, audit: Audit, content: Any) -> list[Path]:
    """The paths of audit.json and audit.md, once they are written.

    Args:
        folder: Of the files.
        audit: The result.
        content: Beside its tables.
    """
    paragraphs = [f"# Audit: {audit.title}", *map(as_markdown, tables_of(audit)), *remarks(audit)]
    texts = {"audit.json": json.dumps(content, indent=1), "audit.md": "\n\n".join(paragraphs)}
    for name, text in texts.items():
        write_bytes(folder / name, f"{text}\n".encode(), durable=False)
    return [folder / name for name in texts]
