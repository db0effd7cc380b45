"""How hostile clients hurt, and what guards help: honest clients' accuracy on digits, one in five clients hostile.

    python benchmarks/attacks.py [--rounds 20] [--seeds 3] [--out results/attacks.json]

Ten clients with three classes each, as in `copfl run`, and a small MLP. A cell is the mean over seeds of the
honest clients' mean accuracy after local training, and the spread (standard deviation) over seeds; attackers, partition
and first weights change with the seed, and are the same for all algorithms, attacks and guards. A client whose model is
broken, so that its loss is no number, counts as 0.
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
ROBUST_RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "clip": {"robust": {"name": "clip"}},
    "trimmed_mean": {"robust": {"name": "trimmed_mean"}},
    "median": {"robust": {"name": "median"}},
    "max_weight=0.2": {"copfl": {"max_weight": 0.2}},
}


def guards_of(algorithm: str) -> list[str]:
    """Local training shares nothing that could be guarded; only CO-PFL has a bound on shares."""
    if algorithm == "local":
        return ["none"]
    return [name for name in ROBUST_RULES if algorithm == "copfl" or "most" not in name]


def accuracy(algorithm: str, attack: str, robust: str, rounds: int, seed: int) -> dict[str, float]:
    """The last round's mean accuracy of the clients that are honest, or would be: those the attack does not draw."""
    options = dict(ROBUST_RULES[robust])
    if attack != "none":
        options["attack"] = {"name": attack}
    result = copfl.run(
        algorithm,
        "digits",
        model="mlp",
        rounds=rounds,
        seed=seed,
        engine="vmap",
        mkldnn="off",
        eval_every=rounds,
        **options,
    )
    honest = np.ones(10, bool)
    honest[list(choose_attackers(seed, 10, 0.2))] = False
    metrics = (
        ("after", result.accuracy),
        ("before", result.accuracy_before),
        ("global", result.accuracy_global),
    )
    return {name: float(np.nan_to_num(values[-1, honest]).mean()) for name, values in metrics}


def measure(algorithms: list[str], attacks: list[str], rounds: int, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for algorithm in algorithms:
        for attack in attacks:
            for robust in guards_of(algorithm):
                runs = [accuracy(algorithm, attack, robust, rounds, seed) for seed in range(seeds)]
                rows.append({"algorithm": algorithm, "attack": attack, "robust": robust, "seeds": runs})
                print(algorithm, attack, robust, cell(rows[-1]), flush=True)
    return rows


def cell(row: dict[str, Any], name: str = "after") -> str:
    values = [100 * run[name] for run in row["seeds"]]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def table(rows: list[dict[str, Any]], name: str = "after") -> str:
    """A line per algorithm and robust rule, a column per attack."""
    attacks = ["none", *ATTACKS]
    lines = [
        f"| algorithm | robust aggregation | {' | '.join(attacks)} |",
        "| --- | --- |" + " --- |" * len(attacks),
    ]
    for algorithm in ALGORITHMS:
        for robust in guards_of(algorithm):
            cells = {
                r["attack"]: cell(r, name)
                for r in rows
                if (r["algorithm"], r["robust"]) == (algorithm, robust)
            }
            lines.append(f"| {algorithm} | {robust} | {' | '.join(cells.get(a, '') for a in attacks)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--attacks", nargs="+", default=["none", *ATTACKS])
    parser.add_argument("--join", nargs="+", type=Path, default=[], help="parts measured before, to join")
    parser.add_argument("--out", type=Path, default=Path("results/attacks.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = [json.loads(path.read_text()) for path in given.join]
    if any((part["rounds"], part["seeds"]) != (given.rounds, given.seeds) for part in parts):
        parser.error("these parts are of other rounds or seeds")
    rows = [row for part in parts for row in part["rows"]]
    rows += [] if parts else measure(given.algorithms, given.attacks, given.rounds, given.seeds)
    seconds = sum(part["seconds"] for part in parts) or round(time.process_time())
    given.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"rounds": given.rounds, "seeds": given.seeds, "clients": 10, "malicious": 2, "seconds": seconds}
    given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(
        f"\nAfter local training:\n\n{table(rows)}\n\nBefore it:\n\n{table(rows, 'before')}\n\n{seconds} s of one core"
    )


if __name__ == "__main__":
    main()
