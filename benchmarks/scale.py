"""Time, memory and disk of a round as the federation grows: `python benchmarks/scale.py`

CO-PFL with the clients' states on disk, by the number of clients with 100 a round, by the number of
participants, and by the size of the model; then in memory, and with --resnet 1,000 ResNet-18 clients with 10
a round. Each case runs in its own process, so that the peak memory is that of the case.
"""

from __future__ import annotations

import argparse
import itertools
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

HEADER = f"{'clients':>8} {'a round':>8} {'parameters':>11} {'store':>7} {'prepare s':>9} {'round s':>9} "
HEADER += f"{'CPU s':>9} {'peak MiB':>9} {'disk MiB':>9}"


def measure(
    *,
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
    started = time.perf_counter()
    import digits
    import torch
    from common import federation, random_images, task

    from copfl.algorithms import ALGORITHMS
    from copfl.engine import autotune, mapping
    from copfl.engine.simulate import Simulation, begin, simulate

    torch.set_num_threads(1)
    autotune.keep_freed_memory()  # as `copfl run` does
    imported, memory_after_import = time.perf_counter(), peak()
    is_resnet = model == "resnet18"
    data = federation(*(random_images(clients, 20) if is_resnet else digits.samples(clients)), 20)
    this_task = task(model, data.shape, **({} if is_resnet else {"width": width}))
    engine = mapping.sequential()
    if this_task.d < 1_000_000:
        engine = mapping.vmap(autotune.clients_per_batch(this_task, participants))
        this_task = this_task.with_batching()
    this_algorithm = ALGORITHMS[algorithm]()
    path = Path(folder) / "clients.bin"
    state = begin(this_algorithm, this_task, clients, path if store == "disk" else None)
    simulation = simulate(
        Simulation(this_algorithm, this_task, data, engine, batch=8),
        state,
        rounds=rounds,
        participation=participants / clients,
        eval_every=10**9,
    )
    ready = time.perf_counter()
    wall, processor = [ready], [time.process_time()]
    for _ in simulation:
        wall.append(time.perf_counter())
        processor.append(time.process_time())
    # The first round allocates memory, the last one evaluates the models.
    timed = slice(1, -1) if rounds > 2 else slice(None)
    return {
        "clients": clients,
        "participants": participants,
        "model": model,
        "parameters": this_task.d,
        "store": store,
        "algorithm": algorithm,
        "import_s": imported - started,
        "prepare_s": ready - imported,
        "first_round_s": wall[1] - wall[0],
        "seconds": statistics.median(differences(wall)[timed]),
        "processor_s": statistics.median(differences(processor)[timed]),
        "memory_after_import": memory_after_import,
        "peak_memory": peak(),
        "disk": path.stat().st_blocks * 512 if path.exists() else 0,
    }


def differences(times: list[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(times)]


def peak() -> int:
    """The peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_in_process(**options: Any) -> dict[str, Any]:
    """`measure` in its own process, printed as a row."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        command = [sys.executable, __file__, "--case", json.dumps({**options, "folder": folder})]
        done = subprocess.run(command, capture_output=True, text=True)
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


def cases(scale: float, resnet: bool) -> dict[str, list[dict[str, Any]]]:
    """The cases by their title; `scale` multiplies the numbers of clients and of participants."""

    def case(clients: int, participants: int = 100, **options: Any) -> dict[str, Any]:
        counts = {"clients": clients, "participants": participants}
        return {**{name: max(2, int(n * scale)) for name, n in counts.items()}, **options}

    result = {
        "by number of clients": [case(n) for n in (200, 1000, 10_000, 30_000)],
        "by number of participants": [case(10_000, n) for n in (10, 100, 1000)],
        "by size of the model": [case(1000, width=n) for n in (8, 32, 64)],
        "in memory": [case(10_000, store="memory")],
    }
    if resnet:
        result["ResNet-18"] = [case(1000, 10, model="resnet18", rounds=3)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--resnet", action="store_true", help="also 1,000 ResNet-18 clients; needs 15 GB of disk"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor of the numbers of clients (default: 1)"
    )
    parser.add_argument("--out", type=Path, default=Path("scale.json"))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(**json.loads(args.case))))
        return
    rows: list[dict[str, Any]] = []
    for title, group in cases(args.scale, args.resnet).items():
        print(f"\nCO-PFL {title}\n{HEADER}")
        rows += [
            {"against": title, **measure_in_process(**{"rounds": args.rounds, **case})} for case in group
        ]
    start = rows[1]
    print(f"\nimport: {start['import_s']:.2f} s and {start['memory_after_import'] / 2**20:.0f} MiB")
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
