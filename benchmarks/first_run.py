"""The first run on a table, with what each client has alone in a process beside it, and without:
`python benchmarks/first_run.py [--repeat N] [--out FILE] [-- OPTION ...]`

`copfl run -d heart` chooses by cross-validation among methods and what each client has alone. Seconds from the
command to its end, on two processors, in turn. Both have the same bits, which is checked. OPTION: of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = {"one process": "--workers=1", "beside": "--workers=0"}


def seconds(out: Path, options: list[str]) -> float:
    """Of one run, which writes the folder `out`."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "copfl", "run", *options, f"--out={out}"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("first_run.json"))
    parser.add_argument("options", nargs="*", default=["--dataset=heart"])
    arguments = parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, processors)  # and so of the runs
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(arguments.repeat):
            for way, option in WAYS.items():
                found[way].append(seconds(Path(folder) / f"{way} {n}", [*arguments.options, option]))
        for name in ("choice.json", "rounds.jsonl"):
            contents = {path.read_bytes() for path in Path(folder).glob(f"*/{name}")}
            if len(contents) > 1:
                raise SystemExit(f"the runs differ in {name}")
    medians = {way: statistics.median(values) for way, values in found.items()}
    for way, median in medians.items():
        print(f"{way:12} {median:6.1f} s, of {', '.join(f'{value:.1f}' for value in found[way])}")
    ratio = medians["one process"] / medians["beside"]
    print(f"ratio {ratio:.2f}, on {len(processors)} processors")
    record = {"options": arguments.options, "processors": len(processors), "seconds": found, "ratio": ratio}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
