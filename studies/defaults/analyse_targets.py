"""Prints the tables of targets.md from the records: python studies/defaults/analyse_targets.py."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from copfl import stats

FOLDER = Path(__file__).parent
DEVELOPMENT, CONFIRMATION = range(9100, 9200), range(9200, 9300)
REJECTED = "ditto;pull=30"  # for labels: the first decision

Gains = dict[str, dict[str, dict[int, float]]]  # by federation, candidate and seed


def records(seeds: range, file: str = "targets.jsonl.gz") -> list[dict[str, object]]:
    lines = gzip.decompress((FOLDER / file).read_bytes()).decode().splitlines()
    return [record for record in map(json.loads, lines) if record["seed"] in seeds]


def mean(sites: object) -> float:
    return float(np.nanmean(np.array(sites, float)))


def gain(metric: object, own: float, alone: float) -> float:
    """Points of macro F1, or by how many percent the RMSE is lower."""
    return 100 * (1 - own / alone) if metric == "rmse" else 100 * (own - alone)


def development() -> tuple[Gains, dict[str, object]]:
    """The gains of each candidate over training alone, and the metric of each federation."""
    alone: dict[tuple[object, object], float] = {}
    found = records(DEVELOPMENT)
    for record in found:
        if record["candidate"] == "local":
            alone[record["federation"], record["seed"]] = mean(record["personal"])
    gains: Gains = defaultdict(lambda: defaultdict(dict))
    metrics = {}
    for record in found:
        place = record["federation"], record["seed"]
        if place in alone:
            federation, seed = str(place[0]), int(str(place[1]))
            metrics[federation] = record["metric"]
            own = gain(record["metric"], mean(record["personal"]), alone[place])
            gains[federation][str(record["candidate"])][seed] = own
    return gains, metrics


def _is_below(by_seed: dict[int, float]) -> bool:
    return stats.over_seeds(np.array(list(by_seed.values())))[1] < 0


def choice() -> str:
    """The mean gain of each candidate in each federation; then its regret against the best, and its least gain.

    A star: the 95 % interval over the seeds is below zero. A candidate that lacks a federation is in no mean.
    """
    gains, metrics = development()
    names = sorted({name for row in gains.values() for name in row} - {"local"})
    names = [name for name in names if all(name in row for row in gains.values())]
    lines = [
        "| federation | seeds | " + " | ".join(names) + " |",
        "| --- " + "| ---: " * (len(names) + 1) + "|",
    ]
    means = {
        federation: {name: float(np.mean(list(by_seed.values()))) for name, by_seed in row.items()}
        for federation, row in gains.items()
    }
    for federation, row in means.items():
        below = {n: len(gains[federation][n]) > 1 and _is_below(gains[federation][n]) for n in names}
        cells = [f"{row[name]:+.1f}" + "*" * below[name] for name in names]
        seeds = len(gains[federation]["local"])
        lines.append(f"| {federation} | {seeds} | " + " | ".join(cells) + " |")
    for kind, metric in (("labels", "macro_f1"), ("values", "rmse")):
        rows = [row for federation, row in means.items() if metrics[federation] == metric]
        regrets = {n: [max(row[m] for m in names) - row[n] for row in rows] for n in names}
        least = {n: min(row[n] for row in rows) for n in names}
        lines.append(
            f"| *{kind}: mean regret* | | " + " | ".join(f"{np.mean(regrets[n]):.1f}" for n in names) + " |"
        )
        lines.append(f"| *{kind}: least gain* | | " + " | ".join(f"{least[n]:+.1f}" for n in names) + " |")
    return "\n".join(lines)


def confirmation(candidate: str) -> str:
    """The candidate and training alone, with the 95 % interval over seeds and Holm's p over all federations.

    Runs of the study of extreme federations, with the batch of now, take the place of the former ones.
    """
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    metrics, methods = {}, {}
    runs = [*records(CONFIRMATION), *records(CONFIRMATION, "extremes.jsonl.gz")]
    latest = {(run["federation"], run["seed"]): run for run in runs if run["candidate"] == candidate}
    for record in latest.values():
        federation = str(record["federation"])
        pairs[federation].append((mean(record["personal"]), mean(record["alone"])))
        metrics[federation], methods[federation] = record["metric"], str(record["method"]).split()[0]
    gains = {f: np.array([gain(metrics[f], own, alone) for own, alone in rows]) for f, rows in pairs.items()}
    p_values = stats.holm([stats.t_test(row) for row in gains.values()])
    lines = [
        "| federation | method | seeds | its value | training alone | difference, 95 % interval | p, Holm |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (federation, row), p in zip(gains.items(), p_values, strict=True):
        scale = 1 if metrics[federation] == "rmse" else 100
        own, alone = (scale * np.mean([pair[side] for pair in pairs[federation]]) for side in (0, 1))
        low, high = stats.over_seeds(row)
        unit = " %" if metrics[federation] == "rmse" else ""
        difference = f"{row.mean():+.1f}{unit} [{low:+.1f}, {high:+.1f}]"
        cells = f"{methods[federation]} | {len(row)} | {own:.3g} | {alone:.3g} | {difference} | {p:.2g}"
        lines.append(f"| {federation} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("The choice, seeds from 9100: gain over training alone\n")
    print(choice())
    print("\nThe decision, seeds from 9200\n")
    print(confirmation("default"))
    print(f"\nThe first decision for labels, {REJECTED}\n")
    print(confirmation(REJECTED))
