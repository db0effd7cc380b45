"""Accuracy of honest clients under attack, with and without robust aggregation, on digits.

    python benchmarks/attacks.py [--rounds 20] [--seeds 3] [--out results/attacks.json]

Ten clients with three classes each, as in `copfl run`, two of them malicious, and a small MLP. A cell is the
honest clients' mean accuracy after local training: its mean over seeds, and its standard deviation. Malicious
clients, partition and initial weights depend on the seed alone. A client whose model diverged counts as 0.
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
from copfl.wrappers.attacks import ATTACKS, choose_attackers

ALGORITHMS = ("copfl", "fedavg", "fedper", "fedce", "local")
CLIENTS, FRACTION = 10, 0.2
GROWING = {
    "head": "shared",
    "budget": 0.5,
    "training": "in_turn",
}  # CO-PFL with masks, as in the stored results
ROBUST: dict[str, dict[str, Any]] = {
    "none": {},
    "clip": {"robust": {"name": "clip"}},
    "trimmed_mean": {"robust": {"name": "trimmed_mean"}},
    "median": {"robust": {"name": "median"}},
    "max_weight=0.2": {"algorithm_options": {"max_weight": 0.2}},
}


def rules_of(algorithm: str) -> list[str]:
    """The rules that apply: none to local training, a bound on weights only to CO-PFL."""
    if algorithm == "local":
        return ["none"]
    return [
        name for name, options in ROBUST.items() if algorithm == "copfl" or "algorithm_options" not in options
    ]


def accuracy(algorithm: str, attack: str, robust: str, rounds: int, seed: int) -> dict[str, float]:
    """The mean accuracies of the clients that the attack does not select, after the last round."""
    options = dict(ROBUST[robust])
    if algorithm == "copfl":
        options["algorithm_options"] = {**GROWING, **options.get("algorithm_options", {})}
    if attack != "none":
        options["attack"] = {"name": attack}
    result = copfl.run(
        algorithm,
        "digits",
        model="mlp",
        clients=CLIENTS,
        rounds=rounds,
        seed=seed,
        engine="vmap",
        eval_every=rounds,
        batch_size=8,
        optimizer={"name": "mamo", "lr": 1e-3} if algorithm == "copfl" else {"name": "sgd", "lr": 0.1},
        **options,
    )
    honest = np.ones(CLIENTS, bool)
    honest[list(choose_attackers(seed, CLIENTS, FRACTION))] = False
    metrics = {"after": result.accuracy, "before": result.accuracy_before, "global": result.accuracy_global}
    return {name: float(np.nan_to_num(values[-1, honest]).mean()) for name, values in metrics.items()}


def measure(algorithms: list[str], attacks: list[str], rounds: int, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for algorithm in algorithms:
        for attack in attacks:
            for robust in rules_of(algorithm):
                runs = [accuracy(algorithm, attack, robust, rounds, seed) for seed in range(seeds)]
                rows.append({"algorithm": algorithm, "attack": attack, "robust": robust, "seeds": runs})
                print(algorithm, attack, robust, cell(rows[-1]), flush=True)
    return rows


def cell(row: dict[str, Any], metric: str = "after") -> str:
    values = [100 * run[metric] for run in row["seeds"]]
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def table(rows: list[dict[str, Any]], metric: str = "after") -> str:
    """A line per algorithm and rule, a column per attack."""
    attacks = ["none", *ATTACKS]
    lines = [f"| algorithm | `--robust` | {' | '.join(attacks)} |", "| --- | --- |" + " --- |" * len(attacks)]
    for algorithm in ALGORITHMS:
        for robust in rules_of(algorithm):
            chosen = [row for row in rows if (row["algorithm"], row["robust"]) == (algorithm, robust)]
            cells = {row["attack"]: cell(row, metric) for row in chosen}
            lines.append(f"| {algorithm} | {robust} | {' | '.join(cells.get(a, '') for a in attacks)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--attacks", nargs="+", default=["none", *ATTACKS])
    parser.add_argument("--join", nargs="+", type=Path, default=[], help="files of earlier parts to join")
    parser.add_argument("--out", type=Path, default=Path("results/attacks.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = [json.loads(path.read_text()) for path in args.join]
    if any((part["rounds"], part["seeds"]) != (args.rounds, args.seeds) for part in parts):
        parser.error("these parts have another number of rounds or seeds")
    rows = [row for part in parts for row in part["rows"]]
    rows += [] if parts else measure(args.algorithms, args.attacks, args.rounds, args.seeds)
    about = {
        "rounds": args.rounds,
        "seeds": args.seeds,
        "clients": CLIENTS,
        "malicious": round(FRACTION * CLIENTS),
        "seconds": sum(part["seconds"] for part in parts) or round(time.process_time()),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    for title, metric in (("After local training", "after"), ("Before local training", "before")):
        print(f"\n{title}:\n\n{table(rows, metric)}")
    print(f"\n{about['seconds']} s of processor time")


if __name__ == "__main__":
    main()
