"""Prints the tables of the study from its records: python studies/select/analyse.py RECORDS.jsonl[.gz].

A difference is between two rules on the same clients, in points of test accuracy: the mean over clients, then
over the runs. Its 95 % interval resamples the settings, and of each its seeds.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
DRAWS = 10_000
PATIENCE = (3, 5, 10)


class Run(NamedTuple):
    """The accuracies [rounds, clients] of one run, and the validation samples of each client."""

    test: Numbers
    validation: Numbers
    validation_loss: Numbers
    samples: Numbers


class Cell(NamedTuple):
    setting: str
    seed: int


def read(path: Path) -> dict[str, dict[float, dict[Cell, Run]]]:
    """By algorithm and fraction."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: dict[str, dict[float, dict[Cell, Run]]] = {}
    for line in map(json.loads, text.decode().splitlines()):
        if "error" not in line:
            run = Run(*(np.array(line[name], np.float64) for name in Run._fields))
            cells = found.setdefault(line["algorithm"], {}).setdefault(line["fraction"], {})
            cells[Cell(line["setting"], line["seed"])] = run
    return found


# Rules: the test accuracy of each client in the round that the rule chooses.


def last(run: Run) -> Numbers:
    return run.test[-1]


def _chosen(run: Run, scores: Numbers, later: bool) -> Numbers:
    """In each client's round with the highest score, of equals the later or the earlier; else the last."""
    known = np.where(np.isnan(scores), -np.inf, scores)
    place = len(known) - 1 - known[::-1].argmax(0) if later else known.argmax(0)
    place = np.where(np.isinf(known).all(0), len(known) - 1, place)
    return run.test[place, np.arange(run.test.shape[1])]


def best(run: Run) -> Numbers:
    """run.select="best"."""
    return _chosen(run, run.validation, later=True)


def best_earlier(run: Run) -> Numbers:
    return _chosen(run, run.validation, later=False)


def best_loss(run: Run) -> Numbers:
    return _chosen(run, -run.validation_loss, later=True)


def best_common(run: Run) -> Numbers:
    """One round for all: the best mean over the validation samples of all clients."""
    correct = np.nansum(run.validation * run.samples, 1)
    return run.test[len(correct) - 1 - correct[::-1].argmax()]


def on_test(run: Run) -> Numbers:
    """What a choice by the test samples would claim."""
    return _chosen(run, run.test, later=True)


RULES: dict[str, Callable[[Run], Numbers]] = {
    "best": best,
    "best, the earlier of equals": best_earlier,
    "best by validation loss": best_loss,
    "one round for all": best_common,
    "chosen on test samples": on_test,
}


def interval(values: Mapping[Cell, float]) -> tuple[float, float, float]:
    """The mean over the settings of the mean over their seeds, and the ends of its interval."""
    by_setting: dict[str, list[float]] = {}
    for cell, value in values.items():
        by_setting.setdefault(cell.setting, []).append(value)
    groups, rng = [np.array(group) for group in by_setting.values()], np.random.default_rng(0)
    drawn = np.stack([rng.choice(group, (DRAWS, len(group))).mean(1) for group in groups])
    means = drawn[rng.integers(len(groups), size=(len(groups), DRAWS)), np.arange(DRAWS)].mean(0)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.mean([group.mean() for group in groups])), float(low), float(high)


def shown(values: Mapping[Cell, float]) -> str:
    mean, low, high = interval(values)
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def difference(own: Numbers, other: Numbers) -> float:
    """The mean over the clients that both have, in points."""
    return float(100 * np.nanmean(own - other))


def stopped(run: Run, patience: int) -> tuple[float, float]:
    """The fraction of the rounds until no client improved for so many, and what stopping there costs in points."""
    highest, since = np.full(run.test.shape[1], -np.inf), 0
    for place, row in enumerate(np.nan_to_num(run.validation, nan=-np.inf)):
        since = 0 if (row > highest).any() else since + 1
        highest = np.maximum(highest, row)
        if since >= patience or place == len(run.test) - 1:
            break
    early = best(Run(run.test[: place + 1], run.validation[: place + 1], *run[2:]))
    return (place + 1) / len(run.test), difference(early, best(run))


def main() -> None:
    found = read(Path(sys.argv[1]))
    fractions = sorted({fraction for cells in found.values() for fraction in cells if fraction})
    for fraction in fractions:
        print(f"\n## {fraction:g} of the training samples for validation\n")
        titles = ("algorithm", "runs", *(f"{name} - last" for name in RULES))
        print(f"| {' | '.join(titles)} |\n| --- {'| ---: ' * (len(titles) - 1)}|")
        for algorithm, cells in found.items():
            runs = cells.get(fraction, {})
            values = [
                shown({cell: difference(rule(run), last(run)) for cell, run in runs.items()})
                for rule in RULES.values()
            ]
            print(f"| `{algorithm}` | {len(runs)} | {' | '.join(values)} |")
        print(
            "\n| algorithm | held out - all samples, last rounds | best with held out - last with all samples |"
        )
        print("| --- | ---: | ---: |")
        for algorithm, cells in found.items():
            whole, part = cells.get(0.0, {}), cells.get(fraction, {})
            both = sorted(whole.keys() & part.keys())
            costs = {cell: difference(last(part[cell]), last(whole[cell])) for cell in both}
            net = {cell: difference(best(part[cell]), last(whole[cell])) for cell in both}
            print(
                f"| `{algorithm}` | {shown(costs)} | {shown(net)} |" if both else f"| `{algorithm}` | - | - |"
            )
        print("\n| patience | rounds trained | cost of stopping |\n| ---: | ---: | ---: |")
        everything: dict[Cell, Any] = {
            Cell(f"{algorithm} {cell.setting}", cell.seed): run
            for algorithm, cells in found.items()
            for cell, run in cells.get(fraction, {}).items()
        }
        for patience in PATIENCE:
            ends = {cell: stopped(run, patience) for cell, run in everything.items()}
            trained = 100 * np.mean([part for part, _ in ends.values()])
            print(
                f"| {patience} | {trained:.0f} % | {shown({cell: cost for cell, (_, cost) in ends.items()})} |"
            )
        print("\n| setting | best - last | held out - all samples |\n| --- | ---: | ---: |")
        settings = dict.fromkeys(cell.setting for cells in found.values() for cell in cells.get(fraction, {}))
        for name in settings:
            gains, costs = [], []
            for cells in found.values():
                for cell, run in cells.get(fraction, {}).items():
                    if cell.setting == name:
                        gains.append(difference(best(run), last(run)))
                        if cell in cells.get(0.0, {}):
                            costs.append(difference(last(run), last(cells[0.0][cell])))
            cost = f"{np.mean(costs):+.2f}" if costs else "-"
            print(f"| {name} | {np.mean(gains):+.2f} | {cost} |")


if __name__ == "__main__":
    main()
