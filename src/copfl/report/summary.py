"""What a person sees when a run ends: a row per client, and the means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from copfl.experiment.progress import span

if TYPE_CHECKING:
    from copfl.experiment.run import Result

ACCURACIES = {"global": "accuracy_global", "before": "accuracy_before", "after": "accuracy"}  # column, figure
ROWS = 30  # of more clients than this, only the worst are shown


def as_json(result: Result) -> dict[str, Any]:
    """The last look at every client, the means, and where the run is."""
    last, malicious = _last(result), _hostile(result)
    return {
        "folder": None if result.folder is None else str(result.folder),
        "rounds": len(result.records),
        "seconds": round(sum(result.seconds), 3),
        "mean": {name: _mean(values) for name, values in last.items()},
        **(
            {"honest": {name: _mean(values[~malicious]) for name, values in last.items()}}
            if malicious.any()
            else {}
        ),
        **({"attackers": [int(n) for n in np.flatnonzero(malicious)]} if malicious.any() else {}),
        **({"spent": spent} if (spent := _spent(result)) else {}),
        "clients": {
            name: [None if np.isnan(v) else float(v) for v in values] for name, values in last.items()
        },
    }


def show(result: Result, out: IO[str]) -> None:
    """Writes the table; plain text when `out` is not a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    e, last, malicious = result.experiment, _last(result), _hostile(result)
    data, partition = e.federation.dataset, e.federation.partition
    console = Console(file=out, highlight=False, width=None if out.isatty() else 100)
    names = _columns(console.width)
    grid = Table(title=f"{e.title}: accuracy in % on each client's own test samples", title_justify="left")
    grid.box, grid.pad_edge = SIMPLE_HEAD, False
    room = max(5, console.width - _taken([name for name in names if name != "classes"]) - 3)
    for name in names:
        wide = name == "classes"
        grid.add_column(
            name, justify="left" if wide else "right", no_wrap=True, max_width=room if wide else None
        )
    counts = partition.label_counts(data)
    worst = (
        np.argsort(np.nan_to_num(last["accuracy"], nan=2.0))[:ROWS] if e.clients > ROWS else range(e.clients)
    )
    for n in sorted(int(i) for i in worst):
        held = [data.classes[c] for c in np.flatnonzero(counts[n])]
        cells = {
            "client": f"{n}{' liar' if malicious[n] else ''}",
            "classes": _some(held, room),
            "train": str(len(partition.train[n])),
            "test": str(len(partition.test[n])),
            "weight": "-" if np.isnan(last["weight"][n]) else f"{last['weight'][n]:.3f}",
            **{name: _percent(last[figure][n]) for name, figure in ACCURACIES.items()},
        }
        grid.add_row(*(cells[name] for name in names))
    grid.add_section()
    means = {name: _percent(_mean(last[figure])) for name, figure in ACCURACIES.items()} | {"client": "mean"}
    grid.add_row(*(means.get(name, "") for name in names))
    if malicious.any():
        honest = {name: _percent(_mean(last[figure][~malicious])) for name, figure in ACCURACIES.items()}
        grid.add_row(*((honest | {"client": "honest"}).get(name, "") for name in names))
    console.print(grid)
    if e.clients > ROWS:
        console.print(f"The {ROWS} clients with the lowest accuracy of {e.clients}; all are in rounds.jsonl.")
    console.print(
        "global: the broadcast alone; before: with the client's own part; after: and trained once more."
    )
    if spent := _spent(result):
        delta = e.tables.get("privacy", {}).get("delta")
        console.print(
            f"Privacy spent at delta {delta:g}: epsilon {spent['epsilon']:.1f} against those who see the broadcasts, "
            f"{spent['epsilon_server']:.1f} against a server that sees each upload."
        )
    for note in filter(None, (data.note, *partition.notes)):
        console.print(f"Data: {note}.")
    where = "" if result.folder is None else f" Folder: {result.folder}"
    console.print(f"{len(result.records)} rounds in {span(sum(result.seconds))}.{where}", soft_wrap=True)


def _columns(width: int) -> list[str]:
    """The columns that a terminal of this width has room for; numbers are never cut."""
    names = ["client", "classes", "train", "test", "global", "before", "after", "weight"]
    for name in ("test", "classes", "train", "before", "global", "weight"):
        if _taken(names) <= width:
            break
        names.remove(name)
    return names


def _taken(names: Sequence[str]) -> int:
    """How many characters columns of numbers take; a client may be called "12 liar"."""
    return sum(max(len(name), 7 if name == "client" else 5) + 3 for name in names) + 2


def _some(names: Sequence[str], room: int) -> str:
    """As many of the names as there is room for, six at most, and how many there are if that is not all."""
    for count in range(min(len(names), 6), 0, -1):
        text = ", ".join(names[:count]) + ("" if count == len(names) else f", ... ({len(names)})")
        if len(text) <= room:
            return text
    return names[0] if len(names) == 1 else str(len(names))


def _last(result: Result) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """The newest value of each figure for each client."""
    newest = {}
    for name in (*ACCURACIES.values(), "weight"):
        values = result.metric(name)
        latest = np.full(values.shape[1], np.nan)
        for row in values:
            latest = np.where(np.isnan(row), latest, row)
        newest[name] = latest
    return newest


def _hostile(result: Result) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which clients the simulation made lie."""
    return np.asarray(np.nan_to_num(result.metric("malicious")).any(0))


def _spent(result: Result) -> dict[str, float]:
    """The epsilons after the last round; none without [privacy]."""
    last = result.records[-1]["federation"] if result.records else {}
    return {name: value for name, value in last.items() if name in ("epsilon", "epsilon_server")}


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _percent(value: float | None) -> str:
    return "-" if value is None or np.isnan(value) else f"{100 * value:.1f}"
