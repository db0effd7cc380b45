"""Makes the stored rows of `copfl bench`: python studies/bench/rows.py OUT --jobs 16.

Every run is a line of OUT/runs.jsonl as it ends, so the same command goes on where it was stopped, or adds what is
missing. When all rows are there, the file src/copfl/bench/SUITE.jsonl.gz is replaced.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from copfl.algorithms import ALGORITHMS
from copfl.bench import rows
from copfl.bench.bench import bench
from copfl.bench.protocol import Machine, tuning_jobs
from copfl.errors import UsageError

PACKAGE = Path(__file__).parents[2] / "src/copfl/bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--files", type=Path, help="folder that studies/defaults/prepare.py wrote")
    args = parser.parse_args()
    suite, machine, names = rows.suite_of(args.suite), Machine(args.device, args.files), []
    for name in args.algorithms.split(","):
        try:
            tuning_jobs(name, suite, machine)
            names.append(name)
        except UsageError as error:
            print(f"left out: {error}", flush=True)
    made = bench(names, suite, args.out, machine, jobs=args.jobs, log=lambda line: print(line, flush=True))
    rows.store(made, PACKAGE / f"{suite.name}.jsonl.gz")


if __name__ == "__main__":
    main()
