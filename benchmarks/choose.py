"""The regret of `copfl choose`: six federations, against a full comparison on the test samples.

    python benchmarks/choose.py OUT            the table, in OUT/choose.md and OUT/choose.json
    python benchmarks/choose.py OUT --full     the full comparisons alone

The race sees validation samples, a part of each client's training samples. Its regret is the test metric of
the best method of the full comparison minus that of the chosen one, both trained on all training samples.
Finished runs in OUT are used again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import copfl
from copfl.data.datasets import load
from copfl.tables import Table, as_markdown

ALGORITHMS = [
    "local", "fedavg", "fedavg_ft", "fedper", "fedrep", "fedbabu", "ditto", "apfl", "fedala", "mr_mtl",
    "fedselect", "copfl",
]  # fmt: skip
SEEDS = (0,)
ROUNDS = 16
BASE: dict[str, dict[str, Any]] = {
    "model": {"name": "mlp"},
    "optimizer": {"name": "adam", "lr": 0.003},
    "run": {"rounds": ROUNDS, "batch": 16, "engine": "vmap"},
}


class Setting(NamedTuple):
    """A federation, as tables of settings beside BASE."""

    name: str
    tables: dict[str, dict[str, Any]]


def settings(folder: Path) -> list[Setting]:
    """The six federations; two of them are files that are written to the folder."""
    shifted, wrong = feature_shift(folder / "feature-shift.npz"), wrong_labels(folder / "wrong-labels.npz")
    digits = {"name": "digits"}
    groups = {"name": "by_group"}
    return [
        Setting("two classes", {"data": digits, "partition": {"name": "classes", "per_client": 2}}),
        Setting("Dirichlet 0.3", {"data": digits, "partition": {"name": "dirichlet", "alpha": 0.3}}),
        Setting("feature shift", {"data": {"name": str(shifted)}, "partition": groups}),
        Setting("wrong labels", {"data": {"name": str(wrong)}, "partition": groups}),
        Setting("unequal sizes", {"data": digits, "partition": {"name": "quantity", "alpha": 0.5}}),
        Setting(
            "many small clients",
            {"data": digits, "partition": {"name": "dirichlet", "alpha": 0.5}, "run": {"clients": 60}},
        ),
    ]


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


def full(setting: Setting, out: Path) -> dict[str, float]:
    """The test metric of every method after all rounds, the mean over the seeds."""
    folder = out / setting.name.replace(" ", "-") / "full"
    found = copfl.compare(ALGORITHMS, SEEDS, merged(setting), folder, tune={}, log=print)
    return {row.label: float(np.mean([run.mean() for run in row.outcomes])) for row in found.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="The regret of copfl choose")
    parser.add_argument("out", type=Path)
    parser.add_argument("--full", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows, content = [], []
    for setting in settings(given.out):
        tested = full(setting, given.out)
        if given.full:
            continue
        folder = given.out / setting.name.replace(" ", "-") / "race"
        found = copfl.choose(ALGORITHMS, seeds=SEEDS, base_tables=merged(setting), out=folder, retrain=False)
        best = max(tested, key=lambda name: tested[name])
        regret = 100 * (tested[best] - tested[found.chosen])
        cost = found.spent / (len(ALGORITHMS) * ROUNDS * len(SEEDS))
        numbers = [100 * tested[found.chosen], best, 100 * tested[best], regret, cost]
        shown = [f"{n:.2f}" if isinstance(n, float) else n for n in numbers]
        alike = ", ".join(row.label for row in found.ranking if row.status == "not distinguishable")
        rows.append([setting.name, found.chosen, *shown, alike or "none"])
        print(found)
        one = {
            "setting": setting.name,
            "chosen": found.chosen,
            "regret": regret,
            "cost": cost,
            "test": tested,
        }
        content.append(one)
    if rows:
        head = ["setting", "chosen", "test, %", "best in hindsight", "test, %", "regret, points", "cost"]
        head.append("not distinguishable")
        mean = [float(np.mean([row[key] for row in content])) for key in ("regret", "cost")]
        rows.append(["mean", "", "", "", "", f"{mean[0]:.2f}", f"{mean[1]:.2f}", ""])
        text = as_markdown(Table("Regret of copfl choose", head, rows))
        (given.out / "choose.md").write_text(text + "\n", "utf-8")
        (given.out / "choose.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        print(text)


if __name__ == "__main__":
    main()
