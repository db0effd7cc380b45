"""The regret of the rules of `copfl choose` on stored records, without training.

    python benchmarks/choose_records.py studies/paper/results

The records have the curves of many methods on the test samples of five seeds. Here a race sees those of the
seeds 0, 1 and 2, and its regret is measured with the seeds 3 and 4, which have other clients, samples and
initial weights. So no validation samples are held out, and the race has as many samples as the test.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from copfl.comparison.choosing.budget import cost, plan
from copfl.stats import averaged

RACED, TESTED = (0, 1, 2), (3, 4)
LEAST = 6  # candidates of a setting
Curve = list[tuple[int, float]]  # round and accuracy in points, of each evaluation
Curves = dict[str, dict[int, Curve]]  # by candidate and seed


def settings(folder: Path) -> dict[str, Curves]:
    """By setting, the candidates that have all seeds."""
    found: dict[str, Curves] = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            record = json.loads(line)
            if record.get("validation") != 0:
                continue
            tables = record["tables"]
            run = {
                key: value for key, value in tables["run"].items() if key not in ("clients", "rounds", "seed")
            }
            titles = ("data", "partition", "attack")
            place = [*map(tables.get, titles), tables["run"]["clients"], tables["run"]["rounds"]]
            rest = {title: own for title, own in tables.items() if title not in (*titles, "run")}
            curve = [
                (number, 100 * value)
                for number, value in zip(record["rounds"], record["curves"]["accuracy"], strict=True)
            ]
            one = found.setdefault(json.dumps(place), {}).setdefault(json.dumps([rest, run]), {})
            one[tables["run"]["seed"]] = curve
    wanted = {*RACED, *TESTED}
    whole = {
        place: {name: seeds for name, seeds in curves.items() if wanted <= seeds.keys()}
        for place, curves in found.items()
    }
    return {place: curves for place, curves in whole.items() if len(curves) >= LEAST}


def value(curve: Curve, rounds: float = math.inf) -> float:
    """The mean of the last third of the evaluations up to this round, at most five."""
    values = [accuracy for number, accuracy in curve if number <= rounds] or [curve[0][1]]
    return fmean(values[-averaged(len(values)) :])


def raced(curves: Curves, rounds: int, seeds: tuple[int, ...]) -> tuple[str, float]:
    """The choice, and the cost as a fraction of the full comparison's."""
    full = len(curves) * rounds * len(seeds)
    stages, order = plan(rounds, len(seeds), len(curves), full / 3), list(curves)
    for stage in stages:
        means = {
            name: fmean(value(curves[name][seed], stage.rounds) for seed in seeds[: stage.seeds])
            for name in order[: stage.candidates]
        }
        order = sorted(means, key=lambda name: -means[name])
    return order[0], cost(stages) / full


def described(candidate: str) -> str:
    tables: dict[str, Any] = json.loads(candidate)[0]
    return f"{tables['algorithm']['name']}, {tables['optimizer']['name']}"


def main() -> None:
    print("| setting | candidates | best in hindsight | test, % | chosen, by first seed | regret | cost |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    all_regrets, all_costs = [], []
    for place, curves in settings(Path(sys.argv[1])).items():
        data, partition, attack, clients, rounds = json.loads(place)
        tested = {name: fmean(value(own[seed]) for seed in TESTED) for name, own in curves.items()}
        best = max(tested, key=lambda name: tested[name])
        orders = [RACED[first:] + RACED[:first] for first in range(len(RACED))]
        races = [raced(curves, rounds, order) for order in orders]
        regret = fmean(tested[best] - tested[chosen] for chosen, _ in races)
        price = fmean(spent for _, spent in races)
        all_regrets.append(regret)
        all_costs.append(price)
        chosen = "; ".join(described(name) for name, _ in races)
        title = f"{data['name']}, {partition['name']}, {clients} clients"
        title += f", {attack['name']}" if attack else ""
        numbers = f"{described(best)} | {tested[best]:.2f} | {chosen} | {regret:.2f} | {price:.2f}"
        print(f"| {title} | {len(curves)} | {numbers} |", flush=True)
    print(f"| mean | | | | | {fmean(all_regrets):.2f} | {fmean(all_costs):.2f} |")


if __name__ == "__main__":
    main()
