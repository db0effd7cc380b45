"""How a comparison is held in Python: a few lines, and data frames.

The methods of `Comparison` that a notebook calls are here.
"""

from __future__ import annotations

import math
from typing import Any

from copfl.comparison.results.tables import Comparison
from copfl.errors import one_of
from copfl.tables import data_frame

MOST_SHOWN = 3  # rows, in a few lines
FRAMES = ("rows", "clients", "rounds")
DIFFERENCE = ("difference", "difference_low", "difference_high")  # to the reference, 95 % over both


def lines(comparison: Comparison) -> list[str]:
    """What decides, in one to five lines: the title, and the best rows with their verdicts."""
    metric = comparison.metric
    rows = {
        row.title: (row.metrics()[metric.name].mean, row.differences.get(metric.name))
        for row in comparison.rows
    }
    best = sorted(rows, key=lambda title: rows[title][0], reverse=metric.higher_is_better)
    verdicts = {title: f", {gap.verdict}" if gap is not None else "" for title, (_, gap) in rows.items()}
    if any(verdicts.values()):
        verdicts = {title: verdict or ", the reference" for title, verdict in verdicts.items()}
    shown = [f"  {title} {metric.text(rows[title][0])}{verdicts[title]}" for title in best[:MOST_SHOWN]]
    more = [f"  and {len(best) - MOST_SHOWN} more; print shows all"] if len(best) > MOST_SHOWN else []
    return [f"{comparison.title}: {metric.in_unit}", *shown, *more]


def frame(comparison: Comparison, of: str) -> Any:
    """A pandas data frame with a row per entry, or per entry, seed and client or evaluation.

    Args:
        comparison: What is shown.
        of: "rows", "clients" or "rounds".
    """
    one_of(FRAMES, of=of)
    name = comparison.metric.name
    if of == "rows":
        metrics = [row.metrics() for row in comparison.rows]
        gaps = [row.differences.get(name) for row in comparison.rows]
        means = {one: [of_row[one].mean for of_row in metrics] for one in metrics[0]}
        ends = [(math.nan,) * 3 if gap is None else (gap.mean, *gap.both) for gap in gaps]
        differences = {title: [row[n] for row in ends] for n, title in enumerate(DIFFERENCE)}
        corrected = [math.nan if gap is None else gap.p for gap in gaps]
        verdicts = ["reference" if gap is None else gap.verdict for gap in gaps]
        labels = [row.label for row in comparison.rows]
        return data_frame({"row": labels, **means, **differences, "p": corrected, "verdict": verdicts})
    values: list[tuple[Any, ...]] = []
    for label, run in ((row.label, run) for row in comparison.rows for run in row.outcomes):
        names = run.names or range(len(run.clients[name]))
        pairs = (
            zip(names, run.clients[name], strict=True)
            if of == "clients"
            else zip(run.rounds, run.curves[name], strict=True)
        )
        values += [(label, run.seed, *pair) for pair in pairs]
    head = ("row", "seed", of.removesuffix("s"), name)
    return data_frame({title: [value[n] for value in values] for n, title in enumerate(head)})
