"""CO-PFL rounds on one GPU: copfl against the plain loop, and against the memory floor. `python benchmarks/gpu.py`

Prints a table and writes a JSON file (default: gpu.json). Everything is measured in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from plain import PlainCoPfl

from copfl import models
from copfl.algorithms import ALGORITHMS
from copfl.core.batches import plan
from copfl.core.optim import Adam
from copfl.core.task import task_of
from copfl.data.federation import Federation
from copfl.data.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine import mapping
from copfl.engine.simulate import begin, simulate


def federation(clients: int, size: int, shape: tuple[int, ...], classes: int, device: str) -> Federation:
    """Random images: speed does not depend on what they show."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * size, *shape), dtype=np.uint8)
    samples = Samples(x, rng.integers(0, classes, len(x)))
    parts = tuple(np.arange(n * size, (n + 1) * size) for n in range(clients))
    names = tuple(map(str, range(classes)))
    data = Dataset(
        "random", samples, samples, names, mean=(0.5,) * shape[0], std=(0.25,) * shape[0], augment=True
    )
    return Federation(data, Partition(parts, parts, "by hand", {}), device)


def seconds_per_round(
    name: str,
    clients: int,
    engine: mapping.Mapping,
    model: str,
    rounds: int,
    device: str,
    batched: bool,
    **keywords: Any,
) -> float:
    """The median over the rounds after the engine has settled; evaluation is left out, as in the plain loop."""
    data_of_clients = federation(clients, 100, (3, 32, 32), 10, device)
    public = data_of_clients.train.x[:100]  # for the one algorithm that learns from public samples
    task = task_of(
        models.build(model, (3, 32, 32), 10, 0),
        10,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        device=device,
        public=public,
    )
    task = task.with_batching() if batched else task
    algorithm = ALGORITHMS[name](**keywords)
    state = begin(algorithm, task, clients)
    times, settle = [], 1 if engine.chunk == 1 else 4
    torch.cuda.synchronize()
    clock = time.perf_counter()
    for _ in simulate(
        algorithm,
        task,
        data_of_clients,
        engine,
        state,
        rounds=rounds + settle + 1,
        batch=32,
        eval_every=10**9,
    ):
        torch.cuda.synchronize()
        now = time.perf_counter()
        times.append(now - clock)
        clock = now
    return statistics.median(times[settle:-1])  # the last round is evaluated


def plain_seconds(clients: int, model: str, rounds: int, device: str) -> float:
    """The plain loop's median seconds per round, batches drawn beforehand."""
    data_of_clients = federation(clients, 100, (3, 32, 32), 10, device)
    net = models.build(model, (3, 32, 32), 10, 0).to(device)
    loop = PlainCoPfl(net, clients)
    data = data_of_clients.train.rows(range(clients))
    x = (data.x.float() / 255 - 0.5) / 0.25
    order = plan(0, 0, range(clients), [100] * clients, batch=32, epochs=2, device=device)
    batches = [
        [[(x[n][b.index[n]], data.y[n][b.index[n]]) for b in p] for p in order] for n in range(clients)
    ]
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        clock = time.perf_counter()
        loop.round(batches, [(x[n], data.y[n]) for n in range(clients)])
        torch.cuda.synchronize()
        times.append(time.perf_counter() - clock)
    return statistics.median(times[1:])


def bandwidth(device: str) -> float:
    """Bytes per second of a large copy on the device, read and written."""
    a = torch.randn(2**29, device=device)
    b = torch.empty_like(a)
    for _ in range(3):
        b.copy_(a)
    torch.cuda.synchronize()
    clock = time.perf_counter()
    for _ in range(20):
        b.copy_(a)
    torch.cuda.synchronize()
    return 20 * 2 * a.numel() * 4 / (time.perf_counter() - clock)


def measure_copfl(
    args: argparse.Namespace, add: Callable[[str, int, float, float | None], None], device: str
) -> None:
    """CO-PFL against the plain loop, with more clients, and with the small model."""
    plain = plain_seconds(10, "resnet18", 3, device)
    add("plain loop", 10, plain, plain)
    if args.all:
        seconds = seconds_per_round(
            "copfl", 10, mapping.cuda_graph(10), "resnet18", args.rounds, device, False
        )
        add("vmap, CUDA graph", 10, seconds, plain)
    for clients in [int(c) for c in args.clients.split(",")]:
        seconds = seconds_per_round(
            "copfl", clients, mapping.cuda_graph(clients), "resnet18", args.rounds, device, True
        )
        add("batched, CUDA graph", clients, seconds, plain * clients / 10)
        torch.cuda.empty_cache()
        if clients <= 30:  # what one more step costs, without what happens once a round
            longer = seconds_per_round(
                "copfl", clients, mapping.cuda_graph(clients), "resnet18", args.rounds, device, True, epochs=2
            )
            add("  one more step", clients, longer - seconds, None)
            torch.cuda.empty_cache()
    small = plain_seconds(10, "cnn", 3, device)
    add("cnn, plain loop", 10, small, small)
    for batched, label in ((False, "cnn, vmap, CUDA graph"), (True, "cnn, batched, CUDA graph")):
        add(
            label,
            10,
            seconds_per_round("copfl", 10, mapping.cuda_graph(10), "cnn", args.rounds, device, batched),
            small,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="10,30,50")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", default="gpu.json")
    parser.add_argument(
        "--all", action="store_true", help="every registered algorithm, against its own one-by-one run"
    )
    parser.add_argument("--only", default="", help="nothing but these algorithms, such as ktpfl,local")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    device = "cuda"
    speed = bandwidth(device)
    parameters = 11_181_642
    floor = 10 * parameters * 4 / speed * 1e3
    steps = 8
    rows: list[dict[str, Any]] = []

    def add(what: str, clients: int, seconds: float, base: float | None) -> None:
        per_step = seconds / clients / steps * 1e3
        rows.append(
            {
                "what": what, "clients": clients, "seconds_per_round": seconds, "ms_per_client_step": per_step,
                "times_floor": per_step / floor, "times_plain": None if base is None else base / seconds,
            }
        )  # fmt: skip
        ratio = "" if base is None else f"{base / seconds:8.1f}x"
        print(
            f"{what:32} {clients:4} {seconds * 1e3:10.2f} ms {per_step:8.3f} ms {per_step / floor:7.2f} {ratio}",
            flush=True,
        )
        with open(
            args.out, "w"
        ) as file:  # after every row: a run that is stopped leaves what it has measured
            about = {"copy_bytes_per_second": speed, "floor_ms": floor, "torch": torch.__version__}
            json.dump({**about, "rows": rows}, file, indent=1)

    print(
        f"copy {speed / 1e12:.2f} TB/s; floor {floor:.3f} ms per client and step (10 passes over the parameters)"
    )
    print(f"{'resnet18, CO-PFL':32} {'N':>4} {'round':>13} {'client step':>11} {'floors':>7} faster")
    if not args.only:
        measure_copfl(args, add, device)
    if args.all or args.only:
        for name in args.only.split(",") if args.only else sorted(ALGORITHMS):
            one = seconds_per_round(
                name, 5, mapping.sequential(), "resnet18", 1, device, False, optimizer=Adam()
            )
            many = seconds_per_round(
                name, 5, mapping.cuda_graph(5), "resnet18", 3, device, True, optimizer=Adam()
            )
            add(f"{name}, captured", 5, many, one)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
