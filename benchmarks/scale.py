"""What a round costs as the federation grows, in seconds, memory and disk. `python benchmarks/scale.py`

CO-PFL with the clients' states on disk, against: the number of clients at 100 a round, the participation, the
size of the model; then 10,000 clients with 1,000 a round, and with --resnet 1,000 ResNet-18 clients with 10 a round.
Each in a process of its own, so that the peak of its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def one(
    clients: int,
    participants: int,
    rounds: int,
    model: str = "cnn",
    width: int = 16,
    store: str = "disk",
    algorithm: str = "copfl",
    folder: str = ".",
) -> dict[str, Any]:
    """The metrics of some rounds in this process; digits for the CNN, random 32x32 images for ResNet-18."""
    begun = time.perf_counter()
    import digits
    import numpy as np
    import torch
    from cpu import federation

    from copfl import models
    from copfl.algorithms import ALGORITHMS
    from copfl.core.task import task_of
    from copfl.engine import autotune, mapping
    from copfl.engine.simulate import begin, simulate

    torch.set_num_threads(1)
    autotune.keep_freed_memory()  # as `copfl run` does
    imported = time.perf_counter()
    bare = peak()
    if model == "resnet18":
        rng = np.random.default_rng(0)
        x = rng.integers(0, 256, (clients * 20, 3, 32, 32), dtype=np.uint8)
        clients_data, shape = federation(x, rng.integers(0, 10, len(x)), 20), (3, 32, 32)
    else:
        clients_data, shape = federation(*digits.holdings(clients), digits.SIZE), (1, 8, 8)
    options = {} if model == "resnet18" else {"width": width}
    task = task_of(
        models.build(model, shape, 10, 0, **options), 10, mean=(0.5,) * shape[0], std=(0.25,) * shape[0]
    )
    engine = mapping.sequential()
    if task.d < 1_000_000:
        engine, task = mapping.vmap(autotune.chunk_of(task, participants)), task.with_batching()
    way = ALGORITHMS[algorithm]()
    path = Path(folder) / "clients.bin"
    state = begin(way, task, clients, path if store == "disk" else None)
    ready = time.perf_counter()
    times, processor = [], []
    clock = ready, time.process_time()
    for _ in simulate(
        way,
        task,
        clients_data,
        engine,
        state,
        rounds=rounds,
        batch=8,
        participation=participants / clients,
        eval_every=10**9,
    ):
        now = time.perf_counter(), time.process_time()
        times.append(now[0] - clock[0])
        processor.append(now[1] - clock[1])
        clock = now
    used = path.stat().st_blocks * 512 if path.exists() else 0
    timed = slice(1, -1) if rounds > 2 else slice(None)  # the first warms up, the last is evaluated
    return {
        "clients": clients, "participants": participants, "model": model, "parameters": task.d, "store": store,
        "algorithm": algorithm, "import_s": imported - begun, "prepare_s": ready - imported, "first_round_s": times[0],
        "seconds": statistics.median(times[timed]), "processor_s": statistics.median(processor[timed]),
        "memory_after_import": bare, "peak_memory": peak(), "disk": used,
    }  # fmt: skip


def peak() -> int:
    """The peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(**how: Any) -> dict[str, Any]:
    """`one` in a process of its own, printed as a row."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        given = json.dumps({**how, "folder": folder})
        done = subprocess.run([sys.executable, __file__, "--one", given], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{row['clients']:8,} {row['participants']:8,} {row['parameters']:11,} {row['store']:>7} "
        f"{row['prepare_s']:9.2f} {row['seconds']:9.3f} {row['processor_s']:9.3f} "
        f"{row['peak_memory'] / 2**20:9.0f} {row['disk'] / 2**20:9.0f}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--resnet", action="store_true", help="1,000 ResNet-18 clients too; wants 15 GB of disk"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="scale.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(**json.loads(args.one))))
        return
    rows: list[dict[str, Any]] = []
    parts = {
        "the number of clients": [{"clients": n, "participants": 100} for n in (200, 1000, 10_000, 30_000)],
        "the participation": [{"clients": 10_000, "participants": n} for n in (10, 100, 1000)],
        "the size of the model": [{"clients": 1000, "participants": 100, "width": n} for n in (8, 32, 64)],
        "in memory instead": [{"clients": 10_000, "participants": 100, "store": "memory"}],
    }
    if args.resnet:
        parts["ResNet-18"] = [{"clients": 1000, "participants": 10, "model": "resnet18", "rounds": 3}]
    for title, cases in parts.items():
        print(
            f"\nCO-PFL against {title}\n{'clients':>8} {'a round':>8} {'parameters':>11} {'store':>7} {'prepare s':>9} "
            f"{'round s':>9} {'CPU s':>9} {'peak MiB':>9} {'disk MiB':>9}"
        )
        rows += [{"against": title, **apart(**{"rounds": args.rounds, **case})} for case in cases]
    start = rows[1]
    print(f"\nstart-up: import {start['import_s']:.2f} s and {start['memory_after_import'] / 2**20:.0f} MiB")
    Path(args.out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
