"""A comparison as files: text, Markdown, CSV and JSON.

`compare` and `sweep` call `write` at their end. The report reads the table.json.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from copfl import tables
from copfl.comparison.jobs.job import accuracies
from copfl.comparison.results.tables import (
    Comparison,
    ComparisonRow,
    as_markdown,
    as_text,
    columns,
    convergence,
    gaining,
    new_client_differences,
    partitions,
)
from copfl.comparison.rivals import as_json as rivals_as_json
from copfl.comparison.rows.entries import described
from copfl.experiment.models import new_clients
from copfl.files import write_bytes
from copfl.tables import Table, plain

# Of a difference, in table.csv.
ENDS = ("mean", "both_low", "both_high", "seeds_low", "seeds_high", "clients_low", "clients_high")


def as_csv(comparison: Comparison) -> str:
    """The comparison as CSV: a line per row, every number in full."""
    lines = [_line(row, comparison) for row in comparison.rows]
    return tables.as_csv(Table("", list(lines[0]), [list(line.values()) for line in lines]))


def _line(row: ComparisonRow, comparison: Comparison) -> dict[str, str]:
    """The cells of a row by column."""
    metrics, gains, new = row.metrics(), row.differences, new_client_differences(row)
    primary, shares = comparison.metric.name, gaining(comparison)
    cells = {"label": row.label, "algorithm": row.entry.name}
    cells |= {to: str(row.optimizer.get(key, "")) for to, key in (("optimizer", "name"), ("lr", "lr"))}
    cells |= {"settings": described(row.entry.settings), "chosen": described(row.tuned.chosen)}
    cells |= {"trials": str(len(row.tuned.trials)), "seeds": str(len(comparison.seeds))}
    for name in columns(comparison):
        cells |= {f"{name}_{what}": _cell(value) for what, value in metrics[name]._asdict().items()}
    for name in accuracies("all", primary):
        gain = gains.get(name)
        values = (
            (math.nan,) * len(ENDS) if gain is None else (gain.mean, *gain.both, *gain.seeds, *gain.clients)
        )
        cells |= {f"{name}_difference_{end}": _cell(v) for end, v in zip(ENDS, values, strict=True)}
    cells["p"] = _cell(gains[primary].p) if gains else ""
    cells["verdict"] = gains[primary].verdict if gains else ""
    cells["share_that_gains"] = _cell(float(np.mean(shares.get(row.label, [math.nan]))))
    for name in new_clients.SAMPLES:
        numbers = (*new[name][0], new[name][1].mean) if new else (math.nan,) * 3
        whats = zip(("mean", "spread", "difference"), numbers, strict=True)
        cells |= {f"new_{name}_{what}": _cell(value) for what, value in whats}
    return cells


def _cell(number: float) -> str:
    return repr(number) if math.isfinite(number) else ""


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Every number, down to every client of every seed; what is not finite is null."""
    common, converged = convergence(comparison)
    return {
        "title": comparison.title,
        "metrics": [metric.as_json() for metric in comparison.rows[0].outcomes[0].metrics],
        "seeds": comparison.seeds,
        "averaged": comparison.averaged,
        "reference": comparison.reference,
        "over": {".".join(path): values for path, values in comparison.over.items()},
        "partition": partitions(comparison),
        "notes": comparison.notes,
        "client_names": [list(run.names) for run in comparison.rows[0].outcomes],  # of each seed
        "share_that_gains": gaining(comparison),
        "common_value": common,
        "rows": [plain({**_row(row), **converged[row.label]._asdict()}) for row in comparison.rows],
        "rivals": None
        if comparison.rivals is None
        else plain(rivals_as_json(comparison.rivals, {row.label: row.outcomes for row in comparison.rows})),
    }


def _row(row: ComparisonRow) -> dict[str, Any]:
    metrics, primary = row.metrics(), row.metric.name
    return {
        "label": row.label,
        "algorithm": row.entry.name,
        "optimizer": row.optimizer,
        "settings": row.entry.settings,
        "chosen": row.tuned.chosen,
        "trials": [
            {"settings": t.settings, f"validation_{primary}": t.accuracy}
            | ({"fraction_of_rounds": t.fraction} if row.tuned.space else {})
            for t in row.tuned.trials
        ],
        "mean": {name: metric.mean for name, metric in metrics.items()},
        "spread": {name: metric.spread for name, metric in metrics.items()},
        "per_seed": row.per_seed(),
        "per_client": {name: [run.clients[name] for run in row.outcomes] for name in row.outcomes[0].clients},
        "new_clients": [run.new and run.new._asdict() for run in row.outcomes],
        "curves": [{"round": run.rounds, primary: run.curves[primary]} for run in row.outcomes],
        "differences": {name: gain.as_json() for name, gain in row.differences.items()},
    }


FILES: dict[str, Callable[[Comparison], str]] = {
    "table.txt": lambda found: as_text(found) + "\n",
    "table.md": as_markdown,
    "table.csv": as_csv,
    "table.json": lambda found: json.dumps(as_json(found), indent=1, ensure_ascii=False) + "\n",
}


def write(comparison: Comparison, out: Path) -> None:
    """Writes the comparison in all its forms.

    Args:
        comparison: What is written.
        out: The folder.
    """
    for name, text in FILES.items():
        write_bytes(out / name, text(comparison).encode())
