"""The regret of `copfl choose`: seven federations, against a full comparison on the test samples.

    python benchmarks/choose.py OUT                      digits; the table is in OUT/choose.md and choose.json
    python benchmarks/choose.py OUT --data-dir FOLDER    and CIFAR-10

The race sees validation samples, a part of each client's training samples. Its regret is the test metric of
the best method of the full comparison minus that of the chosen one, both trained on all training samples and
averaged over the seeds. Its spread is over the seeds. There is a race for each seed as the first one, as the
first stages have that seed alone. Finished runs in OUT are used again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import copfl
from copfl.comparison.choosing.ranking import ALIKE
from copfl.data.sets.datasets import load
from copfl.tables import Table, as_markdown

ALGORITHMS = [
    "local", "fedavg", "fedper", "fedrep:head_epochs=2", "fedbabu:tune_epochs=1", "ditto", "apfl", "fedala",
    "fedselect", "copfl",
]  # fmt: skip
SEEDS = (4, 5, 6)  # others were used to find the rules
ROUNDS = 12
BASE: dict[str, dict[str, Any]] = {
    "model": {"name": "mlp"},
    "optimizer": {"name": "adam", "lr": 0.005},
    "run": {"rounds": ROUNDS, "batch": 32, "engine": "vmap", "eval_models": "final"},
}


class Setting(NamedTuple):
    """A federation, as tables of settings beside BASE."""

    name: str
    tables: dict[str, dict[str, Any]]


def settings(folder: Path, data_dir: str | None = None) -> list[Setting]:
    """The federations; two of them are files that are written to the folder."""
    shifted, wrong = feature_shift(folder / "feature-shift.npz"), wrong_labels(folder / "wrong-labels.npz")
    digits = {"name": "digits"}
    groups = {"name": "by_group"}
    result = [
        Setting(
            "two classes",
            {"data": digits, "partition": {"name": "classes", "per_client": 2, "train_per_class": 50}},
        ),
        Setting("Dirichlet 0.3", {"data": digits, "partition": {"name": "dirichlet", "alpha": 0.3}}),
        Setting("feature shift", {"data": {"name": str(shifted)}, "partition": groups}),
        Setting("wrong labels", {"data": {"name": str(wrong)}, "partition": groups}),
        Setting("unequal sizes", {"data": digits, "partition": {"name": "quantity", "alpha": 0.5}}),
        Setting(
            "many small clients",
            {
                "data": digits,
                "partition": {"name": "classes", "per_client": 3, "train_per_class": 8},
                "run": {"clients": 60, "batch": 8},
            },
        ),
    ]
    if data_dir is not None:
        sizes = {"per_client": 2, "train_per_class": 50, "test_per_class": 30}
        cifar = {"data": {"name": "cifar10", "dir": data_dir}, "partition": {"name": "classes", **sizes}}
        result.append(Setting("CIFAR-10, two classes", {**cifar, "model": {"name": "cnn"}}))
    return result


def feature_shift(path: Path, clients: int = 8) -> Path:
    """Digits whose pixels each client sees turned, with a gain of its own."""
    data, rng = load("digits"), np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for name, part in (("", data.train), ("_test", data.test)):
        group = rng.integers(0, clients, len(part))
        x = np.array(part.x)
        for client in range(clients):
            own = group == client
            turned = np.rot90(x[own], client % 4, (2, 3))
            x[own] = np.clip((0.5 + 0.1 * client) * turned, 0, 255).astype(np.uint8)
        arrays |= {f"x{name}": x, f"y{name}": part.y, f"group{name}": group}
    np.savez_compressed(path, **arrays)
    return path


def wrong_labels(path: Path, clients: int = 10, fraction: float = 0.3) -> Path:
    """Digits of which three clients have wrong labels in training; a client has half of the classes."""
    data, rng = load("digits"), np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    for name, part in (("", data.train), ("_test", data.test)):
        y = np.array(part.y)
        group = (2 * rng.integers(0, clients // 2, len(y)) + (y >= 5)).astype(np.int64)
        if not name:
            wrong = (group < 3) & (rng.random(len(y)) < fraction)
            y = np.where(wrong, rng.integers(0, 10, len(y)), y)
        arrays |= {f"x{name}": part.x, f"y{name}": y, f"group{name}": group}
    np.savez_compressed(path, **arrays)
    return path


def merged(setting: Setting) -> dict[str, dict[str, Any]]:
    """BASE with the tables of the setting."""
    titles = {*BASE, *setting.tables}
    return {title: {**BASE.get(title, {}), **setting.tables.get(title, {})} for title in titles}


def full(setting: Setting, out: Path) -> dict[str, list[float]]:
    """The test metric of every method after all rounds, in points, of each seed."""
    found = copfl.compare(
        ALGORITHMS, seeds=SEEDS, base_tables=merged(setting), out=out / "full", tune={}, last=5, log=print
    )
    return {row.label: [100 * run.mean() for run in row.outcomes] for row in found.rows}


def raced(setting: Setting, out: Path, tested: dict[str, list[float]], races: int) -> list[dict[str, Any]]:
    """Races with another seed as the first one. They share their runs, and each counts all that it uses."""
    best = max(tested, key=lambda name: float(np.mean(tested[name])))
    result = []
    for place in range(races):
        seeds = SEEDS[place:] + SEEDS[:place]
        found = copfl.choose(
            ALGORITHMS, seeds=seeds, base_tables=merged(setting), out=out / "race", retrain=False, log=print
        )
        print(found)
        each = np.subtract(tested[best], tested[found.chosen])
        most = np.max(list(tested.values()), 0) - tested[found.chosen]
        result.append(
            {
                "chosen": found.chosen,
                "regret": float(each.mean()),
                "spread": float(each.std(ddof=1)),
                "to the best of each seed": float(most.mean()),
                "cost": found.spent / (len(tested) * ROUNDS * len(SEEDS)),
                "alike": [row.label for row in found.ranking if row.status == ALIKE],
            }
        )
    return result


def table(results: list[dict[str, Any]]) -> str:
    """A row of each setting, and the means."""
    head = ["setting", "best in hindsight", "test, %", "chosen, by first seed", "regret", "spread"]
    head += ["to the best of each seed", "cost", "not distinguishable"]
    rows = []
    for one in results:
        races, best = one["races"], one["best"]
        numbers = [
            f"{np.mean([race[key] for race in races]):.2f}"
            for key in ("regret", "spread", "to the best of each seed", "cost")
        ]
        chosen = "; ".join(race["chosen"] for race in races)
        alike = "; ".join(", ".join(race["alike"]) or "none" for race in races)
        rows.append([one["setting"], best, f"{np.mean(one['test'][best]):.2f}", chosen, *numbers, alike])
    every = [
        f"{np.mean([np.mean([race[key] for race in one['races']]) for one in results]):.2f}"
        for key in ("regret", "spread", "to the best of each seed", "cost")
    ]
    return as_markdown(Table("Regret of copfl choose", head, [*rows, ["mean", "", "", "", *every, ""]]))


def main() -> None:
    parser = argparse.ArgumentParser(description="The regret of copfl choose")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data-dir", help="a folder with cifar-10-batches-py; without it, digits alone")
    parser.add_argument("--races", type=int, default=len(SEEDS), help="of each setting, 1 to 3")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = []
    for setting in settings(given.out, given.data_dir):
        out = given.out / setting.name.replace(" ", "-")
        tested = full(setting, out)
        best = max(tested, key=lambda name: float(np.mean(tested[name])))
        races = raced(setting, out, tested, given.races)
        results.append({"setting": setting.name, "best": best, "test": tested, "races": races})
        (given.out / "choose.md").write_text(table(results) + "\n", "utf-8")
        (given.out / "choose.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
