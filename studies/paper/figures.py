"""Curves and heat maps of an experiment, with the spread over seeds."""

from pathlib import Path

from copfl import charts
from copfl.charts import Heat, Line, Lines, Panels
from copfl.comparison.plots import axis, heat
from copfl.core.metrics import ACCURACY
from copfl.files import write_bytes
from copfl.tables import with_spread
from studies.paper.findings import NOT_YET, Cell, Findings

CURVES = (("accuracy", axis(ACCURACY), 100), ("loss", "training loss", 1))


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
                _line(cell, cell.row.value if name == "accuracy" else name, scale, number)
                for number, cell in enumerate(cells)
                # rows of one run have one loss
                if cell.runs and not (name == "loss" and any(c.runs == cell.runs for c in cells[:number]))
            ]
            row.append(Lines(column.name, _with_seeds(column.title, cells), "", [], label, lines))
        grid.append(row)
    return grid


def _with_seeds(title: str, cells: list[Cell]) -> str:
    counts = sorted({len(cell.runs) for cell in cells if cell.runs})
    numbers = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else ""
    return f"{title} ({numbers} seeds)" if counts else title


def _line(cell: Cell, name: str, scale: float, number: int) -> Line:
    records = list(cell.runs.values())
    alike = [record for record in records if record.rounds == records[0].rounds]
    curves = [dict(zip(record.rounds, record.curves[name], strict=True)) for record in alike]
    return charts.mean_curve(cell.row.label, curves, number, scale)


def maps(findings: Findings, protocol: str) -> list[list[Heat]]:
    """A heat map per column: mean and standard deviation over seeds in every cell."""
    row = []
    for column in findings.experiment.columns:
        metrics = [cell.metric() for cell in findings.column(protocol, column.name)]
        means = [metric and metric.mean for metric in metrics]
        texts = [with_spread(*metric).replace(" ±", "\n±") if metric else NOT_YET for metric in metrics]
        row.append(heat(column.name, column.title, findings.experiment.map, means, texts))
    return [row]
