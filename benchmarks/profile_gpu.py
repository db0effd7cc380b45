"""GPU time of a CO-PFL round by kernel: `python benchmarks/profile_gpu.py --clients 30`"""

from __future__ import annotations

import argparse

import torch
from common import federation, random_images, task

from copfl.algorithms import ALGORITHMS
from copfl.engine import mapping
from copfl.engine.simulate import begin, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--rows", type=int, default=40)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    data = federation(*random_images(args.clients, 100), 100, "cuda", augment=True)
    resnet = task("resnet18", (3, 32, 32), "cuda").with_batching()
    algorithm = ALGORITHMS["copfl"]()
    state = begin(algorithm, resnet, args.clients)
    engine = mapping.vmap(args.clients)
    rounds = simulate(algorithm, resnet, data, engine, state, rounds=5, eval_every=10**9)
    next(rounds)
    next(rounds)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        next(rounds)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in events)
    kernels, per_step = sum(e.count for e in events), total / 1e3 / args.clients / 8
    print(f"{total / 1e3:.1f} ms on the GPU, {kernels} kernels; {per_step:.3f} ms per client and step")
    for e in events[: args.rows]:
        percent = 100 * e.device_time_total / total
        print(f"{e.device_time_total / 1e3:9.2f} ms {percent:5.1f} % {e.count:6}  {e.key[:130]}")


if __name__ == "__main__":
    main()
