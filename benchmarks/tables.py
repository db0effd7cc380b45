"""What a run on a table costs, over its sites and rows: `python benchmarks/tables.py [--sites 10,50] [--rows 100,1000]`

Each row is one command, `copfl run -a levels` on a file of ten columns and two classes, from its start to its end. Its
seconds of one processor, which other programs on the machine change little, and those of the clock; then the seconds of
a processor without what each site has alone (--no-rivals).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from copfl.tables import Table, as_markdown

COLUMNS = 10


class Cost(NamedTuple):
    processor: float  # seconds
    clock: float


def table_of(path: Path, sites: int, rows: int) -> None:
    """Writes a table: a class that depends on the columns and on the site."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sites * rows, COLUMNS))
    site = np.repeat(np.arange(sites), rows)
    odds = x @ rng.normal(size=COLUMNS) + rng.normal(size=sites)[site]
    y = np.where(rng.random(len(x)) < 1 / (1 + np.exp(-odds)), "yes", "no")
    with path.open("w") as file:
        file.write(",".join([*(f"x{n}" for n in range(COLUMNS)), "site", "y"]) + "\n")
        for numbers, name, answer in zip(x, site, y, strict=True):
            file.write(",".join([*(f"{number:.4f}" for number in numbers), f"site{name}", answer]) + "\n")


def cost_of(*words: str) -> Cost:
    """What a command of copfl costs with one thread."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "copfl", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"copfl {' '.join(words)} ended with {process.returncode}")
    return Cost(used.ru_utime + used.ru_stime, time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", default="10,50")
    parser.add_argument("--rows", default="100,1000")
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for sites in map(int, options.sites.split(",")):
            for rows in map(int, options.rows.split(",")):
                file = Path(name) / f"{sites}-{rows}.csv"
                table_of(file, sites, rows)
                run = ["run", "-a", "levels", "-d", str(file), "--target", "y", "--client", "site", "--out"]
                whole = cost_of(*run, f"{file}.out")
                without = cost_of(*run, f"{file}.without", "--no-rivals")
                numbers = (whole.processor, whole.clock, without.processor)
                lines.append([f"{sites}", f"{rows:,}", *(f"{number:.1f}" for number in numbers)])
    head = ["sites", "rows of a site", "processor, s", "clock, s", "processor without rivals, s"]
    print(as_markdown(Table("copfl run -a levels", head, lines)))


if __name__ == "__main__":
    main()
