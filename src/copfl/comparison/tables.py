"""The table of a comparison: as text, Markdown, CSV and JSON. Nothing here needs more than numpy."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.comparison.entries import described
from copfl.comparison.results import ACCURACIES
from copfl.comparison.rows import Comparison, Row
from copfl.files import write_bytes
from copfl.stats import LEVEL, Difference, Interval, Spread


class Sheet(NamedTuple):
    """One grid of words, with what stands above and below it."""

    title: str
    head: list[str]
    rows: list[list[str]]
    below: str = ""


def _percent(value: Spread) -> str:
    if math.isnan(value.mean):
        return "-"
    return _with_spread(100 * value.mean, 100 * value.spread, ".1f")


def _bytes(value: Spread) -> str:
    power = max((p for p in (0, 3, 6, 9) if value.mean >= 10**p), default=0)
    return (
        f"{value.mean / 10**power:.3g} {dict(zip((0, 3, 6, 9), ('B', 'kB', 'MB', 'GB'), strict=True))[power]}"
    )


def _seconds(value: Spread) -> str:
    return _with_spread(value.mean, value.spread, ".2f" if value.mean < 10 else ".1f")


def _with_spread(mean: float, spread: float, digits: str) -> str:
    return f"{mean:{digits}}" + ("" if math.isnan(spread) else f" ± {spread:{digits}}")


COLUMNS: dict[str, tuple[str, Callable[[Spread], str]]] = {
    "accuracy": ("after", _percent),
    "accuracy_before": ("before", _percent),
    "accuracy_global": ("global", _percent),
    "worst": ("worst 10 %", _percent),
    "best": ("best round", _percent),
    "bytes_up": ("up", _bytes),
    "bytes_down": ("down", _bytes),
    "seconds": ("s/round", _seconds),
}


def sheets(comparison: Comparison) -> list[Sheet]:
    """All that is shown, grid by grid."""
    parts = [_figures(comparison)]
    if comparison.reference is not None and len(comparison.rows) > 1:
        parts.append(_differences(comparison))
    if any(row.tuned.trials for row in comparison.rows):
        parts.append(_tuning(comparison))
    if len(comparison.over) == 2:
        parts.append(_map(comparison))
    return parts


def _figures(comparison: Comparison) -> Sheet:
    rows = []
    for row in comparison.rows:
        figures = row.figures()
        rows.append([row.label, *(show(figures[name]) for name, (_, show) in COLUMNS.items())])
    spread = " ± standard deviation over seeds" if len(comparison.seeds) > 1 else ""
    return Sheet(
        f"{comparison.title}: accuracy in % on each client's own test samples",
        ["", *(title for title, _ in COLUMNS.values())],
        rows,
        f"Mean{spread}, of each client's last {comparison.last} looks. after: right after local training; before: "
        "right after the broadcast; global: the broadcast alone; worst 10 %: the mean over the worst tenth of the "
        "clients, after; best round: the highest mean over clients, a round chosen on test. up, down: bytes per "
        "client and round.",
    )


def _differences(comparison: Comparison) -> Sheet:
    rows = [
        [row.label, f"{100 * gain.mean:+.1f}", _interval(gain.seeds), _interval(gain.clients), gain.verdict]
        for row in comparison.rows
        for gain in [row.differences.get("accuracy")]
        if gain is not None
    ]
    level = f"{100 * LEVEL:.0f} %"
    alone = (
        " One seed says nothing about the next: nothing is distinguishable."
        if len(comparison.seeds) < 2
        else ""
    )
    return Sheet(
        f"Difference to {comparison.reference}, personal accuracy after local training, in points",
        ["", "difference", f"{level} over seeds", f"{level} over clients", "verdict"],
        rows,
        "Paired: the same client of the same seed under both. The verdict is by the t interval over seeds, row by "
        f"row; the interval over clients takes these seeds as given.{alone}",
    )


def _interval(interval: Interval) -> str:
    if math.isinf(interval.low):
        return "-"
    return f"[{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def _tuning(comparison: Comparison) -> Sheet:
    rows = []
    for row in comparison.rows:
        tried = [f"{_settings(row, t.settings)}: {100 * t.accuracy:.1f}" for t in row.tuned.trials]
        rows.append([row.label, _settings(row, row.tuned.chosen) or "-", ", ".join(tried) or "-"])
    return Sheet(
        "Tuning, on a part of the clients' training samples",
        ["", "chosen", "validation accuracy in %"],
        rows,
        "Test samples had no part in it; what was chosen then trained on all training samples.",
    )


def _settings(row: Row, settings: Any) -> str:
    return described(settings, "optimizer", row.entry.name)


def _map(comparison: Comparison) -> Sheet:
    (down, down_values), (across, across_values) = comparison.over.items()
    show = COLUMNS["accuracy"][1]
    cells = iter(show(row.figures()["accuracy"]) for row in comparison.rows)
    rows = [[f"{value:g}" if isinstance(value, float) else str(value), *(next(cells) for _ in across_values)]
            for value in down_values]  # fmt: skip
    names = ".".join(down), ".".join(across)
    return Sheet(
        f"Personal accuracy after local training, in %: {names[0]} down, {names[1]} across",
        [names[0], *(f"{value:g}" if isinstance(value, float) else str(value) for value in across_values)],
        rows,
    )


def as_text(comparison: Comparison, width: int = 100) -> str:
    """The table as plain text."""
    import textwrap

    parts = []
    for sheet in sheets(comparison):
        grid = [sheet.head, *sheet.rows]
        widths = [max(len(row[i]) for row in grid) for i in range(len(sheet.head))]
        right = [
            i > 0 and all(row[i][:1] in "+-[0123456789" for row in sheet.rows) for i in range(len(sheet.head))
        ]
        sides = [">" if numbers else "<" for numbers in right]
        lines = [
            "  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip()
            for row in grid
        ]
        below = textwrap.wrap(sheet.below, width)
        parts.append("\n".join([sheet.title, "", lines[0], "-" * max(map(len, lines)), *lines[1:], *below]))
    parts += ["\n".join(textwrap.wrap(f"Note: {note}", width)) for note in comparison.notes]
    return "\n\n".join(parts)


def as_markdown(comparison: Comparison) -> str:
    """The table as Markdown."""
    parts = [
        "\n\n".join(filter(None, [f"**{sheet.title}**", as_lines(sheet.head, sheet.rows), sheet.below]))
        for sheet in sheets(comparison)
    ]
    parts += [f"Note: {note}" for note in comparison.notes]
    return "\n\n".join(parts) + "\n"


def as_lines(head: Sequence[str], rows: Sequence[Sequence[str]], text: bool = False) -> str:
    """A grid of words as Markdown; all but the first column are numbers, or `text`."""
    side = "---" if text else "---:"
    plain = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join([_line(head), _line(["---", *[side] * (len(head) - 1)]), *map(_line, plain)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def as_csv(comparison: Comparison) -> str:
    """The table as CSV: a line per row, every number as it is."""
    out = io.StringIO()
    ends = ("mean", "seeds_low", "seeds_high", "clients_low", "clients_high")
    head = ["label", "algorithm", "settings", "chosen", "trials", "seeds"]
    head += [f"{name}_{what}" for name in COLUMNS for what in ("mean", "spread")]
    head += [f"{name}_difference_{end}" for name in ACCURACIES for end in ends] + ["verdict"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in comparison.rows:
        figures, gains = row.figures(), row.differences
        line: list[object] = [
            row.label,
            row.entry.name,
            described(row.entry.settings),
            described(row.tuned.chosen),
        ]
        line += [len(row.tuned.trials), len(comparison.seeds)]
        line += [_cell(number) for name in COLUMNS for number in figures[name]]
        for name in ACCURACIES:
            gain = gains.get(name)
            line += (
                [""] * len(ends)
                if gain is None
                else [_cell(v) for v in (gain.mean, *gain.seeds, *gain.clients)]
            )
        writer.writerow([*line, gains["accuracy"].verdict if gains else ""])
    return out.getvalue()


def _cell(number: float) -> str:
    return repr(number) if math.isfinite(number) else ""


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All that was found, down to every client of every seed; what is not finite is null."""
    return {
        "title": comparison.title,
        "seeds": comparison.seeds,
        "last": comparison.last,
        "reference": comparison.reference,
        "over": {".".join(place): values for place, values in comparison.over.items()},
        "notes": comparison.notes,
        "rows": [_row(row) for row in comparison.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    figures = row.figures()
    return {
        "label": row.label,
        "algorithm": row.entry.name,
        "settings": row.entry.settings,
        "chosen": row.tuned.chosen,
        "trials": [
            {"settings": trial.settings, "validation_accuracy": trial.accuracy} for trial in row.tuned.trials
        ],
        "mean": {name: _plain(figure.mean) for name, figure in figures.items()},
        "spread": {name: _plain(figure.spread) for name, figure in figures.items()},
        "per_seed": {name: [_plain(v) for v in values] for name, values in row.per_seed().items()},
        "per_client": {n: [[_plain(v) for v in run.clients[n]] for run in row.outcomes] for n in ACCURACIES},
        "curves": [{"round": run.rounds.tolist(), "accuracy": run.curve.tolist()} for run in row.outcomes],
        "differences": {name: _gain(gain) for name, gain in row.differences.items()},
    }


def _gain(gain: Difference) -> dict[str, Any]:
    return {
        "mean": gain.mean,
        "over_seeds": [_plain(v) for v in gain.seeds],
        "over_clients": [_plain(v) for v in gain.clients],
        "verdict": gain.verdict,
    }


def _plain(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


FILES: dict[str, Callable[[Comparison], str]] = {
    "table.txt": lambda found: as_text(found) + "\n",
    "table.md": as_markdown,
    "table.csv": as_csv,
    "table.json": lambda found: json.dumps(as_json(found), indent=1, ensure_ascii=False) + "\n",
}


def write(comparison: Comparison, out: Path) -> None:
    """Writes the table in all its forms."""
    for name, text in FILES.items():
        write_bytes(out / name, text(comparison).encode())
