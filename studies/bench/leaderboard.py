"""Writes the tables of README.md from the stored rows: python studies/bench/leaderboard.py."""

from __future__ import annotations

from pathlib import Path

from copfl.bench import rows, standings

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"


def page(text: str) -> str:
    """The page with the tables of the stored rows."""
    before, _, rest = text.partition(BEGIN)
    stored = rows.stored(rows.suite_of("quick"))
    tables = f"{standings.leaderboard(stored)}\n\n{standings.made_with(stored)}"
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
