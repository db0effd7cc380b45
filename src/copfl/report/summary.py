"""What a person sees when a run ends: a row per client, and the means."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from copfl.experiment import Result

ROWS = 30  # of more clients than this, only the worst are shown


def as_json(result: Result) -> dict[str, Any]:
    """The last look at every client, the means, and where the run is."""
    last = _last(result)
    return {
        "folder": None if result.folder is None else str(result.folder),
        "rounds": len(result.records),
        "seconds": round(sum(result.seconds), 3),
        "mean": {name: _mean(values) for name, values in last.items()},
        "clients": {name: [None if np.isnan(v) else float(v) for v in values] for name, values in last.items()},
    }


def show(result: Result, out: IO[str]) -> None:
    """Writes the table; plain text when `out` is not a terminal."""
    from rich.console import Console
    from rich.table import Table

    e, last = result.experiment, _last(result)
    data, partition = e.federation.dataset, e.federation.partition
    counts = partition.table(data).train
    grid = Table(title=f"{_title(result)}: accuracy on each client's own test samples", title_justify="left")
    for name in ("client", "classes", "train", "test", "global", "before", "after", "weight"):
        grid.add_column(name, justify="left" if name == "classes" else "right")
    worst = np.argsort(np.nan_to_num(last["accuracy"], nan=2.0))[:ROWS] if e.clients > ROWS else range(e.clients)
    for n in sorted(int(i) for i in worst):
        held = [data.classes[c] for c in np.flatnonzero(counts[n])]
        names = ", ".join(held[:6]) + (f", ... ({len(held)})" if len(held) > 6 else "")
        sizes = (str(len(partition.train[n])), str(len(partition.test[n])))
        shown = [_percent(last[k][n]) for k in ("accuracy_global", "accuracy_before", "accuracy")]
        grid.add_row(str(n), names, *sizes, *shown, "" if np.isnan(last["weight"][n]) else f"{last['weight'][n]:.3f}")
    means = [_percent(_mean(last[k])) for k in ("accuracy_global", "accuracy_before", "accuracy")]
    grid.add_section()
    grid.add_row("mean", "", "", "", *means, "")
    console = Console(file=out, highlight=False, width=None if out.isatty() else 100)
    console.print(grid)
    if e.clients > ROWS:
        console.print(f"The {ROWS} clients with the lowest accuracy of {e.clients}; all are in rounds.jsonl.")
    console.print("global: the broadcast alone; before: with the client's own part; after: and trained once more.")
    if data.note:
        console.print(f"Data: {data.note}")
    if result.folder is not None:
        console.print(
            f"{len(result.records)} rounds in {sum(result.seconds):.1f} s. Folder: {result.folder}", soft_wrap=True
        )


def _title(result: Result) -> str:
    tables = result.experiment.tables
    return f"{tables['algorithm'].get('name', 'own algorithm')} on {result.experiment.federation.dataset.name}"


def _last(result: Result) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """The newest value of each figure for each client."""
    newest = {}
    for name in ("accuracy_global", "accuracy_before", "accuracy", "weight"):
        values = result.figure(name)
        latest = np.full(values.shape[1], np.nan)
        for row in values:
            latest = np.where(np.isnan(row), latest, row)
        newest[name] = latest
    return newest


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _percent(value: float | None) -> str:
    return "-" if value is None or np.isnan(value) else f"{100 * value:.1f} %"
