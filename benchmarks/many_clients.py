"""1,000 and 100,000 clients with 100 of them a round at the same time: `python benchmarks/many_clients.py`

CO-PFL on the digits, small CNN, client states on disk, local baseline, one process each. The two run at the
same time, so that other load on the machine affects both. Prints the median round after the first one, in
seconds and in seconds of the processor, the peak memory and the time of everything, and the ratios. The case
of 100,000 clients is that of

    copfl run --clients 100000 --participation 0.001 --rounds 20 --partition overlapping --store disk \\
      --workers 1 --set run.save_models=false --out FOLDER
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

PARTICIPANTS = 100


def measure(clients: int, rounds: int, out: str) -> None:
    """Runs one case in this process and prints the times at the ends of its rounds."""
    import copfl

    warnings.simplefilter("ignore")  # so few rounds leave the accuracy at chance
    wall, processor = [], []

    def on_round(*_: object) -> None:
        wall.append(time.perf_counter())
        processor.append(time.process_time())

    copfl.run(
        "copfl",
        "digits",
        model="cnn",
        partition="overlapping",
        clients=clients,
        participation=PARTICIPANTS / clients,
        rounds=rounds,
        engine="vmap",
        store="disk",
        save_models=False,
        local_baseline=True,
        out=out,
        on_round=on_round,
    )
    print(json.dumps({"wall": wall, "processor": processor}))


def ended(job: subprocess.Popen[str], clients: int, start: float) -> dict[str, Any]:
    """The measurements of a case, when it has ended."""
    assert job.stdout is not None
    text = job.stdout.read()
    _, status, usage = os.wait4(job.pid, 0)
    if status:
        sys.exit(f"the run with {clients} clients failed")
    times = json.loads(text.splitlines()[-1])
    seconds = {name: [b - a for a, b in itertools.pairwise(ends)] for name, ends in times.items()}
    return {
        "clients": clients,
        "round_s": statistics.median(seconds["wall"]),
        "round_processor_s": statistics.median(seconds["processor"]),
        "peak_memory": usage.ru_maxrss * 1024,
        "whole_s": time.perf_counter() - start,
        "whole_processor_s": usage.ru_utime + usage.ru_stime,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs=2, default=[1000, 100_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("many_clients.json"))
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        return measure(int(args.case[0]), args.rounds, args.case[1])
    jobs, start = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for clients in args.clients:
            case = ["--case", str(clients), f"{folder}/{clients}", "--rounds", str(args.rounds)]
            jobs.append(
                subprocess.Popen([sys.executable, __file__, *case], stdout=subprocess.PIPE, text=True)
            )
        rows = [ended(job, clients, start) for job, clients in zip(jobs, args.clients, strict=True)]
    print(f"{'clients':>8} {'round s':>8} {'CPU s':>8} {'peak MiB':>9} {'whole s':>8} {'CPU s':>8}")
    for row in rows:
        print(
            f"{row['clients']:8,} {row['round_s']:8.3f} {row['round_processor_s']:8.3f} "
            f"{row['peak_memory'] / 2**20:9.0f} {row['whole_s']:8.1f} {row['whole_processor_s']:8.1f}"
        )
    ratios = {name: rows[1][name] / rows[0][name] for name in ("round_s", "round_processor_s")}
    print(
        f"a round: {ratios['round_s']:.2f} times as long, {ratios['round_processor_s']:.2f} on the processor"
    )
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
