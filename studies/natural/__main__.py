"""Trains each method on each split of each federation, and writes a line of records.jsonl for each.

    python -m studies.natural FOLDER [--splits 0 1 2] [--methods default] [--device cuda] [--out records.jsonl]

FOLDER has the folder `natural2` with the files that federations.py names.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from copfl.tables import plain
from studies.natural.federations import FEDERATIONS
from studies.natural.study import METHODS, POOLED, record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--federations", nargs="*", default=list(FEDERATIONS), choices=FEDERATIONS)
    parser.add_argument("--methods", nargs="*", default=[*METHODS, POOLED], choices=[*METHODS, POOLED])
    parser.add_argument("--splits", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records.jsonl")
    options = parser.parse_args()
    jobs = [
        (name, split, method, options.folder, options.device)
        for method in options.methods
        for name in options.federations
        for split in options.splits
    ]
    with (
        options.out.open("a") as file,
        ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool,
    ):
        for line in pool.map(record, jobs):
            file.write(json.dumps(plain(line)) + "\n")
            file.flush()
            print(json.dumps(plain(line)), flush=True)


if __name__ == "__main__":
    main()
