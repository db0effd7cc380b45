"""Prints the tables of README.md from the records: python -m studies.adaptive.analyse [RECORDS]."""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from copfl.stats import Numbers
from studies.adaptive.study import NAMES
from studies.defaults import analyse as defaults

RECORDS = Path(__file__).parent / "records.jsonl.gz"
CONFIRMATION = {300, 301, 302, 303, 304}  # seeds, on test samples; all others are on validation samples
REFERENCE = "default"
DRAWS = 10_000  # of the bootstrap over federations

Values = dict[str, dict[str, dict[int, float]]]  # accuracy in %, by variant, setting and seed


def values(path: Path) -> Values:
    """The mean accuracy over the clients of each run."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text("utf-8")
    accuracies: Values = defaultdict(lambda: defaultdict(dict))
    for line in text.splitlines():
        record = json.loads(line)
        if "accuracy" in record:
            mean = 100 * float(np.nanmean(np.array(record["accuracy"], float)))
            accuracies[record["variant"]][record["setting"]][record["seed"]] = mean
    return accuracies


def over_federations(numbers: Numbers) -> str:
    """The mean and its 95 % interval, a bootstrap over the federations."""
    rng = np.random.default_rng(0)
    means = rng.choice(numbers, (DRAWS, len(numbers))).mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return f"{numbers.mean():+.2f} [{low:+.2f}, {high:+.2f}]"


def development(accuracies: Values) -> str:
    """Each variant minus the first choice, on the seeds that both have; the regret is against the stored candidates."""
    best = {
        name: max(cells.values())
        for name, cells in defaults.over_seeds(defaults.values(defaults.DEVELOPMENT, {1})).items()
    }
    lines = [
        "| variant | federations | minus the first choice | best | worst | mean regret, seed 200 | largest |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for variant, by_setting in accuracies.items():
        gains, regrets = {}, []
        for name in NAMES:
            seeds = set(by_setting[name]) & set(accuracies[REFERENCE][name]) - CONFIRMATION
            if seeds:
                pairs = [by_setting[name][s] - accuracies[REFERENCE][name][s] for s in seeds]
                gains[name] = float(np.mean(pairs))
            if 200 in by_setting[name]:
                regrets.append(best[name] - by_setting[name][200])
        if not gains:
            continue
        top, bottom = max(gains, key=lambda n: gains[n]), min(gains, key=lambda n: gains[n])
        regret = f"{np.mean(regrets):.2f} | {max(regrets):.1f}" if regrets else " | "
        lines.append(
            f"| `{variant}` | {len(gains)} | {over_federations(np.array([*gains.values()]))} | "
            f"{top} {gains[top]:+.1f} | {bottom} {gains[bottom]:+.1f} | {regret} |"
        )
    return "\n".join(lines)


def by_federation(accuracies: Values) -> str:
    """The difference of each variant to the first choice in each federation."""
    variants = [v for v in accuracies if v != REFERENCE]
    lines = [
        "| federation | first choice | " + " | ".join(variants) + " |",
        "| --- |" + " ---: |" * (len(variants) + 1),
    ]
    for name in NAMES:
        reference = accuracies[REFERENCE][name]
        seeds = set(reference) - CONFIRMATION
        cells = []
        for variant in variants:
            common = seeds & set(accuracies[variant][name])
            gain = (
                np.mean([accuracies[variant][name][s] - reference[s] for s in common]) if common else np.nan
            )
            cells.append(f"{gain:+.1f}" if common else "")
        mean = f"{np.mean([reference[s] for s in seeds]):.1f}" if seeds else ""
        lines.append(f"| {name} | {mean} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    measured = values(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDS)
    print(development(measured))
    print()
    print(by_federation(measured))
