"""Prints the tables of unseen.md from the records: python studies/defaults/analyse_unseen.py."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from copfl import stats

FOLDER = Path(__file__).parent
CONFIRMATION, DEVELOPMENT = range(7000, 7005), range(8000, 8005)

Values = dict[str, dict[str, dict[int, float]]]  # by federation, candidate and seed


def values(seeds: range) -> tuple[Values, Values]:
    """The means over the clients, and those of training alone for as many epochs; in %, or negative RMSE."""
    personal: Values = defaultdict(lambda: defaultdict(dict))
    alone: Values = defaultdict(lambda: defaultdict(dict))
    for line in gzip.decompress((FOLDER / "unseen.jsonl.gz").read_bytes()).decode().splitlines():
        record = json.loads(line)
        if record["seed"] not in seeds:
            continue
        own = np.array(record["personal"], float)
        scale = 1 if record["metric"] == "rmse" else 100
        for kind, numbers in ((personal, own), (alone, np.array(record.get("alone", []), float))):
            if len(numbers):
                mean = scale * np.nanmean(numbers[~np.isnan(own)])  # without those who attack
                kind[record["federation"]][record["candidate"]][record["seed"]] = float(mean)
    return personal, alone


def difference(own: dict[int, float], other: dict[int, float]) -> str:
    """The mean of the paired differences, with the 95 % interval over the seeds that both have."""
    pairs = [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]
    if len(pairs) < 2:
        return "" if not pairs else f"{pairs[0]:+.1f}"
    low, high = stats.over_seeds(np.array(pairs))
    return f"{np.mean(pairs):+.1f} [{low:+.1f}, {high:+.1f}]"


def confirmation() -> str:
    """The default, the former one where it differs, and training alone."""
    personal, alone = values(CONFIRMATION)
    lines = [
        "| federation | default | training alone | difference, 95 % interval | former default: difference |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, candidates in personal.items():
        now, before = candidates.get("default", {}), candidates.get("before", {})
        own = alone[name].get("default") or alone[name].get("before", {})
        seeds = sorted(now.keys() & own.keys())
        means = [f"{np.mean([row[seed] for seed in seeds]):.1f}" if seeds else "" for row in (now, own)]
        former = difference(before, alone[name].get("before", {}))
        lines.append(f"| {name} | {means[0]} | {means[1]} | {difference(now, own)} | {former} |")
    return "\n".join(lines)


def development() -> str:
    """Each candidate minus the former default, on the development seeds."""
    personal, _ = values(DEVELOPMENT)
    names = sorted({name for candidates in personal.values() for name in candidates} - {"before"})
    lines = ["| federation | " + " | ".join(names) + " |", "| --- " + "| ---: " * len(names) + "|"]
    for federation, candidates in personal.items():
        if before := candidates.get("before"):
            cells = [difference(candidates.get(name, {}), before) for name in names]
            lines.append(f"| {federation} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def alone_as_long() -> str:
    """The 22 federations of README.md: the default minus training alone for as many epochs and averaged."""
    files = (FOLDER.parent / "adaptive" / "records.jsonl.gz", FOLDER / "alone.jsonl.gz")
    lines = [line for file in files for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    accuracies: Values = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        record = json.loads(line)
        if record["seed"] >= 300 and record["variant"] in ("default-ema", "alone-ema"):
            mean = 100 * np.nanmean(np.array(record["accuracy"], float))
            accuracies[record["setting"]][record["variant"]][record["seed"]] = float(mean)
    rows = [
        f"| {name} | {difference(row['default-ema'], row['alone-ema'])} |" for name, row in accuracies.items()
    ]
    return "\n".join(["| federation | difference, 95 % interval |", "| --- | ---: |", *rows])


if __name__ == "__main__":
    print("Unseen federations, seeds 7000 to 7004\n")
    print(confirmation())
    print("\nDevelopment, seeds 8000 to 8004: minus the former default\n")
    print(development())
    print("\nThe 22 federations, seeds 300 to 304: the default minus training alone for as many epochs\n")
    print(alone_as_long())
