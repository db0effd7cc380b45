"""Curves and maps of an item, drawn so that one sees the spread. matplotlib is an extra, copfl[plots]."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copfl.comparison.plots import COLOURS, DASHES, available
from copfl.files import write_bytes
from copfl.reproduction.findings import Cell, Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = (("accuracy", "accuracy after local training, %", 100), ("loss", "training loss", 1))


def names(findings: Findings, stem: str) -> list[str]:
    """The pictures that an item has."""
    return (
        []
        if findings.item.picture == "none"
        else [f"{stem}-{protocol}.svg" for protocol in findings.protocols]
    )


def write(findings: Findings, stem: str, out: Path) -> list[Path]:
    """The pictures, once they are written; none where matplotlib is missing."""
    if not available():
        return []
    from matplotlib import rc_context

    draw = {"curves": curves, "map": maps}
    paths = []
    # The same records give the same bytes: no date, and names that do not change.
    with rc_context({"svg.hashsalt": "copfl", "svg.fonttype": "none", "font.size": 9}):
        for protocol, name in zip(findings.protocols, names(findings, stem), strict=False):
            content = io.BytesIO()
            draw[findings.item.picture](findings, protocol).savefig(
                content, format="svg", metadata={"Date": None}
            )
            write_bytes(out / name, content.getvalue())
            paths.append(out / name)
    return paths


def curves(findings: Findings, protocol: str) -> Figure:
    """Accuracy and loss by round in every column: the mean over seeds, and a band of one standard deviation."""
    from matplotlib.figure import Figure

    columns = findings.item.columns
    figure = Figure(figsize=(1 + 3.2 * len(columns), 6.4), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False, sharex=True)
    handles: dict[str, Any] = {}
    for place, column in enumerate(columns):
        cells = findings.column(protocol, column.name)
        for (name, label, scale), panel in zip(CURVES, axes[:, place], strict=True):
            drawn = 0
            for number, cell in enumerate(cells):
                value = cell.row.value if name == "accuracy" else name
                same = [c for c in cells[:number] if c.runs == cell.runs]
                if cell.runs and not (name == "loss" and same):  # rows of one run have one loss
                    drawn += 1
                    style = {
                        "color": COLOURS[number % len(COLOURS)],
                        "linestyle": DASHES[number // len(COLOURS)],
                    }
                    handles[cell.row.label] = _curve(panel, cell, value, scale, style)
            if not drawn:
                panel.text(0.5, 0.5, "not yet run", ha="center", va="center", transform=panel.transAxes)
            panel.grid(alpha=0.3)
            if not place:
                panel.set_ylabel(label)
        axes[0, place].set_title(_counted(column.title, cells), fontsize=9)
        axes[1, place].set_xlabel("round")
    figure.suptitle(f"{findings.item.title}. {findings.item.protocols[protocol]}", wrap=True)
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _counted(title: str, cells: list[Cell]) -> str:
    counts = sorted({len(cell.runs) for cell in cells if cell.runs})
    return (
        title
        if not counts
        else f"{title} ({' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds)"
    )


def _curve(panel: Axes, cell: Cell, name: str, scale: float, style: dict[str, Any]) -> Any:
    records = list(cell.runs.values())
    rounds = records[0].rounds
    values = scale * np.array([record.curves[name] for record in records if record.rounds == rounds])
    (line,) = panel.plot(rounds, values.mean(0), label=cell.row.label, linewidth=1.3, **style)
    if len(values) > 1:
        spread = values.std(0, ddof=1)
        low, high = values.mean(0) - spread, values.mean(0) + spread
        panel.fill_between(rounds, low, high, color=style["color"], alpha=0.12, linewidth=0)
    return line


def maps(findings: Findings, protocol: str) -> Figure:
    """A heat map per column: mean and standard deviation over seeds in every cell."""
    from matplotlib.figure import Figure

    item = findings.item
    assert item.map is not None
    (down, down_values), (across, across_values) = item.map
    figure = Figure(
        figsize=(1.5 + 4.4 * len(item.columns), 1.6 + 0.55 * len(down_values)), layout="constrained"
    )
    panels = figure.subplots(1, len(item.columns), squeeze=False)[0]
    for panel, column in zip(panels, item.columns, strict=True):
        figures = [cell.figure() for cell in findings.column(protocol, column.name)]
        means = np.array([np.nan if f is None else f.mean for f in figures]).reshape(len(down_values), -1)
        spreads = np.array([np.nan if f is None else f.spread for f in figures]).reshape(means.shape)
        image = panel.imshow(np.ma.masked_invalid(means), cmap="viridis", aspect="auto")
        middle = np.nan if np.isnan(means).all() else (np.nanmin(means) + np.nanmax(means)) / 2
        for (i, j), value in np.ndenumerate(means):
            spread = "" if np.isnan(spreads[i, j]) else f"\n± {spreads[i, j]:.1f}"
            text = "not yet run" if np.isnan(value) else f"{value:.1f}{spread}"
            panel.text(
                j, i, text, ha="center", va="center", fontsize=7, color="white" if value < middle else "black"
            )
        panel.set_xticks(range(len(across_values)), [f"{value:g}" for value in across_values])
        panel.set_yticks(range(len(down_values)), [f"{value:g}" for value in down_values])
        panel.set(xlabel=across, ylabel=down, title=column.title)
        if not np.isnan(means).all():
            figure.colorbar(image, ax=panel, label="accuracy after local training, %")
    return figure
