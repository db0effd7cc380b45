"""GPU time of a round by kernel: `python benchmarks/profile_gpu.py --clients 30`

CO-PFL with ResNet-18, with `--adapters` FedPer with LoRA in a frozen transformer (adapters.py), with
`--model vgg11` FedPer with a model of zoo.py.
"""

from __future__ import annotations

import argparse
import tempfile

import adapters
import torch
import zoo
from common import federation, random_images, task

from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.optim import Adam
from copfl.core.task import Task, task_of
from copfl.data.federation import Federation
from copfl.engine import mapping
from copfl.engine.simulate import Simulation, begin, simulate

Setting = tuple[AnyAlgorithm, Task, Federation, int]


def resnet(clients: int) -> Setting:
    data = federation(*random_images(clients, 100), 100, "cuda", augment=True)
    return ALGORITHMS["copfl"](), task("resnet18", (3, 32, 32), "cuda").with_batching(), data, 32


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--model", choices=zoo.MODELS)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    setting = (
        any_model(args.model, args.clients)
        if args.model
        else (lora if args.adapters else resnet)(args.clients)
    )
    algorithm, trained, data, batch = setting
    state, engine = begin(algorithm, trained, args.clients), mapping.vmap(args.clients)
    rounds = simulate(
        Simulation(algorithm, trained, data, engine, batch=batch), state, rounds=5, eval_every=10**9
    )
    next(rounds)
    next(rounds)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        next(rounds)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in events)
    kernels = sum(e.count for e in events)
    print(f"{total / 1e3:.1f} ms on the GPU, {kernels} kernels")
    for e in events[: args.rows]:
        percent = 100 * e.device_time_total / total
        print(f"{e.device_time_total / 1e3:9.2f} ms {percent:5.1f} % {e.count:6}  {e.key[:150]}")


if __name__ == "__main__":
    main()
