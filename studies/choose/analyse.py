"""Prints the regret of `copfl choose` from the records: python studies/choose/analyse.py records.jsonl.gz [400].

The number is the first seed: 410 of the confirmation, 400 of the development. A race sees the seeds RACED, on
validation samples. The regret of a choice is the largest test accuracy of any candidate minus that of the
choice, both means over the seeds TESTED. A part of it is noise: the largest of many means is too large. What
the best candidate by one tested seed loses on the other one shows how much.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from copfl.comparison.choosing.budget import cost, plan
from copfl.stats import averaged

sys.path.append(str(Path(__file__).parent))
from study import CONFIRMATION, RACED, TESTED  # type: ignore[import-not-found]

BUDGET = 1 / 3  # of the full comparison


class Candidate(NamedTuple):
    algorithm: str
    server: str
    lr: float

    def __str__(self) -> str:
        step = "" if self.server == "mean" else f" + {self.server}"
        return f"`{self.algorithm}`{step}, {self.lr:g}"


Curves = dict[Candidate, dict[int, list[float]]]  # by seed, the accuracy in points of every round


def read(path: Path, first_seed: int) -> dict[str, Curves]:
    """By setting, the candidates that have all seeds, which count from the first one."""
    settings: dict[str, Curves] = {}
    for line in map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines()):
        candidate = Candidate(line["algorithm"], line["server"], line["lr"])
        curves = settings.setdefault(line["setting"], {}).setdefault(candidate, {})
        curves[line["seed"] - first_seed] = [100 * value for value in line["curve"]]
    whole = {
        name: {one: curves for one, curves in candidates.items() if curves.keys() >= {*RACED, *TESTED}}
        for name, candidates in settings.items()
    }
    return {name: candidates for name, candidates in whole.items() if candidates}


def value(curve: list[float], rounds: int | None = None) -> float:
    """The mean of the last third of the rounds up to this one, at most five."""
    values = curve[:rounds]
    return fmean(values[-averaged(len(values)) :])


def race(curves: Curves, seeds: tuple[int, ...], budget: float) -> tuple[Candidate, float]:
    """The choice, and the cost as a fraction of the full comparison's."""
    rounds = len(next(iter(curves.values()))[seeds[0]])
    full, order = len(curves) * rounds * len(seeds), list(curves)
    stages = plan(rounds, len(seeds), len(curves), full * budget)
    for stage in stages:
        means = {
            one: fmean(value(curves[one][seed], stage.rounds) for seed in seeds[: stage.seeds])
            for one in order[: stage.candidates]
        }
        order = sorted(means, key=lambda one: -means[one])
    return order[0], cost(stages) / full


def compared(curves: Curves, seeds: tuple[int, ...]) -> Candidate:
    """The best one of a full comparison on validation samples."""
    return max(curves, key=lambda one: fmean(value(curves[one][seed]) for seed in seeds))


def main() -> None:
    orders = [RACED[first:] + RACED[:first] for first in range(len(RACED))]
    print(
        "| setting | candidates | training alone | best in hindsight | test, % | chosen, by first seed | regret "
        "| of a full comparison | by one test seed | cost |"
    )
    print("| --- | ---: | ---: | --- | ---: | --- | ---: | ---: | ---: | ---: |")
    totals = []
    first_seed = int(sys.argv[2]) if len(sys.argv) > 2 else CONFIRMATION
    for name, curves in read(Path(sys.argv[1]), first_seed).items():
        by_seed = {one: [value(own[seed]) for seed in TESTED] for one, own in curves.items()}
        tested = {one: fmean(values) for one, values in by_seed.items()}
        best = max(tested, key=lambda one: tested[one])
        races = [race(curves, order, BUDGET) for order in orders]
        regret = fmean(tested[best] - tested[chosen] for chosen, _ in races)
        full = tested[best] - tested[compared(curves, RACED)]
        by_one = [max(by_seed, key=lambda one: by_seed[one][place]) for place in range(len(TESTED))]
        noise = tested[best] - fmean(
            fmean(by_seed[one][other] for other in range(len(TESTED)) if other != place)
            for place, one in enumerate(by_one)
        )
        price = fmean(spent for _, spent in races)
        alone = max(mean for one, mean in tested.items() if one.algorithm == "local")
        totals.append((regret, full, noise, price))
        chosen = "; ".join(dict.fromkeys(str(one) for one, _ in races))
        print(
            f"| {name} | {len(curves)} | {alone:.1f} | {best} | {tested[best]:.1f} | {chosen} | {regret:.2f} "
            f"| {full:.2f} | {noise:.2f} | {price:.2f} |"
        )
    means = " | ".join(f"{fmean(column):.2f}" for column in zip(*totals, strict=True))
    print(f"| mean | | | | | | {means} |")


if __name__ == "__main__":
    main()
