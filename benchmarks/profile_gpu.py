"""GPU time of a round by kernel: `python benchmarks/profile_gpu.py --clients 30`

CO-PFL with ResNet-18, with `--adapters` FedPer with LoRA in a frozen transformer (adapters.py), with
`--model vgg11` FedPer with a model of zoo.py.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import adapters
import torch
import zoo
from common import TWO_PHASES, federation, random_images, task

from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.optim import Adam
from copfl.core.task import Task, task_of
from copfl.data.clients.federation import FederatedData
from copfl.engine import mapping
from copfl.engine.simulate import Simulation, begin, simulate

Setting = tuple[AnyAlgorithm, Task, FederatedData, int]


def resnet(clients: int) -> Setting:
    data = federation(*random_images(clients, 100), 100, "cuda", augment=True)
    return ALGORITHMS["copfl"](**TWO_PHASES), task("resnet18", (3, 32, 32), "cuda").with_batching(), data, 32


def lora(clients: int) -> Setting:
    data = adapters.federation(clients, 30_000, "cuda")
    first = tree.row(data.train.rows([0]), 0)
    model = adapters.model_of(adapters.random_model(tempfile.mkdtemp()), "lora")
    short = task_of(model, adapters.CLASSES, device="cuda").probed(first).with_batching(torch.bfloat16, first)
    return ALGORITHMS["fedper"](Adam(lr=1e-3), epochs=1), short, data, adapters.BATCH


def any_model(name: str, clients: int) -> Setting:
    size = zoo.GPU._replace(clients=clients)
    data = zoo.federation(name, size, "cuda")
    first = tree.row(data.train.rows([0]), 0)
    found = (
        task_of(zoo.MODELS[name](size), zoo.CLASSES, device="cuda").probed(first).with_batching(None, first)
    )
    return ALGORITHMS["fedper"](Adam(lr=1e-4), epochs=1), found, data, size.batch


def gaps(profile: torch.profiler.profile) -> None:
    """Prints the time in which the GPU did nothing within the round, and what came before and after it."""
    found = [e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda e: e.time_range.start)
    end, idle = found[0].time_range.start, []
    for before, after in zip([found[0], *found], found, strict=False):
        idle.append((max(0.0, after.time_range.start - end), before.name[:60], after.name[:60]))
        end = max(end, after.time_range.end)
    print(
        f"{(end - found[0].time_range.start) / 1e3:.1f} ms from the first kernel to the end of the last one"
    )
    print(f"{sum(gap for gap, *_ in idle) / 1e3:.1f} ms idle in between; the longest:")
    for gap, before, after in sorted(idle, reverse=True)[:12]:
        print(f"{gap / 1e3:9.3f} ms  {before} -> {after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--model", choices=zoo.MODELS)
    parser.add_argument(
        "--replayed", action="store_true", help="a round of the recorded program, with its gaps"
    )
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    setting = (
        any_model(args.model, args.clients)
        if args.model
        else (lora if args.adapters else resnet)(args.clients)
    )
    algorithm, trained, data, batch = setting
    state = begin(algorithm, trained, args.clients)
    engine = mapping.cuda_graph(args.clients) if args.replayed else mapping.vmap(args.clients)
    rounds = simulate(
        Simulation(algorithm, trained, data, engine, batch=batch), state, rounds=12, eval_every=10**9
    )
    for _ in range(5 if args.replayed else 2):
        next(rounds)
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        next(rounds)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    print(f"{min(times):.1f} ms a round")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        next(rounds)
        torch.cuda.synchronize()
    if args.replayed:
        gaps(profile)
    events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in events)
    kernels = sum(e.count for e in events)
    print(f"{total / 1e3:.1f} ms on the GPU, {kernels} kernels")
    for e in events[: args.rows]:
        percent = 100 * e.device_time_total / total
        print(f"{e.device_time_total / 1e3:9.2f} ms {percent:5.1f} % {e.count:6}  {e.key[:150]}")


if __name__ == "__main__":
    main()
