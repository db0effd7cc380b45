"""Table 1 of pfl-research, there and here: `python -m benchmarks.pfl_research --pfl PYTHON --data-dir FOLDER`

The conditions are in pfl_cifar.py: FedAvg on CIFAR-10, 50 clients of 50 images a round. Both tools have the same
clients, network, initial weights, steps and torch, and one thread. PYTHON has pfl-research (`pip install pfl`), whose
own simulation trains there by its public classes; the code of its benchmarks is not in its wheel.

The tools take turns, and what counts is processor time, which other load on the machine affects less than the clock on
the wall. The first round of each turn is left out. After a turn both are tested on the same images: tools that do the
same work are about as good.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

# With `python -m` this folder is not where modules are looked for, and copfl need not be installed.
sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import pfl_cifar
from common import CLASSES, MEAN, STD, federation

from copfl.algorithms import FedAvg
from copfl.core.optim import Sgd
from copfl.core.task import task_of
from copfl.data.clients.federation import FederatedData
from copfl.engine import autotune, mapping
from copfl.engine.simulate import Simulation, begin, simulate

HERE = Path(__file__).resolve().parent
RECORD = HERE.parent / "results" / "pfl_research.json"


class Turn(NamedTuple):
    """The rounds of one tool, from the initial weights."""

    cpu: list[float]  # processor seconds of each round but the first
    wall: list[float]
    accuracy: float | None  # of the common model after them; None of noise


def of_copfl(engine: mapping.Mapping, data: FederatedData, seed: int, rounds: int) -> Turn:
    """Rounds of copfl's simulation."""
    net = pfl_cifar.net()
    task = task_of(net, CLASSES, mean=(MEAN,) * 3, std=(STD,) * 3)
    task = task if engine.name == "sequential" else task.with_batching()
    algorithm = FedAvg(Sgd(lr=pfl_cifar.RATE, momentum=0.0, weight_decay=0.0))
    state = begin(algorithm, task, data.clients)
    simulation = Simulation(algorithm, task, data, engine, seed=seed, batch=pfl_cifar.BATCH)
    share = pfl_cifar.PARTICIPANTS / data.clients
    ends = [(time.process_time(), time.perf_counter())]
    # One more round than is run: the last one of a simulation is evaluated.
    steps = simulate(simulation, state, rounds=rounds + 1, participation=share, eval_every=10**9)
    for _ in range(rounds):
        next(steps)
        ends.append((time.process_time(), time.perf_counter()))
    steps.close()
    cpu, wall = ([b - a for a, b in pairwise(of[1:])] for of in zip(*ends, strict=True))
    torch.nn.utils.vector_to_parameters(state.server.w[: task.d], net.parameters())
    return Turn(cpu, wall, pfl_cifar.accuracy(net))


def of_pfl(python: str, mkldnn: str, seed: int, rounds: int) -> Turn:
    """Rounds of pfl-research's simulation, in a process of its own."""
    command = [python, str(HERE / "baseline_pfl.py"), "pfl_cifar", str(rounds), mkldnn, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    if done.returncode:
        raise SystemExit(f"baseline_pfl.py failed: {done.stderr.strip()}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Turn(found["cpu"][1:], found["wall"][1:], found["accuracy"])


def row(way: str, turns: list[Turn]) -> dict[str, Any]:
    """The median of all rounds, and what each turn ended with."""
    cpu = [seconds for turn in turns for seconds in turn.cpu]
    return {
        "way": way,
        "cpu_seconds": statistics.median(cpu),
        "best": min(cpu),
        "wall_seconds": statistics.median(seconds for turn in turns for seconds in turn.wall),
        "accuracy": [turn.accuracy for turn in turns],
        "all": cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--pfl", help="a Python that has pfl-research, with the same torch; default: copfl alone"
    )
    parser.add_argument("--data-dir", help="a folder with CIFAR-10; default: COPFL_DATA, or else noise")
    parser.add_argument("--rounds", type=int, default=10, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    if args.data_dir:
        os.environ["COPFL_DATA"] = args.data_dir  # which the other process reads
    torch.set_num_threads(1)
    autotune.keep_freed_memory()  # as `copfl run` does
    data = federation(*pfl_cifar.images()["train"], pfl_cifar.SIZE)
    engines = (mapping.sequential(),)  # of 1.6 million parameters, vmap takes 1.27 times as long
    turns: dict[str, list[Turn]] = {}
    for seed in range(args.turns):
        for engine in engines:
            turns.setdefault(f"copfl, {engine.name} {engine.chunk}", []).append(
                of_copfl(engine, data, seed, args.rounds)
            )
        for mkldnn, suffix in (("on", "mkldnn"), ("off", "no mkldnn")) if args.pfl else ():
            turn = of_pfl(args.pfl, mkldnn, seed, args.rounds)
            turns.setdefault(f"pfl-research, {suffix}", []).append(turn)
        print({way: round(statistics.median(of[-1].cpu), 3) for way, of in turns.items()}, flush=True)
    rows = sorted((row(way, of) for way, of in turns.items()), key=lambda row: row["cpu_seconds"])
    ours = min(row["cpu_seconds"] for row in rows if row["way"].startswith("copfl"))
    for found in rows:
        found["times_copfl"] = found["cpu_seconds"] / ours
        print(
            f"{found['way']:28} {found['cpu_seconds']:8.3f} s {found['times_copfl']:6.2f}x  {found['accuracy']}"
        )
    about = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "load": os.getloadavg(),
        "clients": data.clients,
        "images": "CIFAR-10" if "test" in pfl_cifar.images() else "noise",
        "rounds": args.rounds,
    }
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
