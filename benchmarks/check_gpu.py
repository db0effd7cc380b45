"""Every algorithm in float64: CUDA graphs on the GPU against sequential updates on the CPU.

    python benchmarks/check_gpu.py [ALGORITHM ...]

Clients of equal size, of unequal size, and in groups of similar size; batch norm; five rounds, the last of which is
replayed. "copfl:benefit" is CO-PFL with masks by benefit, which is measured on samples that are left out of the
training; "fedavg:dropout" is FedAvg of a model with dropout; ":fedexp" is an algorithm with FedExP's step of the
server, whose sum each client adds to on the GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch
from torch import nn

from copfl.algorithms import ALGORITHMS
from copfl.algorithms.copfl import COPFL
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.optim import Adam
from copfl.engine import mapping
from copfl.engine.mapping import Mapping, cuda_graph, sequential
from copfl.engine.rounds import State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.kernels import fused
from copfl.parts.pwpm import Pwpm
from copfl.parts.server_steps import FedExP
from copfl.testing import SIZES, small_federation
from copfl.wrappers.server_optimizer import with_server_optimizer

ROUNDS, TOLERANCE = 5, 1e-9
GIANT = (5, 9, 3, 40)  # two groups, see copfl.engine.sizes
STEPPED = {f"{name}:fedexp" for name in ("fedavg", "copfl", "fedper", "fedpac", "feddbe", "gpfl", "scaffold")}
VARIANTS = {"copfl:benefit", "fedavg:dropout"} | STEPPED


def algorithm_of(name: str) -> AnyAlgorithm:
    if name == "copfl:benefit":
        return COPFL(growth=Pwpm(criterion="benefit", candidates="reselect"))
    plain, _, variant = name.partition(":")
    algorithm = COPFL() if plain == "copfl" else ALGORITHMS[plain](optimizer=Adam(lr=1e-3))
    return with_server_optimizer(algorithm, FedExP()) if variant == "fedexp" else algorithm


def run(name: str, device: str, engine: Mapping, sizes: tuple[int, ...]) -> State:
    algorithm = algorithm_of(name)
    task, federation = small_federation("batch", sizes, device, getattr(algorithm, "needs", ()))
    if name.endswith(":dropout"):
        task.module.body.append(nn.Dropout(0.3))  # type: ignore[operator, union-attr]
        task = replace(task, random=True)
    if engine.name != "sequential":
        task = task.with_batching()
    state = begin(algorithm, task, federation.clients)
    for _ in simulate(
        Simulation(algorithm, task, federation, engine, batch=4), state, rounds=ROUNDS, eval_every=2
    ):
        pass
    return state


def differences(a: object, b: object) -> dict[str, float]:
    """The largest difference of every tensor, by its path."""
    pairs = zip(tree.named(a), tree.named(b), strict=True)
    return {
        path: float((x.cpu().double() - y.cpu().double()).abs().max())
        for (path, x), (_, y) in pairs
        if x.numel()
    }


def check(name: str, compiled: bool, sizes: tuple[int, ...]) -> bool:
    """Whether both states are equal up to the tolerance; prints a line."""
    started, gaps = time.perf_counter(), {"error": float("inf")}
    fused.COMPILE = compiled
    try:
        cpu, gpu = run(name, "cpu", sequential(), sizes), run(name, "cuda", cuda_graph(64), sizes)
        gaps = differences((cpu.server, cpu.clients.all), (gpu.server, gpu.clients.all))
    except Exception as error:  # the other algorithms are checked too
        print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    is_equal = max(gaps.values()) < TOLERANCE
    kernels = "compiled" if compiled else "as written"
    clients = {SIZES: "unequal", GIANT: "a giant"}.get(sizes, "equal")
    verdict, seconds = "ok" if is_equal else "NOT EQUAL", time.perf_counter() - started
    gap = f"largest difference {max(gaps.values()):.1e}"
    print(f"{name:13} {kernels:10} {clients:8} {gap} {verdict} ({seconds:.1f} s)", flush=True)
    for path, value in gaps.items() if not is_equal else ():
        print(f"    {path}: {value:.1e}")
    torch.cuda.empty_cache()
    return is_equal


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "algorithms", nargs="*", default=sorted([*ALGORITHMS, *VARIANTS]), help="default: all"
    )
    args = parser.parse_args()
    fused.LONG = mapping.LONG = 1  # so that the kernels for long vectors are tested on short ones
    failed = set()
    for name in args.algorithms:
        for compiled in (False, True):
            for sizes in (SIZES, GIANT, (8, 8, 8, 8)):
                if not check(name, compiled, sizes):
                    failed.add(name)
    print("all equal" if not failed else f"not equal: {', '.join(sorted(failed))}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
