"""What `copfl run` reaches on natural federations of images, sounds and texts, where nobody names a method:
`python benchmarks/natural.py FOLDER [--of mail,spoken,writers] [--splits N] [--first SEED] [--out FILE]`

FOLDER has mail.parquet (text, kind, mailbox), spoken.npz and writers.npz (x, y, group). Of each site a third of the
rows, at most 200, are for testing, and 60 of the others for training; of the writers 60 take part. A line for each
split: the method that was chosen, its accuracy, and that of what sites have alone, as means over sites in per cent.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import copfl
from copfl.data.samples import CLASSIFICATION, Dataset, Samples

MOST_TESTED, TRAINED, MOST_SITES = 200, 60, 60
Columns = tuple[Any, Any, Any]  # samples, names of classes, names of sites


def _mail(folder: Path) -> Columns:
    from pyarrow.parquet import read_table

    table = read_table(folder / "mail.parquet")
    text, kind, mailbox = (np.array(table[name].to_pylist()) for name in ("text", "kind", "mailbox"))
    return text, kind, mailbox


def _arrays(name: str) -> Callable[[Path], Columns]:
    def read(folder: Path) -> Columns:
        with np.load(folder / f"{name}.npz") as arrays:
            return arrays["x"], arrays["y"], arrays["group"]

    return read


FEDERATIONS = {"mail": _mail, "spoken": _arrays("spoken"), "writers": _arrays("writers")}


def divided(name: str, columns: Columns, seed: int) -> Dataset:
    """The rows of a federation for training and for testing.

    Args:
        name: Of the federation.
        columns: Of all rows.
        seed: Of the sites that take part, and of their rows.
    """
    x, kinds, site = columns
    rng = np.random.default_rng(seed)
    classes, y = np.unique(kinds, return_inverse=True)
    sites = np.unique(site)
    sites = np.sort(rng.permutation(sites)[:MOST_SITES])
    train: list[Any] = []
    test: list[Any] = []
    for one in sites:
        rows = rng.permutation(np.flatnonzero(site == one))
        tested = min(MOST_TESTED, len(rows) // 3)
        test.append(rows[:tested])
        train.append(rows[tested : tested + TRAINED])

    def samples(of_sites: list[Any]) -> Samples:
        rows = np.concatenate(of_sites)
        return Samples(x[rows], y[rows], np.repeat(np.arange(len(of_sites)), [len(own) for own in of_sites]))

    names = tuple(map(str, classes)), tuple(map(str, sites))
    return Dataset(f"{name} {seed}", samples(train), samples(test), *names, kind=CLASSIFICATION)


def measured(dataset: Dataset, options: dict[str, Any]) -> dict[str, Any]:
    """What is chosen for these rows, and how good it is."""
    began = time.perf_counter()
    result = copfl.run(None, dataset, **options)
    record: dict[str, Any] = {
        "data": dataset.name,
        "algorithm": result.experiment.run.algorithm.name,
        "rounds": result.experiment.run.run.rounds,
        "accuracy": _percent(result.final("accuracy")),
    }
    if result.choice is not None:
        record["chosen"] = result.choice.federation
        record["losses"] = {name: round(v, 4) for name, v in result.choice.validated.means.items()}
    if result.rivals is not None:
        record["alone"] = {
            name: _percent(values.tested["accuracy"]) for name, values in result.rivals.values.items()
        }
    return record | {"seconds": round(time.perf_counter() - began, 1)}


def _percent(of_sites: Any) -> float:
    return round(100 * float(np.nanmean(of_sites)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", default=",".join(FEDERATIONS))
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first split")
    parser.add_argument("--rounds", type=int, default=0, help="at most; 0: those that the choice finds")
    parser.add_argument("--out", type=Path, default=Path("natural.jsonl"))
    arguments = parser.parse_args()
    options = {"rounds": arguments.rounds} if arguments.rounds else {}
    for name in arguments.of.split(","):
        columns = FEDERATIONS[name](arguments.folder)
        found = []
        for seed in range(arguments.first, arguments.first + arguments.splits):
            record = measured(divided(name, columns, seed), options)
            found.append(record["accuracy"])
            line = json.dumps(record)
            print(line, flush=True)
            with arguments.out.open("a") as file:
                file.write(line + "\n")
        print(f"{name}: {np.mean(found):.2f} % over {len(found)} splits", flush=True)


if __name__ == "__main__":
    main()
