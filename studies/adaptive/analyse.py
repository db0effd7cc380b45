"""Prints the tables of README.md from the records: python -m studies.adaptive.analyse [RECORDS]."""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from copfl import stats
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


def stored() -> dict[str, dict[str, dict[int, float]]]:
    """The confirmation of studies/defaults by setting, method and seed."""
    methods: dict[str, dict[str, dict[int, float]]] = {}
    for name, cells in defaults.values(CONFIRMATION, {1}).items():
        methods[name] = {
            "first choice"
            if c.head_speed == defaults.HEAD_SPEED
            else "training alone"
            if c.algorithm == "local"
            else f"`{c.algorithm}`, {c.server}, {c.lr:g}": by_seed
            for c, by_seed in cells.items()
        }
    return methods


def confirmation(accuracies: Values, variant: str, averaged: tuple[str, ...]) -> str:
    """A variant on test samples, against training alone seed by seed, and against the best method in hindsight.

    Args:
        accuracies: The records.
        variant: Its name.
        averaged: Variants that count as methods in hindsight too, in the last column.
    """
    lines = [
        f"| federation | `{variant}` | first choice | training alone | minus training alone | minus first choice "
        "| regret | of the first choice | best method | regret with averaged methods |",
        "| --- |" + " ---: |" * 7 + " --- | ---: |",
    ]
    regrets: dict[str, list[float]] = defaultdict(list)
    below, gains = [], []
    for name, methods in stored().items():
        mine = accuracies[variant][name]
        if set(mine) != CONFIRMATION:
            continue
        over = [
            np.array([mine[s] - methods[other][s] for s in sorted(mine)])
            for other in ("training alone", "first choice")
        ]
        intervals = [
            f"{d.mean():+.1f} [{low:+.1f}, {high:+.1f}]" for d in over for low, high in [stats.over_seeds(d)]
        ]
        if stats.over_seeds(over[0])[1] < 0:
            below.append(name)
        gains.append(float(over[1].mean()))
        seeds = set.intersection(*(set(by_seed) for by_seed in methods.values()))
        at_hand = {method: np.mean([by_seed[s] for s in seeds]) for method, by_seed in methods.items()}
        best = max(at_hand, key=lambda method: float(at_hand[method]))
        own = float(np.mean([mine[s] for s in seeds]))
        regret = max(0.0, float(at_hand[best]) - own)
        of_first = float(at_hand[best] - at_hand["first choice"])
        others = [
            accuracies[other][name][s] - mine[s]
            for other in averaged
            for s in [min(seeds)]
            if s in accuracies[other][name]
        ]
        with_averaged = max([regret, *others])
        for column, value in (("own", regret), ("first", of_first), ("averaged", with_averaged)):
            regrets[column].append(value)
        means = [
            float(np.mean([*row.values()]))
            for row in (mine, methods["first choice"], methods["training alone"])
        ]
        lines.append(
            f"| {name} | {means[0]:.1f} | {means[1]:.1f} | {means[2]:.1f} | {' | '.join(intervals)} | {regret:.1f} "
            f"| {of_first:.1f} | {best} | {with_averaged:.1f} |"
        )
    for column, values_of in regrets.items():
        lines.append(
            f"\nRegret, {column}: {over_federations(np.array(values_of))}, largest {max(values_of):.1f}"
        )
    lines.append(f"\nMinus the first choice: {over_federations(np.array(gains))}")
    lines.append(f"\nSignificantly below training alone: {', '.join(below) or 'none'}")
    return "\n".join(lines)


if __name__ == "__main__":
    measured = values(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDS)
    print(development(measured))
    print()
    print(by_federation(measured))
    for confirmed in ("default-ema", "end-ema"):
        if any(set(by_seed) >= CONFIRMATION for by_seed in measured[confirmed].values()):
            print()
            print(
                confirmation(measured, confirmed, ("fedrod-ema", "fedavg_ft-ema", "fedper-ema", "local-ema"))
            )
