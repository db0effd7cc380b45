"""Prints the tables of named.md from the records: python studies/defaults/analyse_named.py."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from named import SMALL, TARGETS  # type: ignore[import-not-found]

from copfl import stats

RECORDS = Path(__file__).parent / "named.jsonl.gz"
LABELS = ("tumour-labels", "digit-labels", "labels")  # F1; of the others the RMSE


class How(NamedTuple):
    algorithm: str
    form: str
    optimizer: str
    server: str
    factor: float
    batch: str


Values = dict[
    str, dict[How, dict[int, float]]
]  # the mean over the clients, by federation, candidate and seed
NEW = How("copfl", "head-together", "mamo", "mean", 1.0, "rule")
WITH_STEP = How("copfl", "head-together", "adam", "fedexp", 1.0, "rule")
BEFORE = How("copfl", "interpretation", "mamo", "mean", 0.0, "usual")
PUBLISHED = How("copfl", "paper", "mamo", "mean", 1.0, "rule")
ALONE = How("local", "", "adam", "mean", 1.0, "rule")
FEDPER = How("fedper", "", "adam", "mean", 1.0, "rule")


def records() -> list[dict[str, Any]]:
    lines = gzip.decompress(RECORDS.read_bytes()).decode().splitlines()
    return [record for record in map(json.loads, lines) if "error" not in record]


def values(split: str, targets: bool) -> Values:
    """The runs of a split, of federations whose targets are classes, or are not."""
    result: Values = defaultdict(lambda: defaultdict(dict))
    for record in records():
        if record["split"] == split and (record["setting"] in TARGETS) == targets:
            mean = float(np.nanmean(np.array(record["values"], float)))
            how = How(*(record[name] for name in How._fields))
            result[record["setting"]][how][record["seed"]] = mean * (1 if targets else 100)
    return result


def forms(found: Values) -> str:
    """Every form of CO-PFL: its mean over the federations that all have, and its distance to training alone."""
    columns = (("adam", "mean"), ("mamo", "mean"), ("adam", "fedexp"))
    every = {how for by_how in found.values() for how in by_how}
    of = {how: {s: by_how[how][600] for s, by_how in found.items() if how in by_how} for how in every}
    lines = [
        "| form | Adam | MAMO | Adam, FedExP's step | over training alone, MAMO: median | least |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    alone = of[ALONE]
    names = sorted({how.form for how in of if how.algorithm == "copfl"})
    rows = []
    others = [("fedper", ""), ("fedpac", "rule"), ("local", "")]
    for algorithm, form in [*(("copfl", name) for name in names), *others]:
        cells, last = [], ["", ""]
        for optimizer, server in columns:
            how = How(algorithm, form, optimizer, server, 1.0, "rule")
            common = [s for s in alone if s in of.get(how, {})]
            complete = len(common) >= len(alone) - 1
            cells.append(float(np.mean([of[how][s] for s in common])) if complete else np.nan)
            if optimizer == "mamo" and complete:
                gains = [of[how][s] - alone[s] for s in common]
                last = [f"{np.median(gains):+.1f}", f"{min(gains):+.1f}"]
        title = f"`{form}`" if algorithm == "copfl" else algorithm
        rows.append((np.nanmax(cells), title, cells, last))
    for _, title, cells, last in sorted(rows, key=lambda row: -row[0]):
        shown = ["" if np.isnan(cell) else f"{cell:.1f}" for cell in cells]
        lines.append(f"| {' | '.join([title, *shown, *last])} |")
    return "\n".join(lines)


def confirmation(found: Values) -> str:
    """The new default of CO-PFL beside the former one, the published form, training alone and FedPer."""
    columns = (NEW, WITH_STEP, BEFORE, PUBLISHED, ALONE, FEDPER)
    titles = ("the default", "with FedExP's step", "the default before", "published, rule's rate")
    lines = [
        f"| federation | {' | '.join(titles)} | training alone | FedPer |",
        "| --- " + "| ---: " * 6 + "|",
    ]
    pairs = (
        (NEW, BEFORE),
        (NEW, PUBLISHED),
        (NEW, ALONE),
        (NEW, FEDPER),
        (WITH_STEP, ALONE),
        (WITH_STEP, NEW),
    )
    pairs = (*pairs, (FEDPER, ALONE))
    differences: dict[tuple[How, How], list[float]] = defaultdict(list)
    for setting, by_how in found.items():
        seeds = set.intersection(*(set(by_how.get(how, {})) for how in columns))
        if not seeds:
            continue
        means = {how: float(np.mean([by_how[how][seed] for seed in seeds])) for how in columns}
        lines.append(f"| {setting} | " + " | ".join(f"{means[how]:.1f}" for how in columns) + " |")
        for pair in pairs:
            differences[pair].append(means[pair[0]] - means[pair[1]])
    lines.append("")
    for (one, other), gains in differences.items():
        low, high = stats.over_seeds(np.array(gains))
        words = f"{one.form} {one.optimizer} {one.server} - {other.algorithm} {other.form} {other.batch}"
        above, below = sum(g > 0 for g in gains), sum(g < 0 for g in gains)
        lines.append(
            f"{words}: {np.mean(gains):+.1f} [{low:+.1f}, {high:+.1f}], above in {above}, below in {below}"
        )
    return "\n".join(lines)


def named(found: Values) -> str:
    """Every algorithm with SGD 0.1 and batches of 32, and by the rule."""
    lines = [
        "| algorithm | before | by the rule | gain: mean | median | least |",
        "| --- " + "| ---: " * 5 + "|",
    ]
    every: dict[str, list[float]] = defaultdict(list)
    for name in sorted({how.algorithm for by in found.values() for how in by if not how.form}):
        before = How(name, "", "usual", "mean", 0.0, "usual")
        after = How(name, "", "adam", "mean", 1.0, "rule")
        pairs = [
            (np.mean(list(found[s][before].values())), np.mean(list(found[s][after].values())))
            for s in SMALL
            if before in found.get(s, {}) and after in found[s]
        ]
        if len(pairs) < len(SMALL):
            continue
        gains = [b - a for a, b in pairs]
        every[name] = gains
        first, last = np.mean(pairs, axis=0)
        numbers = (
            f"{first:.1f} | {last:.1f} | {np.mean(gains):+.1f} | {np.median(gains):+.1f} | {min(gains):+.1f}"
        )
        lines.append(f"| `{name}` | {numbers} |")
    if every:
        by_federation = np.mean(list(every.values()), axis=0)
        low, high = stats.over_seeds(by_federation)
        lines.append(
            f"\nMean gain {by_federation.mean():+.1f} [{low:+.1f}, {high:+.1f}] over the federations."
        )
    return "\n".join(lines)


def targets(found: Values) -> str:
    """By how many percent each candidate is better than training alone at the same rate."""
    candidates = sorted({how for by in found.values() for how in by if how.algorithm != "local"})
    lines = []
    for factor in sorted({how.factor for how in candidates}, reverse=True):
        hows = [how for how in candidates if how.factor == factor]
        titles = " | ".join(f"{how.algorithm} {how.server}" for how in hows)
        lines += ["", f"rate x {factor:.2g}", f"| federation | alone | {titles} |"]
        for setting, by_how in found.items():
            alone = by_how.get(ALONE._replace(factor=factor), {})
            sign = 1 if setting in LABELS else -1
            cells = []
            for how in hows:
                seeds = sorted(set(alone) & set(by_how.get(how, {})))
                gains = np.array([100 * sign * (by_how[how][s] - alone[s]) / alone[s] for s in seeds])
                bounds = stats.over_seeds(gains) if len(gains) > 1 else None
                text = f"{gains.mean():+.1f}" if len(gains) else ""
                cells.append(text + (f" [{bounds[0]:+.1f}, {bounds[1]:+.1f}]" if bounds else ""))
            level = f"{np.mean(list(alone.values())):.3g}" if alone else ""
            lines.append(f"| {' | '.join([setting, level, *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("Forms of CO-PFL, validation samples\n")
    print(forms(values("validation", False)))
    print("\nThe decision on fresh seeds and test samples\n")
    print(confirmation(values("test", False)))
    print("\nNamed algorithms, validation samples\n")
    print(named(values("validation", False)))
    print("\nNamed algorithms, test samples\n")
    print(named(values("test", False)))
    for split in ("validation", "test"):
        print(f"\nTargets that are no classes, {split} samples\n")
        print(targets(values(split, True)))
