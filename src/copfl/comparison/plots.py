"""Pictures of a comparison: curves, clients, and a map of a sweep. matplotlib is an extra, copfl[plots]."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copfl.comparison.rows import Comparison, Row
from copfl.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "no pictures: matplotlib is not installed; `pip install 'copfl[plots]'` brings it"
# Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A7A00")
DASHES = ("-", "--", ":", "-.")


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write(comparison: Comparison, out: Path) -> list[Path]:
    """The pictures, once they are written, as PNG and SVG; none where matplotlib is missing."""
    if not available():
        return []
    from matplotlib import rc_context

    pictures: dict[str, Callable[[Comparison], Figure]] = {"curves": curves, "clients": clients}
    if len(comparison.over) == 2:
        pictures["map"] = heat_map
    paths = []
    # The same table gives the same bytes: no date, and names that do not change.
    with rc_context({"svg.hashsalt": "copfl", "svg.fonttype": "none", "font.size": 9}):
        for name, draw in pictures.items():
            figure = draw(comparison)
            for kind, about in (("png", {"Software": None}), ("svg", {"Date": None})):
                content = io.BytesIO()
                figure.savefig(content, format=kind, dpi=150, metadata=about)
                paths.append(out / f"{name}.{kind}")
                write_bytes(paths[-1], content.getvalue())
    return paths


def _figure(width: float, height: float, columns: int = 1, **how: Any) -> tuple[Figure, Any]:
    """A figure that no window and no global state knows of."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, **how)


def _style(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place // len(COLOURS) % len(DASHES)]}


def curves(comparison: Comparison) -> Figure:
    """Personal accuracy by round: the mean over seeds, and a band of one standard deviation."""
    figure, axes = _figure(7, 4.2)
    for place, row in enumerate(comparison.rows):
        rounds, values = curve_of(row)
        style = _style(place)
        axes.plot(rounds, 100 * values.mean(0), label=row.label, linewidth=1.4, **style)
        if len(values) > 1:
            spread = values.std(0, ddof=1)
            low, high = 100 * (values.mean(0) - spread), 100 * (values.mean(0) + spread)
            axes.fill_between(rounds, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy after local training, %", title=comparison.title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def curve_of(row: Row) -> tuple[Any, Any]:
    """The rounds that every seed has a look at, and the curves there, [seeds, rounds]."""
    common = sorted(set.intersection(*({int(r) for r in run.rounds} for run in row.outcomes)))
    return np.array(common), np.array([run.curve[np.isin(run.rounds, common)] for run in row.outcomes])


def clients(comparison: Comparison) -> Figure:
    """A dot per client and seed: its accuracy, and beside it what it gains over the reference."""
    rows = comparison.rows[::-1]  # the first on top
    paired = comparison.reference is not None
    figure, axes = _figure(9 if paired else 6, 0.8 + 0.42 * len(rows), 1 + paired, sharey=True, squeeze=False)
    _dots(axes[0, 0], rows, [[100 * run.clients["accuracy"] for run in row.outcomes] for row in rows])
    axes[0, 0].set(xlabel="accuracy after local training, %")
    if paired:
        (against,) = (row for row in rows if row.label == comparison.reference)
        base = [run.clients["accuracy"] for run in against.outcomes]
        gains = [
            [100 * (run.clients["accuracy"] - b) for run, b in zip(row.outcomes, base, strict=True)]
            for row in rows
        ]
        _dots(axes[0, 1], rows, gains)
        axes[0, 1].axvline(0, color="black", linewidth=0.8)
        axes[0, 1].set(xlabel=f"difference to {comparison.reference}, points")
    figure.suptitle(f"{comparison.title}: a dot per client, a colour per seed")
    return figure


def _dots(axes: Axes, rows: list[Row], values: list[list[Any]]) -> None:
    for height, seeds in enumerate(values):
        for place, numbers in enumerate(seeds):
            # Seeds lie in lanes of their own; clients with equal values lie a little beside each other.
            lane = height + 0.5 * ((place + 0.5) / len(seeds) - 0.5)
            shift = 0.5 / len(seeds) * (np.arange(len(numbers)) / max(len(numbers) - 1, 1) - 0.5) * 0.8
            colour = COLOURS[place % len(COLOURS)]
            axes.plot(numbers, lane + shift, "o", color=colour, markersize=3, alpha=0.6, markeredgewidth=0)
        mean = float(np.mean([np.nanmean(numbers) for numbers in seeds]))
        axes.plot([mean, mean], [height - 0.38, height + 0.38], color="black", linewidth=1.6)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.grid(axis="x", alpha=0.3)


def heat_map(comparison: Comparison) -> Figure:
    """The mean accuracy of each cell of a sweep over two keys."""
    (down, down_values), (across, across_values) = comparison.over.items()
    means = np.array([100 * row.figures()["accuracy"].mean for row in comparison.rows])
    grid = means.reshape(len(down_values), len(across_values))
    figure, axes = _figure(1.8 + 0.9 * len(across_values), 1.6 + 0.6 * len(down_values))
    image = axes.imshow(grid, cmap="viridis", aspect="auto")
    middle = (grid.min() + grid.max()) / 2
    for (i, j), value in np.ndenumerate(grid):
        axes.text(
            j, i, f"{value:.1f}", ha="center", va="center", color="white" if value < middle else "black"
        )
    axes.set_xticks(range(len(across_values)), [str(value) for value in across_values])
    axes.set_yticks(range(len(down_values)), [str(value) for value in down_values])
    axes.set(xlabel=".".join(across), ylabel=".".join(down))
    figure.suptitle(comparison.title, wrap=True)
    figure.colorbar(image, label="accuracy after local training, %")
    return figure
