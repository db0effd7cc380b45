"""Makes the stored rows of `copfl bench`: python studies/bench/rows.py OUT --jobs 16.

Every run is a line of OUT/runs.jsonl as it ends, so the same command goes on where it was stopped, or adds what is
missing. Algorithms are trained in groups; after each, src/copfl/bench/SUITE.jsonl.gz has their rows instead of the
former ones of these algorithms. With --alias, FedAvg is also trained under another name, and its two rows must be
equal to the bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from copfl.algorithms import ALGORITHMS
from copfl.bench import rows
from copfl.bench.bench import bench
from copfl.bench.protocol import BenchMachine, tuning_jobs
from copfl.errors import UsageError

PACKAGE = Path(__file__).parents[2] / "src/copfl/bench"
FIRST = ("local", "fedavg", "fedavg_ft", "fedper", "fedpac", "fedrod", "ditto", "copfl", "fedrep", "fedprox")
GROUP = 7  # algorithms whose runs are in one queue
ALIAS = "copfl.algorithms.fedavg:FedAvg"  # FedAvg by another name: its row must be the same to the bit


def replaced(stored: Sequence[rows.BenchRow], new: Sequence[rows.BenchRow]) -> list[rows.BenchRow]:
    """The stored rows, the new ones in the place of those of the same algorithm, or at the end."""
    return list({row.algorithm: row for row in (*stored, *new)}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--algorithms", default=",".join(dict.fromkeys((*FIRST, *ALGORITHMS))))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--alias", action="store_true", help="also train FedAvg under another name")
    parser.add_argument("--files", type=Path, help="folder that studies/defaults/prepare.py wrote")
    args = parser.parse_args()
    suite, machine, names = rows.suite_of(args.suite), BenchMachine(args.device, args.files), []
    for name in args.algorithms.split(","):
        try:
            tuning_jobs(name, suite, machine)
            names.append(name)
        except UsageError as error:
            print(f"left out: {error}", flush=True)
    made: list[rows.BenchRow] = []
    names[GROUP - 1 : GROUP - 1] = [ALIAS] * args.alias
    for start in range(0, len(names), GROUP):
        group = names[start : start + GROUP]
        made += bench(
            group, suite, args.out, machine, jobs=args.jobs, log=lambda line: print(line, flush=True)
        )
        new = [row for row in made if row.algorithm != ALIAS]
        rows.store(replaced(rows.stored(suite), new), PACKAGE / f"{suite.name}.jsonl.gz")
    if args.alias:
        hashes = {rows.row_hash(row) for row in made if row.algorithm in ("fedavg", ALIAS)}
        assert len(hashes) == 1, "FedAvg under another name has another row"
        print("FedAvg under another name has the same row to the bit")


if __name__ == "__main__":
    main()
