"""copfl's default and `choose` on the rows of FLamby's hospitals, and what each hospital has alone.

    python -m studies.published.heart_beside [--seeds 5] [--budget 2m]

The patients, the columns and the test rows are those of the published table; how to train was left open. A seed is
another draw of folds, forests and initial weights. Of `choose` the first seed is shown.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import numpy as np

import copfl
from copfl.data.samples import Dataset
from copfl.data.tables.columns import DataTable
from copfl.data.tables.tables import from_tables
from copfl.experiment.analysis.against_rivals import RIVALS
from copfl.rivals.records import Rivals
from copfl.tables import Table, as_markdown
from studies.published.flamby_heart import divided, table_of_flamby

CATEGORIES = "cp,restecg"  # as the published table has them
METRICS = "accuracy", "auc", "log_loss"
Means = dict[str, float]


def hospitals() -> Dataset:
    """The rows as a table that copfl encodes by itself."""
    table = table_of_flamby()
    parts = [table.iloc[np.concatenate(rows)] for rows in divided(table)]
    tables = [DataTable.of({name: part[name].to_numpy() for name in part}) for part in parts]
    return from_tables(tables, "flamby-heart", target="disease", client="hospital", categories=CATEGORIES)


def means(rivals: Rivals, alone: str = "") -> Means:
    """The mean over hospitals of each metric, of the personal models, or of a kind of model that each has alone."""
    of = rivals.values[alone].tested if alone else rivals.personal
    return {name: float(np.nanmean(of[name])) for name in METRICS}


def measured(seeds: int, budget: str) -> dict[str, list[Means]]:
    """By model, of each seed."""
    dataset, found = hospitals(), dict[str, list[Means]]()
    for seed in range(seeds):
        result = copfl.run(dataset=dataset, seed=seed)
        if result.rivals is None or result.choice is None:
            raise ValueError("a first run on a table has rivals and a choice")
        for name in result.rivals.values:
            found.setdefault(f"{name} alone", []).append(means(result.rivals, name))
        found.setdefault("copfl's default", []).append(means(result.rivals))
        print(f"seed {seed}: the default took {result.choice.federation}", flush=True)
    with tempfile.TemporaryDirectory() as out:
        choice = copfl.choose(dataset=dataset, budget=budget, out=out)
        rivals = RIVALS.read(Path(out) / "chosen")
        print(f"choose took {choice.rival or choice.chosen}", flush=True)
    if rivals is not None:
        found["copfl choose"] = [means(rivals, choice.rival)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", default="2m")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [
        [
            name,
            *(f"{np.mean([one[metric] for one in of_seeds]):.3f}" for metric in METRICS),
            f"{len(of_seeds)}",
        ]
        for name, of_seeds in measured(chosen.seeds, chosen.budget).items()
    ]
    print(as_markdown(Table("", ["", "accuracy", "AUC", "log loss", "seeds"], rows)))


if __name__ == "__main__":
    main()
