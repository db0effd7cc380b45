"""Where a CO-PFL round's GPU time goes, kernel by kernel. `python benchmarks/profile_gpu.py --clients 30`"""

from __future__ import annotations

import argparse

import torch
from gpu import federation

from copfl import models
from copfl.algorithms import ALGORITHMS
from copfl.core.task import task_of
from copfl.engine import mapping
from copfl.engine.simulate import begin, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--rows", type=int, default=40)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    data_of_clients = federation(args.clients, 100, (3, 32, 32), 10, "cuda")
    task = task_of(
        models.build("resnet18", (3, 32, 32), 10, 0), 10, mean=(0.5,) * 3, std=(0.25,) * 3, device="cuda"
    )
    algorithm = ALGORITHMS["copfl"]()
    task = task.with_batching()
    state = begin(algorithm, task, args.clients)
    rounds = simulate(
        algorithm, task, data_of_clients, mapping.vmap(args.clients), state, rounds=5, eval_every=10**9
    )
    next(rounds)
    next(rounds)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        next(rounds)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in events)
    print(
        f"{total / 1e3:.1f} ms on the GPU, {sum(e.count for e in events)} kernels; per client and step "
        f"{total / 1e3 / args.clients / 8:.3f} ms"
    )
    for e in events[: args.rows]:
        print(
            f"{e.device_time_total / 1e3:9.2f} ms {100 * e.device_time_total / total:5.1f} % {e.count:6}  {e.key[:130]}"
        )


if __name__ == "__main__":
    main()
