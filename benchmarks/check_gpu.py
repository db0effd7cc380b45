"""Every algorithm, recorded on the GPU in float64, against one client at a time on the CPU.

    python benchmarks/check_gpu.py [ALGORITHM ...]

No clock: this is the proof that the fast engine computes the same. Unequal clients, batch norm, five rounds, of which
the last one is replayed. "copfl:benefit" is CO-PFL with masks by benefit, which trains without some samples.
"""

from __future__ import annotations

import sys
import time

import torch

from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.optim import Adam
from copfl.engine import mapping as engine
from copfl.engine.mapping import Mapping, cuda_graph, sequential
from copfl.engine.simulate import State, begin, simulate
from copfl.kernels import fused
from copfl.testing import SIZES, small_federation

ROUNDS = 5
VARIANTS = {
    "copfl:benefit": {"criterion": "benefit", "candidates": "reselect"},
}


def run(name: str, device: str, mapping: Mapping, sizes: tuple[int, ...], batched: bool) -> State:
    task, federation = small_federation("batch", sizes, device)
    task = task.with_batching() if batched else task
    if name in VARIANTS:
        algorithm = ALGORITHMS["copfl"](**VARIANTS[name])
    else:
        algorithm = ALGORITHMS[name]() if name == "copfl" else ALGORITHMS[name](optimizer=Adam(lr=1e-3))
    state = begin(algorithm, task, federation.clients)
    for _ in simulate(algorithm, task, federation, mapping, state, rounds=ROUNDS, batch=4, eval_every=2):
        pass
    return state


def differences(a: object, b: object) -> dict[str, float]:
    """The largest difference of every tensor, by its path."""
    pairs = [
        (path, x, y) for (path, x), (_, y) in zip(tree.named(a), tree.named(b), strict=True) if x.numel()
    ]
    return {path: float((x.cpu().double() - y.cpu().double()).abs().max()) for path, x, y in pairs}


def main() -> None:
    names = sys.argv[1:] or sorted([*ALGORITHMS, *VARIANTS])
    failed = []
    fused.LONG = engine.LONG = 1  # so that the kernels for long vectors are tried on short ones
    for name in names:
        # The compiler takes seconds for every function, so only what uses all of them is tried compiled too.
        for compiled in (False, True) if name in ("copfl", "fedavg", *VARIANTS) else (False,):
            fused.COMPILE = compiled
            for sizes in (SIZES, (8, 8, 8, 8)):
                clock = time.perf_counter()
                gaps = {"error": float("inf")}
                try:
                    x = run(name, "cpu", sequential(), sizes, False)
                    y = run(name, "cuda", cuda_graph(64), sizes, True)
                    gaps = differences((x.server, x.clients.all), (y.server, y.clients.all))
                except Exception as error:  # every algorithm is tried, and the reason shown
                    print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                gap = max(gaps.values())
                good = gap < 1e-9
                failed += [] if good else [name]
                what = "compiled" if compiled else "as written"
                print(
                    f"{name:13} {what:10} {'unequal' if sizes == SIZES else 'equal':8} largest difference {gap:.1e} "
                    f"{'ok' if good else 'NOT EQUAL'} ({time.perf_counter() - clock:.1f} s)",
                    flush=True,
                )
                for path, one in gaps.items() if not good else ():
                    print(f"    {path}: {one:.1e}")
                torch.cuda.empty_cache()
    print("all equal" if not failed else f"not equal: {', '.join(sorted(set(failed)))}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
