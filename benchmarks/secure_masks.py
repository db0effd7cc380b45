"""What a common mask, which secure aggregation needs, costs CO-PFL in accuracy. Writes JSON, prints a table.

    python benchmarks/secure_masks.py [digits] [cifar10] [--data-dir DIR] [--out results/secure_masks.json]

Ten clients with five classes each. Every row has the mean accuracy of the clients' models after and before
local training, and the paired difference to CO-PFL with a mask per client, over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

import copfl

GROWING: dict[str, Any] = {
    "head": "shared",
    "budget": 0.5,
    "training": "in_turn",
}  # masks, which are compared
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "copfl, a mask per client": ("copfl", GROWING),
    "copfl, merge=common": ("copfl", {**GROWING, "merge": "common"}),
    "copfl, merge=common, score=none": ("copfl", {**GROWING, "merge": "common", "score": "none"}),
    "fedavg": ("fedavg", {}),
    "fedper": ("fedper", {}),
    "local": ("local", {}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "mlp",
        "model_options": {"width": 32},
        "partition_options": {"per_client": 5, "train_per_class": 6, "test_per_class": 15},
        "optimizer_options": {"lr": 3e-3},
        "rounds": 50,
    },
    "cifar10": {
        "model": "cnn",
        "model_options": {"width": 8, "hidden": 32},
        "partition_options": {"per_client": 5, "train_per_class": 10, "test_per_class": 20},
        "optimizer_options": {"lr": 2e-3},
        "batch": 16,
        "rounds": 20,
    },
}


def accuracies(dataset: str, row: str, seed: int, data_dir: Path | None) -> dict[str, float]:
    """Mean accuracies in percent after the last round."""
    algorithm, options = ROWS[row]
    settings = SETTINGS[dataset]
    result = copfl.run(
        algorithm,
        dataset,
        data_dir=data_dir,
        clients=10,
        seed=seed,
        participation=1.0,
        optimizer="adam",
        algorithm_options=options,
        engine="vmap",
        local_baseline=False,
        eval_every=settings["rounds"],
        **settings,
    )
    measured = {"after": result.accuracy, "before": result.accuracy_before}
    return {name: 100 * float(np.nan_to_num(values[-1]).mean()) for name, values in measured.items()}


def summary(values: list[float]) -> str:
    """The mean and the standard deviation over the seeds."""
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def line(row: str, runs: list[dict[str, float]], reference: list[dict[str, float]]) -> str:
    """A row of the table, with the paired differences to the reference."""
    cells = [row]
    for name in ("after", "before"):
        cells.append(summary([run[name] for run in runs]))
        differences = [run[name] - other[name] for run, other in zip(runs, reference, strict=True)]
        cells.append("" if runs is reference else summary(differences))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("datasets", nargs="*", default=["digits"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/secure_masks.json"))
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for dataset in args.datasets:
        runs: dict[str, list[dict[str, float]]] = {row: [] for row in args.rows}
        for seed in range(args.seeds):  # all rows of a seed together
            for row in args.rows:
                runs[row].append(accuracies(dataset, row, seed, args.data_dir))
            results[dataset] = {"settings": SETTINGS[dataset], "seeds": seed + 1, "runs": runs}
            args.out.parent.mkdir(exist_ok=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\n{dataset}, {args.seeds} seeds\n\n| algorithm | after | difference | before | difference |")
        print("| --- | --- | --- | --- | --- |")
        reference = next(iter(runs.values()))
        print("\n".join(line(row, found, reference) for row, found in runs.items()))


if __name__ == "__main__":
    main()
