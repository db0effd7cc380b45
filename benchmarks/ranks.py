"""ResNet-18 with one process of torchrun and with two, one thread each: `python benchmarks/ranks.py`

FedAvg on random images of 32x32, without evaluation. Runs of both alternate, so that other load on the
machine affects both. Needs as many free cores as processes. Prints the median round of each and the ratio,
and compares the results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import random_images


def command(processes: int, data: Path, rounds: int, out: Path, args: argparse.Namespace) -> list[str]:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    settings = {
        "--dataset": data,
        "--partition": "iid",
        "--clients": args.clients,
        "--model": "resnet18",
        "--algorithm": args.algorithm,
        "--rounds": rounds,
        "--engine": "sequential",
        "--device": args.device,
        "--out": out,
    }
    words = [str(word) for pair in settings.items() for word in pair]
    more = ["run.save_models=false", "run.eval_every=1000", "run.eval_models=final"]
    return [*torchrun, "-m", "copfl", "run", *words, "--no-local-baseline", "--quiet"] + [
        word for setting in more for word in ("--set", setting)
    ]


def measured(processes: int, data: Path, out: Path, args: argparse.Namespace) -> list[float]:
    """The seconds of the rounds between the first, which allocates memory, and the last, which evaluates."""
    subprocess.run(
        command(processes, data, args.rounds + 2, out, args),
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = (out / "timing.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines][1:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=100, help="of each client")
    parser.add_argument("--rounds", type=int, default=3, help="measured ones of each run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each")
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("ranks.json"))
    args = parser.parse_args()
    seconds: dict[int, list[float]] = {1: [], args.processes: []}
    with tempfile.TemporaryDirectory() as folder:
        x, y = random_images(args.clients, args.images)
        data = Path(folder) / "images.npz"
        few = 2 * args.clients  # test images
        np.savez(data, x=x, y=y, x_test=x[:few], y_test=y[:few])
        lines = set()
        for repeat in range(args.repeats):
            for processes in seconds:
                out = Path(folder) / f"{processes}-{repeat}"
                seconds[processes] += measured(processes, data, out, args)
                lines.add((out / "rounds.jsonl").read_bytes())
    medians = {processes: statistics.median(values) for processes, values in seconds.items()}
    for processes, median in medians.items():
        print(f"{processes} process(es): {median:.3f} s per round, fastest {min(seconds[processes]):.3f} s")
    ratio = medians[1] / medians[args.processes]
    fastest = min(seconds[1]) / min(seconds[args.processes])
    print(f"ratio {ratio:.2f} (medians), {fastest:.2f} (fastest rounds)")
    print("rounds.jsonl: the same bytes" if len(lines) == 1 else "rounds.jsonl: DIFFERENT")
    args.out.write_text(json.dumps({"seconds": seconds, "ratio": ratio, "equal": len(lines) == 1}) + "\n")


if __name__ == "__main__":
    main()
