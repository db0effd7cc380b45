"""Writes the tables of README.md from the stored rows: python studies/bench/leaderboard.py."""

from __future__ import annotations

from pathlib import Path

from copfl.bench import rows, standings
from copfl.bench.protocol import SUITES

PAGE = Path(__file__).with_name("README.md")


def page(text: str) -> str:
    """The page with the tables of the stored rows of every suite."""
    for suite in SUITES.values():
        begin, end = f"<!-- {suite.name} rows: begin -->", f"<!-- {suite.name} rows: end -->"
        before, _, rest = text.partition(begin)
        stored = rows.stored(suite)
        tables = "\n\n".join(filter(None, [standings.leaderboard(stored), standings.made_with(stored)]))
        text = f"{before}{begin}\n{tables}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
