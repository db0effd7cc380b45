"""The demo (`copfl run` without options) over several seeds: studies/defaults/demo.md.

    python benchmarks/demo.py --seeds 10 11 12 13 14 15 16 17 18 19

Each seed has its own clients, initial weights and batches. Intervals are 95 % t intervals over the seeds of the
paired differences.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import copfl
from copfl.stats import over_seeds

ROUNDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10, 20)))
    seeds = parser.parse_args().seeds
    print("| seed | alone | global | personal | over alone | over global | clients that gain |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    rows = []
    for seed in seeds:
        rows.append(means(seed))
        show(seed, rows[-1])
    table = np.array(rows)  # [seeds, 6]
    show("mean", table.mean(0))
    for other, gains in (("alone", table[:, 3]), ("global", table[:, 4])):
        low, high = over_seeds(gains)
        print(f"personal minus {other}: {gains.mean():+.1f} points [{low:+.1f}, {high:+.1f}]")


def show(name: object, values: Sequence[float]) -> None:
    print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + " |", flush=True)


def means(seed: int) -> list[float]:
    """Means over the clients in %: alone, global, personal, both differences, and the share that gains."""
    settings = {"rounds": ROUNDS, "eval_every": ROUNDS, "local_baseline": True}
    gains = copfl.run(preset="demo", seed=seed, **settings).gains
    assert gains is not None
    values = (gains.alone, gains.global_model, gains.personal, gains.gain, gains.over_global)
    return [*(100 * float(each.mean()) for each in values), 100 * gains.share]


if __name__ == "__main__":
    main()
