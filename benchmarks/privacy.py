"""Accuracy on digits with noised uploads, by the epsilon that was spent.

    python benchmarks/privacy.py [--rounds 20] [--seeds 3] [--out results/privacy.json]

Fifty clients have 12 samples each, and all take part in every round. The first line of each algorithm is
without noise. The last line is local training, which shares nothing and spends no epsilon.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import copfl

ALGORITHMS = ("copfl", "fedavg")
FORMS: dict[str, dict[str, Any]] = {  # as in the stored results
    "copfl": {
        "algorithm_options": {"head": "shared", "budget": 0.5, "training": "in_turn"},
        "optimizer": {"name": "mamo", "lr": 1e-3},
    },
    "fedavg": {"optimizer": {"name": "sgd", "lr": 0.1}},
    "local": {"optimizer": {"name": "sgd", "lr": 0.1}},
}
NOISES = (0.0, 4.0, 16.0)
CLIP = 0.2
CLIENTS = 50


def measure(algorithm: str, noise: float, rounds: int, seed: int) -> dict[str, float | None]:
    """Mean accuracies after the last round, and the epsilons spent."""
    options: dict[str, Any] = {"privacy": {"noise": noise, "clip": CLIP}} if noise else {}
    result = copfl.run(
        algorithm,
        "digits",
        model="mlp",
        model_options={"width": 32},
        clients=CLIENTS,
        partition_options={"train_per_class": 4, "test_per_class": 4},
        participation=1.0,
        rounds=rounds,
        seed=seed,
        engine="vmap",
        eval_every=rounds,
        batch_size=8,
        **FORMS[algorithm],
        **options,
    )
    metrics = {"after": result.accuracy, "before": result.accuracy_before, "global": result.accuracy_global}
    federation = result.records[-1]["federation"]
    return {
        **{name: float(np.nan_to_num(values[-1]).mean()) for name, values in metrics.items()},
        **{name: federation.get(name) for name in ("epsilon", "epsilon_server")},
    }


def line(row: dict[str, Any]) -> str:
    def percent(name: str) -> str:
        values = [100 * run[name] for run in row["seeds"]]
        deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.1f}{deviation}"

    def epsilon(name: str) -> str:
        value = 0.0 if row["algorithm"] == "local" else row["seeds"][0][name]
        return "∞" if value is None else f"{value:.1f}"

    cells = [row["algorithm"], f"{row['noise']:g}", *map(epsilon, ("epsilon", "epsilon_server"))]
    return "| " + " | ".join([*cells, *map(percent, ("after", "before", "global"))]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/privacy.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    print(
        "| algorithm | noise | epsilon | epsilon_server | after | before | global model |\n|" + " --- |" * 7
    )
    rows = []
    for algorithm, noise in [*((a, n) for a in ALGORITHMS for n in NOISES), ("local", 0.0)]:
        runs = [measure(algorithm, noise, args.rounds, seed) for seed in range(args.seeds)]
        rows.append({"algorithm": algorithm, "noise": noise, "seeds": runs})
        print(line(rows[-1]), flush=True)
    about = {
        "rounds": args.rounds,
        "clients": CLIENTS,
        "clip": CLIP,
        "delta": 1e-5,
        "seconds": round(time.perf_counter() - start),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
