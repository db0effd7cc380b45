"""Divides, trains and judges what is not in the records yet, and writes the page.

    python -m studies.verdict [--data-dir FOLDER] [--processes 2] [--page]

FOLDER has the folders `natural` and `natural2`; by default COPFL_DATA. With --rates it prints the simulations.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from copfl.stats import Interval
from studies.parallel import run_jobs
from studies.verdict.folds import page_of_folds
from studies.verdict.losses import NAMES
from studies.verdict.rates import page_of_rates
from studies.verdict.study import NORMAL, Division, Job, record

HERE = Path(__file__).parent
RECORDS, PAGE, INTRODUCTION = HERE / "records.jsonl.gz", HERE / "README.md", HERE / "introduction.md"
SPLITS = 20


def page_of(records: Path) -> str:
    """The introduction and the tables.

    Args:
        records: A line of JSON each.
    """
    lines = [json.loads(line) for line in gzip.decompress(records.read_bytes()).decode().splitlines()]
    head = [
        "",
        "sites",
        "rows",
        "gain of the other half",
        "gain said",
        "fresh",
        "expected",
        "not carried on",
        "chosen once",
        "fifth, sites",
        "fifth, rows",
        "says",
        "fifth, sites",
        "fifth, rows",
        "width",
        "fifth, sites",
        "named",
        "other sign",
    ]
    rows = []
    every: list[list[Division]] = [[], []]
    for name in NAMES:
        own = sorted((line for line in lines if line["federation"] == name), key=lambda line: line["split"])
        if not own:
            continue
        found = [_division(line["carried"]) for line in own]
        by_folds = [_division(line["folds"]) for line in own]
        every[0] += found
        every[1] += by_folds
        rows.append([name, str(own[0]["sites"]), f"{own[0]['median']:.0f}", *_cells(found, by_folds)])
    rows.append(["all", "", "", *_cells(every[0], every[1], numbers=False)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows))
    return INTRODUCTION.read_text("utf-8") + "\n" + table + "\n"


def _division(content: dict[str, Any]) -> Division:
    names = ("interval", "fresh", "once", "tested", "paired")
    return Division(**{**content, **{name: Interval(*content[name]) for name in names}})


def _cells(found: list[Division], by_folds: list[Division], numbers: bool = True) -> list[str]:
    def rate(values: Any) -> str:
        return f"{100 * np.mean(list(values)):.0f}"

    def covers(name: str, divisions: list[Division]) -> str:
        ends = [(getattr(d, name), d.truth) for d in divisions]
        return rate(interval.low <= truth <= interval.high for interval, truth in ends)

    def width(name: str) -> str:
        return f"{np.mean([2 * getattr(d, name).half for d in found]):.3f}" if numbers else ""

    up_to = [abs(d.gain - d.truth) <= np.hypot(d.interval.half, NORMAL * d.truth_error) for d in found]
    return [
        *(f"{np.mean([getattr(d, n) for d in found]):.3f}" if numbers else "" for n in ("truth", "gain")),
        covers("fresh", found),
        rate(up_to),
        covers("fresh", by_folds),
        *(covers(name, found) for name in ("once", "tested", "paired")),
        *(rate(getattr(d, name).low > 0 for d in found) for name in ("interval", "tested", "paired")),
        width("interval"),
        width("tested"),
        str(sum(d.called for d in found)),
        f"{sum(d.contradicted for d in found)}, {sum(d.refuted for d in found)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("COPFL_DATA"))
    parser.add_argument("--federations", default=",".join(NAMES))
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="only the page, of the records")
    parser.add_argument("--rates", action="store_true", help="print the simulations")
    options = parser.parse_args()
    if options.rates:
        print(page_of_folds(), page_of_rates(), sep="\n\n")
        return
    lines = RECORDS.with_suffix("")
    if not options.page:
        if RECORDS.is_file() and not lines.is_file():
            lines.write_bytes(gzip.decompress(RECORDS.read_bytes()))
        jobs = [Job(*job) for job in itertools.product(options.federations.split(","), range(options.splits))]
        folder = None if options.data_dir is None else Path(options.data_dir)
        run_jobs(jobs, partial(record, folder=folder), lines, options.processes)
        RECORDS.write_bytes(gzip.compress(lines.read_bytes(), mtime=0))
    PAGE.write_text(page_of(RECORDS), encoding="utf-8")


if __name__ == "__main__":
    main()
