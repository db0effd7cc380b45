"""1,000 and 100,000 clients with 100 of them a round, side by side: `python benchmarks/many_clients.py`

Each is one `copfl run`: CO-PFL on the digits, small CNN, client states on disk, local baseline, one process.
The two run at the same time, so that other load on the machine affects both. Prints the median round after
the first one, the peak memory of the process and the time of the whole command, and the ratios.
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
from typing import Any

PARTICIPANTS = 100


def command(clients: int, rounds: int, out: Path, more: list[str]) -> list[str]:
    settings = {
        "--clients": clients,
        "--participation": PARTICIPANTS / clients,
        "--rounds": rounds,
        "--model": "cnn",
        "--partition": "overlapping",
        "--store": "disk",
        "--workers": 1,
        "--engine": "vmap",
        "--out": out,
    }
    words = [str(word) for pair in settings.items() for word in pair]
    return [sys.executable, "-m", "copfl", "run", *words, "--set", "run.save_models=false", "--quiet", *more]


def started(clients: int, rounds: int, out: Path, more: list[str]) -> tuple[int, float]:
    """The process and the time at which it started."""
    process = subprocess.Popen(command(clients, rounds, out, more))
    return process.pid, time.perf_counter()


def ended(pid: int, start: float, clients: int, out: Path) -> dict[str, Any]:
    """The measurements of a process, when it has ended."""
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"the run with {clients} clients failed")
    lines = (out / "timing.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    return {
        "clients": clients,
        "round_s": statistics.median(seconds[1:]),
        "fastest_s": min(seconds),
        "peak_memory": usage.ru_maxrss * 1024,
        "whole_s": time.perf_counter() - start,
        "processor_s": usage.ru_utime + usage.ru_stime,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs=2, default=[1000, 100_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("many_clients.json"))
    parser.add_argument("more", nargs="*", help="more words of the command, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / str(clients) for clients in args.clients]
        jobs = [
            started(clients, args.rounds, out, args.more)
            for clients, out in zip(args.clients, outs, strict=True)
        ]
        rows = [ended(*job, n, out) for job, n, out in zip(jobs, args.clients, outs, strict=True)]
    print(f"{'clients':>8} {'round s':>8} {'fastest s':>9} {'peak MiB':>9} {'whole s':>8} {'CPU s':>8}")
    for row in rows:
        print(
            f"{row['clients']:8,} {row['round_s']:8.3f} {row['fastest_s']:9.3f} "
            f"{row['peak_memory'] / 2**20:9.0f} {row['whole_s']:8.1f} {row['processor_s']:8.1f}"
        )
    ratios = {name: rows[1][name] / rows[0][name] for name in ("round_s", "fastest_s")}
    print(f"ratio of the rounds: {ratios['round_s']:.2f} (medians), {ratios['fastest_s']:.2f} (fastest)")
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
