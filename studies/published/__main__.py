"""python -m studies.published NAME [--seeds N] [--data-dir FOLDER] [--row ROW] [--rounds N] [--device cuda].

Prints published beside what copfl gives for it, and exits with 1 if a published number is outside the range. With
other data or rounds than the published ones no number is inside or outside. Without a name it lists the tables.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from studies.published.table import Table, as_text, run_table

TABLES = {  # by name, the module and its table
    "flamby_heart": ("flamby_heart", "TABLE"),
    "flamby_tcga": ("flamby_tcga", "TABLE"),
    "fedrep_cifar_2": ("fedrep_cifar", "TWO"),
    "fedrep_cifar_5": ("fedrep_cifar", "FIVE"),
    "knnper_cifar": ("knnper_cifar", "TABLE"),
    "fedem_cifar": ("fedem_cifar", "TABLE"),
}


def table_of(name: str) -> Table:
    module, attribute = TABLES[name]
    table: Table = getattr(importlib.import_module(f"studies.published.{module}"), attribute)
    return table


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m studies.published", description=__doc__)
    parser.add_argument("name", nargs="?", choices=TABLES)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--data-dir", type=Path, help="the folder of the data, such as one with cifar-10-batches-py"
    )
    parser.add_argument("--row", help="one row alone, by its name")
    parser.add_argument("--rounds", type=int, help="fewer than published, to try a definition")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    chosen = parser.parse_args(words)
    if chosen.name is None:
        print("\n".join(f"{name}: {table_of(name).title}" for name in TABLES))
        return 0
    table = table_of(chosen.name)
    if chosen.row is not None:
        if not (rows := tuple(row for row in table.rows if row.name == chosen.row)):
            parser.error(
                f"{chosen.name} has no row {chosen.row!r}; it has {', '.join(row.name for row in table.rows)}"
            )
        table = table._replace(rows=rows)
    outcomes = run_table(
        table,
        chosen.seeds,
        chosen.data_dir,
        lambda line: print(line, file=sys.stderr),
        chosen.rounds,
        chosen.device,
    )
    print(f"{table.title}\nSource: {table.source}.\n")
    differs = [f"{chosen.rounds} rounds"] if chosen.rounds else []
    differs += sorted({one.changed for one in outcomes} - {""})
    if differs:
        print(
            "\n".join(
                f"{one.row.name}: {one.values.mean():.3f}, published {one.row.published:.3f}"
                for one in outcomes
            )
        )
        print(f"\nNot the published experiment, so no number is inside or outside: {'; '.join(differs)}.")
        return 0
    print(as_text(outcomes))
    print(
        f"\nRange: where 95 % of means of {table.seeds} seeds would be, from {chosen.seeds} seeds of copfl."
    )
    print(f"Between the two differ {table.tolerance}.\nNot said: {table.unsaid}.")
    return 0 if all(one.agrees for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
