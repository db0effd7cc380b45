"""Writes the tables of README.md from the stored rows: python studies/bench/leaderboard.py."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from copfl.bench import rows, standings
from copfl.bench.protocol import SUITES
from copfl.bench.rows import BenchRow
from copfl.tables import Table, as_markdown

PAGE = Path(__file__).with_name("README.md")
OTHER_DEVICE = Path(__file__).with_name("h200.jsonl.gz")  # rows whose stored ones were made on a CPU


class Change(NamedTuple):
    """One federation of a row that was made on two devices."""

    points: float
    same_choice: bool  # of the server's step and the rate


def page(text: str) -> str:
    """The page with the tables of the stored rows of every suite, and of rows that were made on two devices."""
    stored = {name: rows.stored(suite) for name, suite in SUITES.items()}
    for name, found in stored.items():
        tables = [standings.leaderboard(found), standings.made_with(found)]
        text = between(text, f"{name} rows", "\n\n".join(filter(None, tables)))
    lines = gzip.decompress(OTHER_DEVICE.read_bytes()).decode().splitlines()
    again = [rows.row_of(json.loads(line), OTHER_DEVICE) for line in lines]
    return between(text, "devices", two_devices(stored["quick"], again))


def between(text: str, name: str, content: str) -> str:
    """The text with other content between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def changes(first: BenchRow, second: BenchRow) -> list[Change]:
    """Of every federation, from the first row to the second."""
    result = []
    for setting in SUITES[first.suite].settings:
        jobs = [row.of(setting)[0].job for row in (first, second)]
        same = len({(job.server, job.lr) for job in jobs}) == 1
        result.append(Change(100 * (second.value(setting) - first.value(setting)), same))
    return result


def two_devices(stored: Sequence[BenchRow], again: Sequence[BenchRow]) -> str:
    """How a row changes from the device of the stored one to another."""
    by_name = {row.algorithm: row for row in stored}
    found = {row.algorithm: changes(by_name[row.algorithm], row) for row in again}
    lines = [
        (
            f"`{name}`",
            f"{np.mean([change.points for change in of_row]):+.2f}",
            f"{max((change.points for change in of_row), key=abs):+.1f}",
            f"{sum(not change.same_choice for change in of_row)} of {len(of_row)}",
        )
        for name, of_row in found.items()
    ]
    table = Table("", ("", "mean change", "largest", "another step or rate"), lines)
    every = [change for of_row in found.values() for change in of_row]
    same, other = (
        [abs(change.points) for change in every if change.same_choice == kept] for kept in (True, False)
    )
    text = (
        f"Where both devices chose the same step and rate ({len(same)} of {len(every)} federations), the accuracy "
        f"changes by {np.mean(same):.1f} points on average and by at most {max(same):.1f}; elsewhere by "
        f"{np.mean(other):.1f} and at most {max(other):.1f}."
    )
    return f"{as_markdown(table)}\n\n{text}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
