"""The paper's figures and tables as pictures: its numbers, as far as they are known, beside ours."""

from collections.abc import Callable
from pathlib import Path

from copfl import charts
from copfl.charts import Chart, Dots, Heat, Line, Lines
from copfl.comparison.results.plots import axis, heat
from copfl.files import write_bytes
from copfl.measures.metrics import ACCURACY
from copfl.tables import with_spread
from studies.paper.findings import NOT_YET, Cell, Findings

CURVES = (("accuracy", axis(ACCURACY), 100), ("loss", "training loss", 1))
PAPER, OURS = "the paper, one run", "ours, mean and standard deviation over seeds"
PAPERS_END = "the paper's accuracy at the end (its table 1)"
PANELS = 4  # in a line


def names(findings: Findings, stem: str) -> list[str]:
    """The pictures that an experiment has."""
    protocols = [] if findings.experiment.chart == "none" else findings.protocols
    return [f"{stem}-{protocol}.svg" for protocol in protocols]


def write(findings: Findings, stem: str, out: Path) -> list[Path]:
    """The paths of the pictures, once they are written; none where matplotlib is missing."""
    if not charts.available():
        return []
    experiment, paths = findings.experiment, []
    for protocol, name in zip(findings.protocols, names(findings, stem), strict=False):
        title = f"{experiment.title}. {experiment.protocols[protocol]}"
        panels = DRAWN[experiment.chart](findings, protocol)
        write_bytes(out / name, charts.pictures(panels, title, kinds=["svg"])["svg"])
        paths.append(out / name)
    return paths


def curves(findings: Findings, protocol: str) -> list[list[Chart]]:
    """Accuracy, and below it loss, by round in every column: mean and standard deviation over seeds.

    Of the paper's curves only the ends are known, from its table.
    """
    grid: list[list[Chart]] = []
    for name, label, scale in CURVES:
        row: list[Chart] = []
        for column in findings.experiment.columns:
            cells = findings.column(protocol, column.name)
            lines = [
                _line(cell, cell.row.value if name == "accuracy" else name, scale, number)
                for number, cell in enumerate(cells)
                # rows of one run have one loss
                if cell.runs and not (name == "loss" and any(c.runs == cell.runs for c in cells[:number]))
            ]
            lines += _ends(findings, cells) if name == "accuracy" else []
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


def _ends(findings: Findings, cells: list[Cell]) -> list[Line]:
    """A dot per number of the paper, in the colour of the first row that it stands beside."""
    dots: dict[float, Line] = {}
    for place, cell in enumerate(cells):
        number = findings.papers(cell)
        if number is not None and cell.runs:
            end = next(iter(cell.runs.values())).length
            dots.setdefault(number, Line(PAPERS_END, [number], colour=place, x=[end]))
    return list(dots.values())


def maps(findings: Findings, protocol: str) -> list[list[Chart]]:
    """A line per column: the cells of the paper's heat map whose values its text has, then ours."""
    grid: list[list[Chart]] = []
    for column in findings.experiment.columns:
        cells = findings.column(protocol, column.name)
        metrics, papers = [cell.metric() for cell in cells], [findings.papers(cell) for cell in cells]
        means = [metric and metric.mean for metric in metrics]
        texts = [with_spread(*metric).replace(" ±", "\n±") if metric else NOT_YET for metric in metrics]
        known = ["" if number is None else f"{number:.2f}" for number in papers]
        pair: dict[str, Heat] = {
            title: heat(column.name, f"{column.title}: {title}", findings.experiment.map, values, words)
            for title, values, words in (("the paper", papers, known), ("ours", means, texts))
        }
        grid.append(list(pair.values()))
    return grid


def beside(findings: Findings, protocol: str) -> list[list[Chart]]:
    """A panel per column: the paper's number and ours for each row that the paper has."""
    panels: list[Chart] = []
    for column in findings.experiment.columns:
        cells = [cell for cell in findings.column(protocol, column.name) if findings.papers(cell) is not None]
        metrics = [cell.metric() for cell in cells]
        low, high = (
            [metric and metric.mean + side * metric.spread for metric in metrics] for side in (-1, 1)
        )
        series = [
            Line(PAPER, [findings.papers(cell) for cell in cells], colour=1, symbol=1),
            Line(OURS, [metric and metric.mean for metric in metrics], low, high, symbol=0),
        ]
        labels = [cell.row.label for cell in cells]
        panels.append(Dots(column.name, column.title, "", labels, axis(ACCURACY), series))
    return [panels[start : start + PANELS] for start in range(0, len(panels), PANELS)]


DRAWN: dict[str, Callable[[Findings, str], list[list[Chart]]]] = {
    "curves": curves,
    "heatmap": maps,
    "beside": beside,
}
