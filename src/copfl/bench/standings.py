"""Where rows stand: regret, rank, clients above training alone, and cost; as text and as Markdown.

`copfl bench` prints them, and the page of studies/bench has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from copfl import stats
from copfl.bench.protocol import SUITES
from copfl.bench.rows import BenchRow, code_hash, differing
from copfl.tables import NONE, Table, as_markdown, as_text, number, percent, seconds, size

ALONE = "local"
BESIDE = (ALONE, "fedavg_ft")  # shown beside a new row: training alone, and fine-tuning the global model


class Standing(NamedTuple):
    """A row among others; means over settings."""

    row: BenchRow
    regret: float  # points below the best row of each setting
    rank: float  # 1: the best
    ranks: stats.Interval  # of the mean rank, over the settings
    above_alone: float  # share of the clients; nan without a row of training alone
    bytes: float  # of a client in a round
    seconds: float  # of a run; on a GPU other runs beside it count too, so tables have none


def standings(rows: Sequence[BenchRow]) -> list[Standing]:
    """The rows of one suite, the lowest mean regret first."""
    names = SUITES[rows[0].suite].settings
    values = np.array([[row.value(name) for name in names] for row in rows])  # [rows, settings]
    regrets = 100 * (values.max(0) - values).mean(1)
    ranks = stats.ranked(-values.T).T
    alone = next((row for row in rows if row.algorithm == ALONE), None)
    unsorted = [
        Standing(
            row,
            float(regret),
            float(rank.mean()),
            stats.over_seeds(rank),
            math.nan if alone is None or row is alone else above(row, alone),
            float(np.mean([run.bytes for run in row.runs])),
            float(np.mean([run.seconds for run in row.runs])),
        )
        for row, regret, rank in zip(rows, regrets, ranks, strict=True)
    ]
    return sorted(unsorted, key=lambda standing: standing.regret)


def above(row: BenchRow, alone: BenchRow) -> float:
    """The share of clients that are better than trained alone, the mean over settings and seeds.

    Args:
        row: The row.
        alone: The row of training alone.
    """
    shares = []
    for run, other in zip(row.runs, alone.runs, strict=True):
        pairs = zip(run.accuracy, other.accuracy, strict=True)
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        shares.append(np.mean([a > b for a, b in known]))
    return float(np.mean(shares))


def standing_table(sorted_rows: Sequence[Standing], title: str = "") -> Table:
    """A line for each row.

    Args:
        sorted_rows: The rows, the best first.
        title: Of the table.
    """
    head = ("", "mean regret", "mean rank", "95 %", "above alone %", "bytes", "seconds")
    most = len(sorted_rows)
    lines = [
        (
            standing.row.algorithm,
            number(standing.regret, ".2f"),
            number(standing.rank),
            f"{max(1, standing.ranks.low):.1f} to {min(most, standing.ranks.high):.1f}",
            percent(standing.above_alone, ".0f"),
            size(standing.bytes) if standing.bytes else NONE,
            seconds(standing.seconds) if standing.row.environment.get("device") == "cpu" else NONE,
        )
        for standing in sorted_rows
    ]
    return Table(title, head, lines)


def settings_table(sorted_rows: Sequence[Standing]) -> Table:
    """The accuracy of each row in each setting; what there is more of has the lines."""
    settings = SUITES[sorted_rows[0].row.suite].settings
    algorithms = [f"`{standing.row.algorithm}`" for standing in sorted_rows]
    cells = [[percent(standing.row.value(name)) for name in settings] for standing in sorted_rows]
    if len(settings) > len(sorted_rows):
        columns = zip(*cells, strict=True)
        return Table(
            "", ("", *algorithms), [(name, *line) for name, line in zip(settings, columns, strict=True)]
        )
    return Table("", ("", *settings), [(name, *line) for name, line in zip(algorithms, cells, strict=True)])


def comparison(row: BenchRow, others: Sequence[BenchRow]) -> str:
    """A new row beside the stored ones, for the terminal.

    Args:
        row: The new row.
        others: The stored rows of the same suite.
    """
    sorted_rows = standings([*others, row])
    names = SUITES[row.suite].settings
    shown = [other for other in others if other.algorithm in BESIDE and other.algorithm != row.algorithm]
    lines = []
    for name in names:
        chosen = row.of(name)[0].job
        best = max(others, key=lambda other: other.value(name), default=None)
        cells = [percent(row.value(name)), *(percent(other.value(name)) for other in shown)]
        if best is not None:
            cells += [percent(best.value(name)), best.algorithm]
        lines.append((name, *cells, f"{chosen.server} {chosen.lr:g}"))
    head = ["", row.algorithm, *(other.algorithm for other in shown)]
    head += ["best", "of"] if others else []
    per_setting = Table("", (*head, "server, rate"), lines)
    rank = [standing.row is row for standing in sorted_rows].index(True) + 1
    suite = f"suite {row.suite}, version {row.version}"
    title = f"{row.algorithm}: place {rank} of {len(sorted_rows)} by mean regret; {suite}"
    paragraphs = [as_text(standing_table(sorted_rows, title)), as_text(per_setting)]
    other_machines = {differing(other.environment, row.environment) for other in others} - {""}
    if not others:
        paragraphs.append(f"copfl has no rows of the suite {row.suite} to compare with.")
    if other_machines:
        paragraphs.append(
            f"Stored and new rows differ in: {' | '.join(sorted(other_machines))}. Rounding may differ."
        )
    if changed := [other.algorithm for other in others if code_hash(other.algorithm) != other.code]:
        paragraphs.append(f"The code of these has changed since their rows were made: {', '.join(changed)}.")
    if row.refused:
        refused = "; ".join(f"{server} ({reason})" for server, reason in row.refused.items())
        paragraphs.append(f"Not tried: {refused}")
    return "\n\n".join(paragraphs)


def leaderboard(rows: Sequence[BenchRow]) -> str:
    """The tables of studies/bench/README.md, as Markdown."""
    if not rows:
        return "No rows are stored yet."
    sorted_rows = standings(rows)
    head = standing_table(sorted_rows)
    named = head._replace(rows=[(f"`{line[0]}`", *line[1:]) for line in head.rows])
    return "\n\n".join([as_markdown(named), as_markdown(settings_table(sorted_rows))])


def made_with(rows: Sequence[BenchRow]) -> str:
    """A sentence on the versions and hardware of the rows."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        text = ", ".join(f"{key} {value}" for key, value in row.environment.items())
        kinds.setdefault(text, []).append(row.algorithm)
    if not kinds:
        return ""
    if len(kinds) == 1:
        return f"All rows were made with {next(iter(kinds))}."
    machines = [f"{', '.join(names)}: {text}" for text, names in kinds.items()]
    return f"The rows were made with: {'; '.join(machines)}."
