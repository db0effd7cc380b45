"""Short runs on one GPU, one after another and several at a time: `python benchmarks/jobs.py [-- OPTION ...]`

Ten algorithms with four seeds, as `copfl compare` trains them: `--jobs 1`, and as many at a time as it chooses by
itself. Both commands run in turn, each in a new folder. Prints the seconds from the command to its end, those in which
runs train, and the mean use of the GPU, and compares the rounds of all runs, byte for byte. Options after -- are those
of `copfl compare`, such as another data set and model. The exit status is 1 if a run differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

ALGORITHMS = "local,fedavg,fedprox,fedper,fedrep,fedbabu,ditto,apfl,fedala,copfl"
SMALL = ["--dataset", "digits", "--model", "cnn", "--rounds", "5"]


class Use:
    """The mean use of the GPU in a block, in percent, as nvidia-smi reports it; nan without it."""

    def __enter__(self) -> Use:
        self.values, self.ended = list[float](), threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    @property
    def mean(self) -> float:
        return statistics.mean(self.values) if self.values else float("nan")

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--id=0"]
        while shutil.which(query[0]) and not self.ended.wait(0.25):
            said = subprocess.run(query, capture_output=True, text=True).stdout.strip()
            self.values += [float(said)] if said.isdigit() else []


def measured(out: Path, options: list[str], more: list[str]) -> dict[str, Any]:
    """The seconds of one comparison in a new folder, and the mean use of the GPU."""
    command = [
        sys.executable,
        "-m",
        "copfl",
        "compare",
        "--no-tune",
        "--no-plots",
        "--out",
        str(out),
        *options,
        *more,
    ]
    with Use() as use:
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"copfl compare ended with {done.returncode}: {done.stderr[-2000:]}")
    said = [line for line in done.stderr.splitlines() if "GPU" in line]
    return {"seconds": seconds, "gpu_percent": use.mean, "said": said}


def training(out: Path) -> float:
    """The seconds from the beginning of the first run to the end of the last one, by the times of their files."""
    times = [path.stat().st_mtime for path in out.glob("runs/*/*")]
    return max(times) - min(times)


def rounds(out: Path) -> dict[str, bytes]:
    """The rounds of every run, by its folder."""
    return {path.parent.name: path.read_bytes() for path in sorted(out.glob("runs/*/rounds.jsonl"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--algorithms", default=ALGORITHMS)
    parser.add_argument("--seeds", default="0-3")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("jobs.json"))
    parser.add_argument("options", nargs="*", help="of copfl compare, after --", default=SMALL)
    given = parser.parse_args()
    options = [
        "--algorithms",
        given.algorithms,
        "--seeds",
        given.seeds,
        "--device",
        given.device,
        *given.options,
    ]
    ways = {"one after another": ["--jobs", "1"], "at a time": []}
    table: dict[str, Any] = {"command": ["copfl", "compare", *options], "rows": []}
    equal = True
    with tempfile.TemporaryDirectory() as folder:
        first: dict[str, bytes] = {}
        for number in range(given.repeat):
            for name, more in ways.items():
                out = Path(folder) / f"{number}-{name.replace(' ', '-')}"
                row = {"way": name, **measured(out, options, more)}
                found = rounds(out)
                first = first or found
                differing = [run for run in found if found[run] != first[run]]
                equal = equal and not differing
                row |= {
                    "runs": len(found),
                    "runs_per_second": len(found) / row["seconds"],
                    "training_seconds": training(out),
                    "differing": differing,
                }
                table["rows"].append(row)
                given.out.write_text(json.dumps(table, indent=1) + "\n")
                print({key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
    sys.exit(not equal)


if __name__ == "__main__":
    main()
