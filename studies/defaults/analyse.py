"""Prints the tables of README.md from the records: python studies/defaults/analyse.py."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

RECORDS = Path(__file__).parent / "records.jsonl.gz"


class Candidate(NamedTuple):
    algorithm: str
    server: str
    lr: float


Values = dict[str, dict[Candidate, float]]  # by setting


def values(seeds: set[int], epochs: set[int]) -> Values:
    """The accuracy in %, a mean over clients and then over seeds."""
    found: dict[str, dict[Candidate, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in gzip.decompress(RECORDS.read_bytes()).decode().splitlines():
        record = json.loads(line)
        if record["seed"] in seeds and record["epochs"] in epochs:
            candidate = Candidate(record["algorithm"], record["server"], record["lr"])
            mean = 100 * np.nanmean(np.array(record["accuracy"], float))
            found[record["setting"]][candidate].append(float(mean))
    return {
        setting: {candidate: float(np.mean(v)) for candidate, v in cells.items()}
        for setting, cells in found.items()
    }


def table(found: Values) -> str:
    """Every algorithm and server step at the learning rate with its lowest mean regret.

    The regret is against the best candidate of each setting in hindsight. Training alone has the same rate.
    """
    best = {setting: max(cells.values()) for setting, cells in found.items()}
    rows = []
    pairs = sorted({(c.algorithm, c.server) for cells in found.values() for c in cells})
    for algorithm, server in pairs:
        rates = sorted({c.lr for cells in found.values() for c in cells if c[:2] == (algorithm, server)})
        regrets = {
            lr: np.array([best[s] - found[s][Candidate(algorithm, server, lr)] for s in found])
            for lr in rates
        }
        lr = min(regrets, key=lambda rate: float(regrets[rate].mean()))
        gains = [
            found[s][Candidate(algorithm, server, lr)] - found[s][Candidate("local", "mean", lr)]
            for s in found
        ]
        tuned = np.mean(
            [best[s] - max(found[s][Candidate(algorithm, server, r)] for r in rates) for s in found]
        )
        rows.append(
            (
                regrets[lr].mean(),
                algorithm,
                server,
                lr,
                regrets[lr].max(),
                np.median(gains),
                min(gains),
                tuned,
            )
        )
    titles = ("algorithm", "server", "rate", "mean regret", "largest", "with the best rate")
    lines = [
        f"| {' | '.join(titles)} | over training alone: median | least |",
        "| --- | --- " + "| ---: " * 6 + "|",
    ]
    for regret, algorithm, server, lr, *others in sorted(rows):
        largest, median, least, tuned = others
        numbers = f"{regret:.1f} | {largest:.1f} | {tuned:.1f} | {median:+.1f} | {least:+.1f}"
        lines.append(f"| `{algorithm}` | {server} | {lr:g} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("One local epoch, seed 100\n")
    print(table(values({100}, {1})))
    print("\nThree local epochs (FedPAC: one of the head, two of the body), seeds 101 and 102\n")
    print(table(values({101, 102}, {2, 3})))
