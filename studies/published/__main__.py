"""python -m studies.published NAME [--seeds N] [--data-dir FOLDER]: a published table, and what copfl gives for it.

Prints published beside ours, and exits with 1 if a published number is outside the range. Without a name it lists the
tables.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from studies.published.table import Table, as_text, run_table

TABLES = ("flamby_heart", "flamby_tcga")


def table_of(name: str) -> Table:
    table: Table = importlib.import_module(f"studies.published.{name}").TABLE
    return table


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m studies.published", description=__doc__)
    parser.add_argument("name", nargs="?", choices=TABLES)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--data-dir", type=Path)
    chosen = parser.parse_args(words)
    if chosen.name is None:
        print("\n".join(f"{name}: {table_of(name).title}" for name in TABLES))
        return 0
    table = table_of(chosen.name)
    outcomes = run_table(table, chosen.seeds, chosen.data_dir, lambda line: print(line, file=sys.stderr))
    print(f"{table.title}\nSource: {table.source}.\n")
    print(as_text(outcomes))
    print(
        f"\nRange: where 95 % of means of {table.seeds} seeds would be, from {chosen.seeds} seeds of copfl."
    )
    print(f"Between the two differ {table.tolerance}.\nNot said: {table.unsaid}.")
    return 0 if all(one.agrees for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
