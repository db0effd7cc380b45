"""Trains what is not in the records yet, and writes the page of them.

    python -m studies.tables [--data-dir FOLDER] [--splits 10] [--processes 2] [--page]

FOLDER has the folder `natural` with the published files; by default COPFL_DATA.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import os
from functools import partial
from pathlib import Path

from studies.parallel import run_jobs
from studies.tables.federations import FEDERATIONS
from studies.tables.page import page_of
from studies.tables.study import METHODS, Job, record

HERE = Path(__file__).parent
RECORDS, PAGE = HERE / "records.jsonl.gz", HERE / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("COPFL_DATA"))
    parser.add_argument("--federations", default=",".join(FEDERATIONS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first split")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no run is started")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", action="store_true", help="only the page, of the records")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    lines = options.records.with_suffix("")  # without .gz
    if not options.page:
        if options.records.is_file() and not lines.is_file():
            lines.write_bytes(gzip.decompress(options.records.read_bytes()))
        splits = range(options.first, options.first + options.splits)
        jobs = [
            Job(federation, split, method)
            for split, federation, method in itertools.product(
                splits, options.federations.split(","), options.methods
            )
        ]
        run_jobs(jobs, partial(record, folder=options.data_dir), lines, options.processes, options.budget)
        options.records.write_bytes(gzip.compress(lines.read_bytes(), mtime=0))
    options.out.write_text(page_of(options.records), encoding="utf-8")


if __name__ == "__main__":
    main()
