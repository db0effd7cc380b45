"""Prints the tables of named.md from the records: python studies/defaults/analyse_named.py.

The tables of the decision on fresh seeds are also written to the page.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from named import SMALL, TARGETS  # type: ignore[import-not-found]
from numpy.typing import NDArray

from copfl import stats

RECORDS, PAGE = (Path(__file__).with_name(name) for name in ("named.jsonl.gz", "named.md"))
BEGIN, END = "<!-- confirmation: begin -->", "<!-- confirmation: end -->"
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
    columns = {
        "the default": NEW,
        "with FedExP's step": WITH_STEP,
        "the default before": BEFORE,
        "published, rule's rate": PUBLISHED,
        "training alone": ALONE,
        "FedPer": FEDPER,
    }
    titles = {how: title for title, how in columns.items()}
    complete = {
        setting: sorted(set.intersection(*(set(by_how.get(how, {})) for how in columns.values())))
        for setting, by_how in found.items()
    }
    per_seed = {  # by federation and candidate, [seeds]
        setting: {how: np.array([found[setting][how][seed] for seed in seeds]) for how in titles}
        for setting, seeds in complete.items()
        if seeds
    }
    lines = [
        f"| federation | {' | '.join(columns)} | the default - training alone |",
        "| --- " + "| ---: " * (len(columns) + 1) + "|",
    ]
    for setting, by_how in per_seed.items():
        means = [f"{by_how[how].mean():.1f}" for how in titles]
        gains = by_how[NEW] - by_how[ALONE]
        lines.append(f"| {setting} | {' | '.join(means)} | {_interval(gains)} |")
    pairs = [(NEW, BEFORE), (NEW, PUBLISHED), (NEW, ALONE), (NEW, FEDPER), (WITH_STEP, NEW)]
    pairs += [(WITH_STEP, ALONE), (FEDPER, ALONE)]
    lines += [
        "",
        "| difference | mean over the federations | above in | below in |",
        "| --- | ---: | ---: | ---: |",
    ]
    for first, second in pairs:
        gains = np.array([(by_how[first] - by_how[second]).mean() for by_how in per_seed.values()])
        counts = f"{(gains > 0).sum()} | {(gains < 0).sum()}"
        lines.append(f"| {titles[first]} - {titles[second]} | {_interval(gains)} | {counts} |")
    return "\n".join(lines)


def _interval(gains: NDArray[Any]) -> str:
    """The mean with a 95 % interval by Student's t."""
    low, high = stats.over_seeds(gains)
    return f"{gains.mean():+.1f} [{low:+.1f}, {high:+.1f}]"


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


def page(text: str) -> str:
    """The page with the tables of the decision on fresh seeds."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{confirmation(values('test', False))}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
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
