"""What a round costs where clients have different numbers of samples: `python benchmarks/sizes.py`

FedAvg with the network and the settings of PFLlib (batch 10, SGD 0.005, one epoch), 20 clients with the same
number of samples in all: of equal size, of sizes as PFLlib's partition has them (69 to 1,020), and one giant
beside nineteen small clients; and 1,000 clients with a long tail. Each federation is measured in one group, as
if sizes did not matter, and in groups of similar size, which is what a run does. Two bounds stand beside them:
the steps of the largest client alone, and clients of equal size.

On a GPU seconds are those of the clock, on a CPU those of the processor. Needs torch, numpy and copfl only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CLASSES, MEAN, STD
from torch import nn

from copfl.algorithms import ALGORITHMS
from copfl.core.optim import Sgd
from copfl.core.task import task_of
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine import mapping, sizes
from copfl.engine.simulate import Simulation, begin, simulate

BATCH, RATE, CLIENTS, SAMPLES = 10, 0.005, 20, 7_501
LONG_TAIL = 1_000  # clients


class Net(nn.Module):
    """PFLlib's small CNN for images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 512),
            nn.ReLU(),
        )
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def federations() -> dict[str, list[int]]:
    """The sizes of the clients of each."""
    rng = np.random.default_rng(0)
    spread = np.sort(np.exp(rng.normal(0, 0.87, CLIENTS)))
    spread = 69 + (1_020 - 69) * (spread - spread[0]) / (spread[-1] - spread[0])
    tail = np.minimum(10 + 25 * rng.pareto(1.3, LONG_TAIL), 3_000).astype(int)
    giant = SAMPLES - 100 * (CLIENTS - 1)
    return {
        "equal": [SAMPLES // CLIENTS] * CLIENTS,
        "unequal": rng.permutation(spread.astype(int)).tolist(),
        "one giant": [*[100] * 7, giant, *[100] * (CLIENTS - 8)],
        "long tail": tail.tolist(),
        "equal, as many as the long tail": [int(tail.mean())] * LONG_TAIL,
    }


def federation_of(counts: list[int], device: str) -> FederatedData:
    """Images of noise; a client's first sample is its test sample."""
    rng, total = np.random.default_rng(0), sum(counts)
    samples = Samples(
        rng.integers(0, 256, (total, 1, 28, 28), dtype=np.uint8), rng.integers(0, CLASSES, total)
    )
    train = tuple(np.split(np.arange(total), np.cumsum(counts)[:-1]))
    dataset = Dataset(
        "sizes", samples, samples, tuple(map(str, range(CLASSES))), mean=(MEAN,), std=(STD,), augment=False
    )
    return FederatedData(dataset, Partition(train, tuple(part[:1] for part in train), "by hand", {}), device)


@contextmanager
def one_group() -> Iterator[None]:
    """In which sizes do not matter."""
    before, sizes.OVERHEAD = sizes.OVERHEAD, {}
    try:
        yield
    finally:
        sizes.OVERHEAD = before


def measured(counts: list[int], device: str, rounds: int) -> dict[str, Any]:
    """The median round without evaluation, and the largest memory of a GPU."""
    cuda = device == "cuda"
    task = task_of(Net(), CLASSES, mean=(MEAN,), std=(STD,), device=device).with_batching()
    algorithm = ALGORITHMS["fedavg"](optimizer=Sgd(lr=RATE))
    chunk = min(len(counts), 500 if cuda else 64)
    engine = mapping.cuda_graph(chunk) if cuda else mapping.vmap(chunk)
    simulation = Simulation(algorithm, task, federation_of(counts, device), engine, batch=BATCH)
    warm_up = 4 if cuda else 1
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    clock, start = (time.perf_counter if cuda else time.process_time), time.perf_counter()
    ends = [clock()]
    for _ in simulate(
        simulation, begin(algorithm, task, len(counts)), rounds=warm_up + rounds + 1, eval_every=10**9
    ):
        if cuda:
            torch.cuda.synchronize()
        ends.append(clock())
    seconds = np.diff(ends)
    memory = torch.cuda.max_memory_reserved() if cuda else 0
    engine.release()
    if cuda:
        torch.cuda.empty_cache()
    return {
        "seconds": statistics.median(seconds[warm_up:-1].tolist()),
        "start_seconds": float(seconds[:warm_up].sum()) if cuda else 0.0,
        "memory": memory,
        "wall": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="federations; default: all")
    parser.add_argument("--out", type=Path, default=Path("sizes.json"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, counts in federations().items():
        if args.only and name not in args.only:
            continue
        cases = {"in groups": counts}
        if len(set(counts)) > 1:
            cases = {"one group": counts, "in groups": counts, "the largest alone": [max(counts)]}
        for case, of_case in cases.items():
            if case == "one group":
                with one_group():
                    row = measured(of_case, args.device, args.rounds)
            else:
                row = measured(of_case, args.device, args.rounds)
            rows.append({"federation": name, "case": case, "largest": max(counts), **row})
            print(
                f"{name:32} {case:18} {row['seconds'] * 1e3:9.1f} ms  start {row['start_seconds']:6.1f} s  "
                f"memory {row['memory'] / 2**30:5.2f} GiB",
                flush=True,
            )
            about = {"device": args.device, "torch": torch.__version__}
            if args.device == "cuda":
                about["device"] = torch.cuda.get_device_name()
            args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
