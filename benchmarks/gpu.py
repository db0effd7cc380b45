"""CO-PFL rounds on one GPU against a plain loop and a lower bound: `python benchmarks/gpu.py`

Prints a table and writes a JSON file (default: gpu.json). Everything is measured in one process.
Needs torch, numpy and copfl only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import MEAN, STD, TWO_PHASES, federation, random_images, task
from plain import PlainCoPfl

from copfl import models
from copfl.algorithms import ALGORITHMS
from copfl.core.batches import plan
from copfl.core.optim import Adam
from copfl.engine import mapping
from copfl.engine.mapping import Mapping
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.parts.phases import Phases

DEVICE, SHAPE, SIZE, BATCH = "cuda", (3, 32, 32), 100, 32
STEPS = 8  # of a client in a round of `TWO_PHASES`: two epochs of four batches
PARAMETERS = 11_181_642  # of ResNet-18


class Clock:
    """The seconds between calls, each after the GPU is idle."""

    def __init__(self) -> None:
        self.seconds()

    def seconds(self) -> float:
        torch.cuda.synchronize()
        last, self.last = getattr(self, "last", 0.0), time.perf_counter()
        return self.last - last


def seconds_per_round(
    name: str,
    clients: int,
    engine: Mapping,
    rounds: int,
    *,
    model: str = "resnet18",
    batched: bool,
    **options: Any,
) -> float:
    """The median over rounds without evaluation, after those in which the engine records its CUDA graph."""
    data = federation(*random_images(clients, SIZE), SIZE, DEVICE, augment=True)
    public = data.train.x[:100]  # for ktpfl, which needs samples of no client
    this_task = task(model, SHAPE, DEVICE, public)
    if batched:
        this_task = this_task.with_batching()
    algorithm = ALGORITHMS[name](**options)
    state = begin(algorithm, this_task, clients)
    warmup = 1 if engine.chunk == 1 else 4
    count = warmup + rounds + 1  # the last round evaluates the models
    clock = Clock()
    times = [
        clock.seconds()
        for _ in simulate(
            Simulation(algorithm, this_task, data, engine, batch=BATCH), state, rounds=count, eval_every=10**9
        )
    ]
    torch.cuda.empty_cache()
    return statistics.median(times[warmup:-1])


def plain_seconds(clients: int, model: str, rounds: int) -> float:
    """The plain loop's median seconds per round; the batches are made in advance."""
    data = federation(*random_images(clients, SIZE), SIZE, DEVICE).train.rows(range(clients))
    x = (data.x.float() / 255 - MEAN) / STD
    order = plan(0, 0, range(clients), [SIZE] * clients, batch=BATCH, epochs=2, device=DEVICE)
    batches = [
        [[(x[n][batch.index[n]], data.y[n][batch.index[n]]) for batch in epoch] for epoch in order]
        for n in range(clients)
    ]
    samples = [(x[n], data.y[n]) for n in range(clients)]
    loop, times = PlainCoPfl(models.build(model, SHAPE, 10, 0).to(DEVICE), clients), []
    clock = Clock()
    for _ in range(rounds + 1):
        loop.round(batches, samples)
        times.append(clock.seconds())
    return statistics.median(times[1:])


def bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written."""
    source = torch.randn(2**29, device=DEVICE)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    clock = Clock()
    for _ in range(20):
        target.copy_(source)
    return 20 * 2 * source.numel() * 4 / clock.seconds()


class Table:
    """The rows, printed and written to a file as soon as they are measured."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        self.speed = bandwidth()
        self.floor = 10 * PARAMETERS * 4 / self.speed * 1e3
        print(f"copy: {self.speed / 1e12:.2f} TB/s; lower bound: {self.floor:.3f} ms per client and step")
        print(f"{'CO-PFL, ResNet-18':32} {'N':>4} {'round':>13} {'client step':>11} {'bounds':>7} faster")

    def add(self, name: str, clients: int, seconds: float, baseline: float | None) -> None:
        step = seconds / clients / STEPS * 1e3
        row = {
            "what": name,
            "clients": clients,
            "seconds_per_round": seconds,
            "ms_per_client_step": step,
            "times_floor": step / self.floor,
            "times_plain": None if baseline is None else baseline / seconds,
        }
        self.rows.append(row)
        bounds, speedup = step / self.floor, "" if baseline is None else f"{baseline / seconds:8.1f}x"
        times = f"{seconds * 1e3:10.2f} ms {step:8.3f} ms"
        print(f"{name:32} {clients:4} {times} {bounds:7.2f} {speedup}", flush=True)
        about = {
            "copy_bytes_per_second": self.speed,
            "floor_ms": self.floor,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
        }
        self.path.write_text(json.dumps({**about, "rows": self.rows}, indent=1) + "\n")


def measure_copfl(table: Table, clients: list[int], rounds: int, unbatched: bool) -> None:
    """CO-PFL against the plain loop, with more clients, and with the small model."""

    def seconds(count: int, **options: Any) -> float:
        form = {**TWO_PHASES, **options}
        return seconds_per_round("copfl", count, mapping.cuda_graph(count), rounds, **form)

    plain = plain_seconds(10, "resnet18", 3)
    table.add("plain loop", 10, plain, plain)
    if unbatched:
        table.add("vmap, CUDA graph", 10, seconds(10, batched=False), plain)
    for count in clients:
        once = seconds(count, batched=True)
        table.add("batched, CUDA graph", count, once, plain * count / 10)
        if count <= 30:  # the cost of the additional steps, without the work per round
            twice = seconds(count, batched=True, phases=Phases(epochs=2, training="in_turn"))
            table.add("  one more step", count, twice - once, None)
    small = plain_seconds(10, "cnn", 3)
    table.add("cnn, plain loop", 10, small, small)
    for batched, name in ((False, "vmap"), (True, "batched")):
        table.add(f"cnn, {name}, CUDA graph", 10, seconds(10, model="cnn", batched=batched), small)


def measure_algorithm(table: Table, name: str) -> None:
    """One algorithm against itself with the sequential engine."""
    optimizer = Adam()
    sequential = seconds_per_round(name, 5, mapping.sequential(), 1, batched=False, optimizer=optimizer)
    graph = seconds_per_round(name, 5, mapping.cuda_graph(5), 3, batched=True, optimizer=optimizer)
    table.add(f"{name}, CUDA graph", 5, graph, sequential)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", default="10,30,50", help="numbers of clients (default: 10,30,50)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--all", action="store_true", help="also every algorithm, against its sequential run")
    parser.add_argument("--only", default="", help="only these algorithms, such as ktpfl,local")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    table = Table(args.out)
    if not args.only:
        measure_copfl(table, [int(count) for count in args.clients.split(",")], args.rounds, args.all)
    if args.all or args.only:
        for name in args.only.split(",") if args.only else sorted(ALGORITHMS):
            measure_algorithm(table, name)


if __name__ == "__main__":
    main()
