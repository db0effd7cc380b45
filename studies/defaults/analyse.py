"""Prints the tables of README.md from the records: python studies/defaults/analyse.py."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from copfl import stats

RECORDS = Path(__file__).parent / "records.jsonl.gz"
DEVELOPMENT = {200}  # seed, on validation samples
CONFIRMATION = {300, 301, 302, 303, 304}  # seeds, on test samples
HEAD_SPEED = 3.0  # only the rule has it in the confirmation


class Candidate(NamedTuple):
    algorithm: str
    server: str
    lr: float
    schedule: str
    batch: int  # 0: the setting's, 32 but for LoRA
    head_speed: float  # of FedPAC; 0: its default, 10

    @property
    def pair(self) -> tuple[str, str]:
        return self.algorithm, self.server


Values = dict[str, dict[Candidate, dict[int, float]]]  # accuracy in %, by setting, candidate and seed


def values(seeds: set[int], epochs: set[int]) -> Values:
    """The mean accuracy over the clients of each run."""
    accuracies: Values = defaultdict(lambda: defaultdict(dict))
    for line in gzip.decompress(RECORDS.read_bytes()).decode().splitlines():
        record = json.loads(line)
        if record["seed"] in seeds and record["epochs"] in epochs:
            candidate = Candidate(*(record[name] for name in Candidate._fields))
            mean = 100 * np.nanmean(np.array(record["accuracy"], float))
            accuracies[record["setting"]][candidate][record["seed"]] = float(mean)
    return accuracies


def over_seeds(accuracies: Values) -> dict[str, dict[Candidate, float]]:
    return {
        setting: {candidate: float(np.mean([*by_seed.values()])) for candidate, by_seed in cells.items()}
        for setting, cells in accuracies.items()
    }


def confirmation(accuracies: Values) -> str:
    """The rule against training alone, seed by seed, and against the best of its competitors."""
    lines = [
        "| federation | the rule | training alone | difference, 95 % interval | regret | best competitor |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    regrets = []
    for setting, cells in accuracies.items():
        rule = next(cells[c] for c in cells if c.head_speed == HEAD_SPEED)
        alone = next(cells[c] for c in cells if c.algorithm == "local")
        gains = np.array([rule[seed] - alone[seed] for seed in sorted(rule)])
        low, high = stats.over_seeds(gains)
        others = {c: by_seed for c, by_seed in cells.items() if c.head_speed == 0 and c.algorithm != "local"}
        text = "not run |"
        if len(others) == 7 and (seeds := set.intersection(*(set(by_seed) for by_seed in others.values()))):
            means = {c: np.mean([by_seed[s] for s in seeds]) for c, by_seed in others.items()}
            best = max(means, key=lambda c: float(means[c]))
            regret = max(0.0, float(means[best] - np.mean([rule[s] for s in seeds])))
            regrets.append(regret)
            text = f"{regret:.1f} | `{best.algorithm}`, {best.server}, {best.lr:g} |"
        means_of = f"{np.mean([*rule.values()]):.1f} | {np.mean([*alone.values()]):.1f}"
        lines.append(f"| {setting} | {means_of} | {gains.mean():+.1f} [{low:+.1f}, {high:+.1f}] | {text}")
    lines.append(f"\nMean regret {np.mean(regrets):.2f}, largest {max(regrets):.1f}, over {len(regrets)}.")
    return "\n".join(lines)


def table(accuracies: dict[str, dict[Candidate, float]]) -> str:
    """Every algorithm and server step with the rate, batch and schedule of its lowest mean regret.

    The regret is against the best candidate of each setting in hindsight. Training alone has the same
    settings.
    """
    best = {setting: max(cells.values()) for setting, cells in accuracies.items()}
    complete = set.intersection(*(set(cells) for cells in accuracies.values()))
    rows = []
    for pair in sorted({candidate.pair for candidate in complete}):
        candidates = [candidate for candidate in complete if candidate.pair == pair]
        regrets = {c: np.array([best[s] - accuracies[s][c] for s in accuracies]) for c in candidates}
        chosen = min(regrets, key=lambda c: float(regrets[c].mean()))
        alone = chosen._replace(algorithm="local", server="mean", head_speed=0.0)
        gains = [accuracies[s][chosen] - accuracies[s][alone] for s in accuracies]
        tuned = np.mean([best[s] - max(accuracies[s][c] for c in candidates) for s in accuracies])
        rows.append((float(regrets[chosen].mean()), chosen, regrets[chosen].max(), tuned, gains))
    lines = [
        "| algorithm | server | rate | batch | mean regret | largest | tuned | over training alone: median | least |",
        "| --- | --- " + "| ---: " * 7 + "|",
    ]
    for regret, c, largest, tuned, gains in sorted(rows):
        how = f"{c.lr:g}{', cosine' if c.schedule == 'cosine' else ''} | {c.batch or 32}"
        numbers = f"{regret:.1f} | {largest:.1f} | {tuned:.1f} | {np.median(gains):+.1f} | {min(gains):+.1f}"
        lines.append(f"| `{c.algorithm}` | {c.server} | {how} | {numbers} |")
    return "\n".join(lines)


def without_lora(accuracies: Values) -> Values:
    return {setting: cells for setting, cells in accuracies.items() if not setting.startswith("lora")}


if __name__ == "__main__":
    print("The rule on fresh seeds and test samples\n")
    print(confirmation(values(CONFIRMATION, {1})))
    print("\nDevelopment: batches, schedules and heads, seed 200\n")
    print(table(over_seeds(without_lora(values(DEVELOPMENT, {1})))))
    print("\nDevelopment: server steps, one local epoch, seed 100\n")
    print(table(over_seeds(values({100}, {1}))))
    print("\nDevelopment: three local epochs (FedPAC: one of the head, two of the body), seeds 101 and 102\n")
    print(table(over_seeds(values({101, 102}, {2, 3}))))
