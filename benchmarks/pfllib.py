"""copfl's rounds under PFLlib's conditions: `python -m benchmarks.pfllib --device cuda --out FOLDER`

20 clients of 69 to 1,020 images of 28 x 28, and a third as many for testing; PFLlib's small CNN, batches of 10, SGD
with rate 0.005 and without momentum, one epoch, all clients in each round, and every client is evaluated in each
round. Seconds of a round are the median. A round costs what its samples cost, so noise serves as images.

PFLLIB has what PFLlib's own code took under these conditions on one H200: its repository, unchanged, one run of each
method, seconds a round. The ratio is of use on that GPU alone. Needs torch, numpy and copfl only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

# With `python -m` this folder is not where modules are looked for, and copfl need not be installed.
sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import sizes
from common import CLASSES, MEAN, STD

from copfl.algorithms import ALGORITHMS
from copfl.core.optim import Sgd
from copfl.core.task import task_of
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine import mapping
from copfl.engine.simulate import Simulation, begin, simulate


class Method(NamedTuple):
    """A method with PFLlib's options, and the seconds of its round there."""

    name: str
    options: dict[str, Any]
    pfllib: float


PFLLIB = (
    Method("fedavg", {}, 3.24),
    Method("fedper", {}, 2.75),
    Method("fedrep", {"head_epochs": 1}, 4.09),
    Method("ditto", {"personal_epochs": 1}, 6.34),
)
TESTED = 3  # training images for one of testing
WARM_UP = 4  # rounds, in which a GPU's program is recorded


def federation(counts: list[int], device: str) -> FederatedData:
    """Clients of so many images for training, and their own for testing."""
    rng = np.random.default_rng(0)

    def split(of: list[int]) -> tuple[Samples, tuple[Any, ...]]:
        x = rng.integers(0, 256, (sum(of), 1, 28, 28), dtype=np.uint8)
        rows = np.split(np.arange(len(x)), np.cumsum(of)[:-1])
        return Samples(x, rng.integers(0, CLASSES, len(x))), tuple(rows)

    (train, own), (test, tested) = split(counts), split([-(-count // TESTED) for count in counts])
    classes = tuple(map(str, range(CLASSES)))
    dataset = Dataset("pfllib", train, test, classes, mean=(MEAN,), std=(STD,), augment=False)
    return FederatedData(dataset, Partition(own, tested, "by hand", {}), device)


def measured(method: Method, counts: list[int], device: str, rounds: int) -> dict[str, Any]:
    """The seconds of each round after the first ones."""
    task = task_of(sizes.Net(), CLASSES, mean=(MEAN,), std=(STD,), device=device).with_batching()
    optimizer = Sgd(lr=sizes.RATE, momentum=0.0, weight_decay=0.0)
    algorithm = ALGORITHMS[method.name](optimizer=optimizer, **method.options)
    is_cuda = device.startswith("cuda")
    engine = mapping.cuda_graph(len(counts)) if is_cuda else mapping.vmap(len(counts))
    simulation = Simulation(algorithm, task, federation(counts, device), engine, batch=sizes.BATCH)
    ends = [time.perf_counter()]
    for _ in simulate(simulation, begin(algorithm, task, len(counts)), rounds=WARM_UP + rounds, eval_every=1):
        if is_cuda:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    engine.release()
    seconds = np.diff(ends)[WARM_UP:].tolist()
    return {
        "method": method.name,
        "seconds": statistics.median(seconds),
        "all": seconds,
        "pfllib": method.pfllib,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--images", type=int, help="of each client, for a quick try; default: 69 to 1,020")
    parser.add_argument("--out", type=Path, default=Path(), help="a folder, for pfllib.json")
    args = parser.parse_args()
    counts = sizes.federations()["unequal"] if args.images is None else [args.images] * sizes.CLIENTS
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else ""
    about = {"device": gpu or args.device, "torch": torch.__version__, "images": counts}
    rows = []
    for method in PFLLIB:
        rows.append(row := measured(method, counts, args.device, args.rounds))
        beside = (
            f"PFLlib {method.pfllib:.2f} s: {method.pfllib / row['seconds']:.0f} times"
            if "H200" in gpu
            else ""
        )
        print(f"{method.name:8} {1e3 * row['seconds']:9.1f} ms a round  {beside}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "pfllib.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
