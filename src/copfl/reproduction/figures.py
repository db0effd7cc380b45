"""Curves and heat maps of an experiment, with the spread over seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from copfl import charts
from copfl.charts import Heat, Line, Lines, Panels
from copfl.comparison.plots import ACCURACY, curve
from copfl.files import write_bytes
from copfl.reproduction.experiments import Column
from copfl.reproduction.findings import Cell, Findings
from copfl.tables import with_spread

CURVES = (("accuracy", ACCURACY, 100), ("loss", "training loss", 1))


def names(findings: Findings, stem: str) -> list[str]:
    """The pictures that an experiment has."""
    protocols = [] if findings.experiment.chart == "none" else findings.protocols
    return [f"{stem}-{protocol}.svg" for protocol in protocols]


def write(findings: Findings, stem: str, out: Path) -> list[Path]:
    """The paths of the pictures, once they are written; none where matplotlib is missing."""
    if not charts.available():
        return []
    paths = []
    for protocol, name in zip(findings.protocols, names(findings, stem), strict=False):
        heat = findings.experiment.chart == "heatmap"
        panels: Panels = maps(findings, protocol) if heat else curves(findings, protocol)
        title = "" if heat else f"{findings.experiment.title}. {findings.experiment.protocols[protocol]}"
        write_bytes(out / name, charts.pictures(panels, title, kinds=["svg"])["svg"])
        paths.append(out / name)
    return paths


def curves(findings: Findings, protocol: str) -> list[list[Lines]]:
    """Accuracy, and below it loss, by round in every column: mean and standard deviation over seeds."""
    grid = []
    for name, label, scale in CURVES:
        row = []
        for column in findings.experiment.columns:
            cells = findings.column(protocol, column.name)
            lines = [
                _line(cell, cell.row.value if name == "accuracy" else name, scale, place)
                for place, cell in enumerate(cells)
                # rows of one run have one loss
                if cell.runs and not (name == "loss" and any(c.runs == cell.runs for c in cells[:place]))
            ]
            row.append(Lines(column.name, _with_seeds(column.title, cells), "", [], label, lines))
        grid.append(row)
    return grid


def _with_seeds(title: str, cells: list[Cell]) -> str:
    counts = sorted({len(cell.runs) for cell in cells if cell.runs})
    numbers = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else ""
    return f"{title} ({numbers} seeds)" if counts else title


def _line(cell: Cell, name: str, scale: float, place: int) -> Line:
    records = list(cell.runs.values())
    rounds = records[0].rounds
    values = scale * np.array([record.curves[name] for record in records if record.rounds == rounds])
    return curve(cell.row.label, rounds, values, place)


def maps(findings: Findings, protocol: str) -> list[list[Heat]]:
    """A heat map per column: mean and standard deviation over seeds in every cell."""
    return [[_map(findings, protocol, column) for column in findings.experiment.columns]]


def _map(findings: Findings, protocol: str, column: Column) -> Heat:
    assert findings.experiment.map is not None
    (down, down_values), (across, across_values) = findings.experiment.map
    metrics = [cell.metric() for cell in findings.column(protocol, column.name)]
    means = [None if metric is None else metric.mean for metric in metrics]
    texts = [
        "not yet run" if metric is None else with_spread(*metric).replace(" ±", "\n±") for metric in metrics
    ]
    width = len(across_values)
    starts = range(0, len(metrics), width)
    return Heat(
        name=column.name,
        title=column.title,
        about="",
        rows=[f"{value:g}" for value in down_values],
        columns=[f"{value:g}" for value in across_values],
        values=[means[start : start + width] for start in starts],
        what=ACCURACY,
        x_title=across,
        row_title=down,
        texts=[texts[start : start + width] for start in starts],
    )
